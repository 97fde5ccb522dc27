"""A source with MXFP4 experts: read as transformers reads it, trained, exported in bf16, or refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

import halo_core
from halo_core import plan, registry
from halo_core.checkpoint.ep_shards import export_parts
from halo_core.checkpoint.export import export
from halo_core.checkpoint.merge import merge
from halo_core.config import read
from halo_core.errors import Refused
from halo_core.kernels.experts.reference import reference
from halo_core.models import packed, source
from halo_core.models.build import build_meta
from halo_core.models.dequantise import DequantisedSlice
from halo_core.models.load import load_weights
from halo_core.models.safetensors_files import read_file
from tests.packed_sources import VALUES, write_packed, write_state

REGISTRY = registry.load()
ARCHITECTURE = next(a for a in REGISTRY.architectures() if a.name == "gpt_oss")
FORMS: dict[str, dict[str, Any]] = {
    "single": {}, "sharded": {"files": 3}, "scales-apart": {"files": 3, "scales_apart": True},
}  # fmt: skip
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("packed")
    return {form: write_packed(ARCHITECTURE, root / form, **how) for form, how in FORMS.items()}


@pytest.fixture
def copied(folders: dict[str, Path], tmp_path: Path) -> Path:
    shutil.copytree(folders["single"], tmp_path / "copied")
    return tmp_path / "copied"


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16, architecture: Any = ARCHITECTURE) -> Any:
    config = json.loads((folder / "config.json").read_text())
    model = build_meta(architecture, config, dtype=dtype, experts=reference)
    load_weights(model, folder, architecture)
    return model


def trained(folder: Path) -> Any:
    model = loaded(folder)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def of_transformers(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bits, so that -0.0 is not 0.0 and NaN is NaN."""
    return tensor.detach().contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_is_bit_for_bit_the_one_that_transformers_dequantises(
    form: str, dtype: torch.dtype, folders: dict[str, Path]
) -> None:
    ours, theirs = loaded(folders[form], dtype).state_dict(), of_transformers(folders[form], dtype).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(bits(ours[name]), bits(theirs[name]))] == []


def test_every_byte_under_every_scale_is_bit_for_bit_that_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 256, 1, 1)
    blocks[1] = blocks[1].flip(-1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(2, 1, 16)
    found, wanted = DequantisedSlice(blocks, scales)[...], convert_moe_packed_tensors(blocks, scales)
    numbers = ~wanted.isnan()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(bits(found)[numbers], bits(wanted)[numbers])
    # And by hand: byte 0x9F under scale 128 is -6 and then -0.5, twice as large.
    assert found[0, 2 * 0x9F, 128] == 2 * VALUES[0xF] and found[0, 2 * 0x9F + 1, 128] == 2 * VALUES[0x9]


class Watched:
    """A stored tensor that keeps which experts and rows were asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.asked = tensor, []

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        self.asked.append([(part.start, part.stop) for part in index])
        return self.tensor[index]


def test_a_slice_reads_its_own_experts_and_rows_one_expert_at_a_time() -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (6, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (6, 8, 2), dtype=torch.uint8)
    whole = DequantisedSlice(blocks, scales)[...]
    watched = Watched(blocks), Watched(scales)
    part = DequantisedSlice(*watched)
    assert part.get_shape() == [6, 64, 8] == list(whole.shape)
    assert torch.equal(part[slice(2, 4)], whole[2:4])
    assert [one.asked for one in watched] == [[[(2, 3), (0, 8)], [(3, 4), (0, 8)]]] * 2
    nothing = (slice(0, 0), slice(0, 64), slice(0, 8))
    for index in ((slice(1, 3), slice(5, 40), slice(2, 7)), nothing, (slice(4, None),)):
        assert torch.equal(part[index], whole[index])
    with pytest.raises(NotImplementedError):
        part[3]
    with pytest.raises(NotImplementedError):
        part[::2]


@pytest.mark.parametrize("form", FORMS)
def test_an_export_is_plain_bf16_and_transformers_reads_it(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = trained(folders[form])
    written = export(model, ARCHITECTURE, folders[form], tmp_path)
    assert "mxfp4 is written as bf16" in written.note
    before = json.loads((folders[form] / "config.json").read_text())
    after = json.loads((tmp_path / "config.json").read_text())
    assert before.pop("quantization_config")
    assert before == after
    stored = {t.key: (path.name, t.dtype, t.shape) for path in sorted(tmp_path.glob("*.safetensors"))
              for t in read_file(path).tensors}  # fmt: skip
    state = model.state_dict()
    assert {key: shape for key, (_, _, shape) in stored.items()} == {k: tuple(t.shape) for k, t in state.items()}
    assert {dtype for _, dtype, _ in stored.values()} == {"BF16"}
    assert len({name for name, *_ in stored.values()}) == {"single": 1, "sharded": 3, "scales-apart": 2}[form]
    index = tmp_path / "model.safetensors.index.json"
    assert index.is_file() is (form != "single")
    if index.is_file():
        listed = json.loads(index.read_text())
        assert listed["weight_map"] == {key: name for key, (name, *_) in stored.items()}
        assert listed["metadata"]["total_size"] == sum(2 * tensor.numel() for tensor in state.values())
    theirs, found = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(found.values())
    assert theirs.dtype == torch.bfloat16
    assert [key for key, tensor in theirs.state_dict().items() if not torch.equal(state[key], tensor)] == []
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        logits = [one.float().eval()(input_ids=ids, use_cache=False).logits for one in (model, theirs)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


def test_an_export_names_the_dtype_that_the_source_left_to_its_stored_form(copied: Path, tmp_path: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    del config["dtype"]
    (copied / "config.json").write_text(json.dumps(config))
    export(trained(copied), ARCHITECTURE, copied, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("form", ["single", "scales-apart"])
def test_parts_merge_to_the_folder_that_an_export_writes(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = trained(folders[form])
    export(model, ARCHITECTURE, folders[form], tmp_path / "exported")
    export_parts(model, ARCHITECTURE, folders[form], tmp_path / "run", plan="", degrees={}, step=1)
    merge(tmp_path / "run", tmp_path / "merged", REGISTRY)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("exported", "merged")
    )
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_an_untrained_packed_tensor_is_written_as_bf16(copied: Path, tmp_path: Path) -> None:
    state = load_file(copied / "model.safetensors")
    state["mtp.0.experts_blocks"], state["mtp.0.experts_scales"] = state[BLOCKS].clone(), state[SCALES].clone()
    write_state(copied, state)
    knows = replace(ARCHITECTURE, spec=replace(ARCHITECTURE.spec, untrained=(r"^mtp\.",)))
    wanted = loaded(copied, architecture=knows)
    export(wanted, knows, copied, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["mtp.0.experts"], found[BLOCKS.removesuffix("_blocks")])
    export_parts(wanted, knows, copied, tmp_path / "run", plan="", degrees={}, step=1)
    kept = load_file(tmp_path / "run" / "ep-shards" / "untrained.safetensors")
    assert torch.equal(kept["mtp.0.experts"], found["mtp.0.experts"])


@pytest.mark.parametrize("gone", [SCALES, BLOCKS], ids=["no-scales", "no-blocks"])
def test_half_of_a_pair_is_refused_by_the_name_of_the_other(copied: Path, gone: str) -> None:
    state = load_file(copied / "model.safetensors")
    del state[gone]
    write_state(copied, state)
    with pytest.raises(Refused, match=f"lacks tensors that belong to stored ones: {gone}"):
        loaded(copied)


def test_a_missing_pair_is_refused_by_its_name(copied: Path) -> None:
    state = load_file(copied / "model.safetensors")
    del state[BLOCKS], state[SCALES]
    write_state(copied, state)
    with pytest.raises(Refused, match=f"lacks tensors that the model has: {BLOCKS.removesuffix('_blocks')}"):
        loaded(copied)


def test_scales_of_another_shape_or_dtype_are_refused_by_name(copied: Path) -> None:
    state = load_file(copied / "model.safetensors")
    good = state[SCALES]
    for bad in (good[:, :-1].contiguous(), good.float()):
        write_state(copied, state | {SCALES: bad})
        with pytest.raises(Refused, match=f"do not fit together: .*{SCALES}"):
            loaded(copied)


def test_experts_of_another_shape_than_the_model_has_are_refused_by_name(copied: Path) -> None:
    state = load_file(copied / "model.safetensors")
    write_state(copied, state | {key: state[key][:-1].contiguous() for key in (BLOCKS, SCALES)})
    with pytest.raises(Refused, match=rf"{BLOCKS.removesuffix('_blocks')} is \[7, .*the model has \[8, "):
        loaded(copied)


def test_a_source_that_shall_stay_packed_is_refused_with_the_key(folders: dict[str, Path]) -> None:
    source.check_folder(folders["single"])
    with pytest.raises(Refused) as caught:
        source.check_folder(folders["single"], dequantise=False)
    assert [problem.key for problem in caught.value.problems] == ["dequantize_source"]
    assert "dequantize_source: true" in str(caught.value)


def rows() -> list[dict[str, Any]]:
    words = ("red", "green", "blue", "white")
    return [
        {"messages": [{"role": "user", "content": f"Say {word}"}, {"role": "assistant", "content": word}]}
        for word in words * 2
    ]


def keys(folder: Path, output_dir: Path, **more: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": str(folder), "output_dir": str(output_dir), "max_steps": 3, "learning_rate": 1e-2,
        "per_device_train_batch_size": 2, "report_to": "none", "save_steps": 2, **more,
    }  # fmt: skip


def test_a_run_reads_says_trains_resumes_and_exports(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders["sharded"]
    files = packed.source_files(folder)
    halo_core.train(keys(folder, tmp_path / "run"), rows=rows())
    said = capsys.readouterr().out
    growth = packed.growth_of(folder, files)
    assert growth is not None and growth in said
    before = sum(load_file(path)[key].nbytes for path in folder.glob("*.safetensors") for key in load_file(path)
                 if key.endswith(("_blocks", "_scales")))  # fmt: skip
    assert f"{before:,} bytes become {before * 64 // 17:,}" in growth
    assert "quantization_config" not in json.loads((tmp_path / "run" / "config.json").read_text())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    first = loaded(folder).state_dict()
    assert [key for key in exported if "experts.down_proj" in key and torch.equal(exported[key], first[key])] == []

    checkpoint = str(next((tmp_path / "run").glob("checkpoint-*")))
    halo_core.train(keys(folder, tmp_path / "again", resume_from_checkpoint=checkpoint), rows=rows())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert [key for key in exported if not torch.equal(exported[key], again[key])] == []


def test_a_run_that_shall_not_dequantise_is_refused_before_anything_is_read(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(Refused, match="dequantize_source") as caught:
        halo_core.train(keys(folders["single"], tmp_path / "run", dequantize_source=False), rows=rows())
    assert [problem.key for problem in caught.value.problems] == ["dequantize_source"]
    assert not (tmp_path / "run").exists()


RECIPE = Path(__file__).parents[2] / "examples" / "gpt_oss" / "gpt-oss-20b-ep2.yaml"


def planned(*overrides: str, path: Path | None = RECIPE) -> plan.RunPlan:
    return plan.build(read(path, overrides), REGISTRY, nproc=2, dry_run=True).plan


def test_the_plan_of_the_published_recipe_says_that_its_weights_are_read_as_bf16() -> None:
    row = next(row for row in planned().rows if row.feature == "quantised_source")
    assert (row.word, row.value) == ("Supported", "stored as mxfp4")
    assert [note for note in planned().notes if "stored as mxfp4" in note and "3.8 times the bytes" in note]
    assert "dequantize_source" not in {row.feature for row in planned().not_built}


def test_the_plan_refuses_to_train_what_stays_packed() -> None:
    with pytest.raises(Refused, match="mxfp4, which has no gradient") as caught:
        planned("dequantize_source=false")
    assert [problem.key for problem in caught.value.problems] == ["dequantize_source"]


def test_another_stored_form_is_not_built_in_a_plan(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (copied / "config.json").write_text(json.dumps(config))
    found = planned(f"model_name_or_path={copied}", "dataset_name=x", "expert_parallel_size=2", path=None)
    assert [(row.feature, row.value) for row in found.not_built] == [("quantised_source", "stored as fp8")]
    assert not any("fp8" in note for note in found.notes)


def test_a_plan_of_plain_weights_speaks_of_it_only_when_asked() -> None:
    given = ("model_name_or_path=tiny", "family=gpt_oss", "dataset_name=x", "expert_parallel_size=2")
    for more, speaks in (((), False), (("dequantize_source=true",), True)):
        assert ("dequantize_source" in planned(*given, *more, path=None).features) is speaks
