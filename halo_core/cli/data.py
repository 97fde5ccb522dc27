"""`halo data`: rows as the model sees them, what their lengths mean, and rows prepared once for many runs.

Not for training. The data are those of a run's configuration, refused with the same words; no weights are read and no
GPU is needed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halo_core import config as configuration
from halo_core import plan as planning
from halo_core.errors import Problem, Refused, counted
from halo_core.plan import Checked

if TYPE_CHECKING:
    import numpy as np
    from rich.text import Text

    from halo_core.config import RunConfig
    from halo_core.data.account import SplitAccount
    from halo_core.data.preview import Document, Shown
    from halo_core.data.rows import Rows

DATA = typer.Typer(
    name="data",
    add_completion=False,
    rich_markup_mode=None,
    help="Look at a run's data, or prepare them once.",
)
_WORDS: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
Family = Annotated[str | None, typer.Option("--family", "-f", help="The model family; read from the model by default.")]
PluginFiles = Annotated[list[Path], typer.Option("--plugin", metavar="FILE.py", help="Load this plugin file as well.")]

LEARNT, SPECIAL = "bold green", "cyan"
OPENING, CLOSING = "[[", "]]"
"""Around what is learnt, where there are no colours."""
_WIDTH = 40
"""Characters of the longest bar."""


@DATA.command("preview", context_settings=_WORDS)
def preview(
    context: typer.Context,
    count: Annotated[int, typer.Option("-n", min=1, help="How many rows, or packs.")] = 5,
    row: Annotated[int | None, typer.Option("--row", metavar="ID", min=0, help="This row alone.")] = None,
    family: Family = None,
    plugin: PluginFiles = [],  # noqa: B006  typer reads the default, nobody changes it
) -> None:
    """Show rows as the model sees them: halo data preview CONFIG.yaml [-n 5] [key=value ...]."""
    from rich.console import Console

    from halo_core.data.preview import preview as previewed
    from halo_core.data.waiting import bar

    console = Console(highlight=False, soft_wrap=True)
    with _opened(tuple(context.args), family, plugin) as (checked, tokenizer):
        shown = previewed(checked.config, tokenizer, count, row=row, waiting=bar)
    coloured = console.is_terminal and not console.no_color
    sign = "in colour" if coloured else f"between {OPENING} and {CLOSING}"
    console.print(f"what is learnt stands {sign}\n")
    for unit in shown:
        for text in _unit(unit, coloured):
            console.print(text)


@DATA.command("stats", context_settings=_WORDS)
def stats(
    context: typer.Context,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE.png", help="Draw the lengths as well.")] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", "-n", min=1, help="Processes of the run.")] = None,
    family: Family = None,
    plugin: PluginFiles = [],  # noqa: B006
) -> None:
    """Say what the lengths of the rows mean for a run: halo data stats CONFIG.yaml [key=value ...]."""
    from halo_core.data.prepare import prepare as prepared
    from halo_core.data.prepare import prepared_folder
    from halo_core.data.units import units_of
    from halo_core.data.waiting import bar

    _check_png(png)
    with _opened(tuple(context.args), family, plugin, nproc) as (checked, tokenizer):
        config = checked.config
        rows = prepared(config, tokenizer, waiting=bar, may_cache=True)
        account = units_of(config, rows).account
        kept = every = rows.train
        changed = account.train.dropped or account.train.cut_rows
        if changed and config.max_length is not None and prepared_folder(config) is None:
            # Rows that are too long for this run count where other lengths are compared.
            whole = replace(config, max_length=None, packing=False, eval_strategy="no", eval_dataset=None)
            every = prepared(whole, tokenizer, waiting=bar, may_cache=True).train
    print(account.text())
    _print_lengths(every.lengths, config)
    _print_layouts(every, kept, config, checked.plan.degrees.data_ranks)
    if png is not None:
        _draw(png, every.lengths, config, account.train)
        print(f"picture: {png}")


@DATA.command("prepare", context_settings=_WORDS)
def prepare(
    context: typer.Context,
    num_proc: Annotated[
        int | None, typer.Option("--num-proc", min=1, help="Processes that render and tokenise: dataset_num_proc.")
    ] = None,
    family: Family = None,
    plugin: PluginFiles = [],  # noqa: B006
) -> None:
    """Tokenise the rows of a run once, into a folder: halo data prepare CONFIG.yaml OUT [key=value ...]."""
    from halo_core.data import prepared
    from halo_core.data.offline import check_folder, prepare_into
    from halo_core.data.waiting import bar

    began = time.perf_counter()
    words, out = _without_folder(tuple(context.args))
    check_folder(out)
    if num_proc is not None:
        words = (*words, f"dataset_num_proc={num_proc}")
    with _opened(words, family, plugin) as (checked, tokenizer):
        account = prepare_into(out, checked.config, tokenizer, waiting=bar)
    print(account.text())
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"prepared: {out} ({size / 1e6:.1f} MB, {time.perf_counter() - began:.1f} s)")
    print(f"a run takes it by dataset_name: {out} in place of its data sets")
    keys = ", ".join(key for key in prepared.FIXED if key != "chat_template_path")
    print(f"fixed from now on: tokenizer, chat template, {keys}")


def _without_folder(words: tuple[str, ...]) -> tuple[tuple[str, ...], Path]:
    """Return the words without OUT, and OUT: of the words that are no settings, the last."""
    others = [word for word in words if "=" not in word and not word.startswith("-")]
    if not others or (len(others) == 1 and Path(others[0]).is_file()):
        why = "the folder to write is missing"
        raise Refused(Problem(key="OUT", value=None, where="command line", why=why,
                              remedy="halo data prepare CONFIG.yaml OUT"))  # fmt: skip
    left = list(words)
    left.reverse()
    left.remove(others[-1])
    left.reverse()
    return tuple(left), Path(others[-1])


@contextmanager
def _opened(
    words: tuple[str, ...], family: str | None, plugins: list[Path], nproc: int | None = None
) -> Iterator[tuple[Checked, Any]]:
    """Yield the checked configuration and the model's tokenizer.

    Raises:
        Refused: as `halo train` would, as far as no GPU and no other process is needed to tell.
    """
    from halo_core.cli.main import load_registry
    from halo_core.cli.train import split

    file, overrides, wrong_words = split(words)
    registry = load_registry(plugins)
    read = configuration.read(file, overrides, more_words=registry.words())
    # Data are the same for any number of processes: without a word about it, as many as the configuration needs.
    needed = nproc or _fewest(read.config)
    checked = planning.build(read, registry, nproc=needed, family=family, dry_run=True, also=wrong_words)

    from transformers.utils import logging as transformers_logging

    from halo_core.models.tiny import folder_or_id
    from halo_core.models.tokenizer import load_tokenizer

    transformers_logging.set_verbosity_error()
    config = checked.config
    with tempfile.TemporaryDirectory(prefix="halo-") as scratch:
        name = folder_or_id(str(config.model_name_or_path), checked.architecture, Path(scratch))
        tokenizer = load_tokenizer(
            name, revision=config.model_revision, trust_remote_code=config.trust_remote_code
        )  # fmt: skip
        yield checked, tokenizer


def _fewest(config: RunConfig) -> int:
    """Return the smallest number of processes that the sizes of a configuration fit."""
    return (
        config.data_parallel_replicate_size
        * config.expert_parallel_size
        * config.expert_tensor_parallel_size
        * config.context_parallel_size
    )


def _unit(unit: Shown, coloured: bool) -> Iterator[Text]:
    """Yield the texts of a row, or of a pack with a line before each of its documents."""
    from rich.text import Text

    documents = unit.documents
    if unit.pack is not None:
        tokens = sum(document.tokens for document in documents)
        yield Text(f"pack {unit.pack}: {counted(len(documents), 'document')}, {counted(tokens, 'token')}", style="bold")
    for number, document in enumerate(documents, start=1):
        border = f"-- document {number} of {len(documents)}: " if unit.pack is not None else ""
        cut = f", from its token {document.start}" if document.start else ""
        place = f" ({document.place})" if document.place else ""
        yield Text(
            f"{border}row {document.row_id}{place}{cut}: {counted(document.tokens, 'token')}, "
            f"{document.supervised} learnt", style="bold"
        )  # fmt: skip
        yield _document(document, coloured)
        yield Text("")


def _document(document: Document, coloured: bool) -> Text:
    """Return the text of a row, what is learnt of it in a colour or between marks."""
    from rich.text import Text

    text = Text()
    is_open = False
    for run in document.runs:
        if not coloured and run.is_learnt != is_open:
            text.append(OPENING if run.is_learnt else CLOSING)
        is_open = run.is_learnt
        style = LEARNT if run.is_learnt else SPECIAL if run.is_special else ""
        text.append(_visible(run.text), style=style if coloured else "")
    if is_open and not coloured:
        text.append(CLOSING)
    return text


def _visible(text: str) -> str:
    """Return a text in which control characters, which a terminal would obey, are written out."""
    return "".join(
        letter if letter in "\n\t" or letter.isprintable() else ascii(letter)[1:-1] for letter in text
    )  # fmt: skip


def _print_lengths(lengths: np.ndarray, config: RunConfig) -> None:
    """Print the histogram of all rows; those longer than max_length stand in ranges of their own."""
    from halo_core.data import statistics

    half, most, nearly_all = statistics.quantiles(lengths)
    print(f"\ntokens of a row: mean {lengths.mean():.1f}, half have at most {half}, 90% {most}, 99% {nearly_all}")
    found = statistics.histogram(lengths)
    fullest = max(one.rows for one in found)
    width, digits = len(str(found[-1].high)), len(str(len(lengths)))
    for one in found:
        blocks = "#" * -(-one.rows * _WIDTH // fullest)
        over = config.max_length is not None and one.high > config.max_length
        sign = "over max_length" if over and one.low > (config.max_length or 0) else "max_length" if over else ""
        print(f"  {one.low:>{width}} to {one.high:>{width}}  {one.rows:>{digits}}  {blocks:<{_WIDTH}}  {sign}".rstrip())


def _print_layouts(rows: Rows, kept: Rows, config: RunConfig, data_ranks: int) -> None:
    """Print packing at several lengths, of all rows, and the ways to make batches of the kept ones."""
    from halo_core.data import statistics

    print(f"\npacking ({config.packing_strategy}) by max_length:")
    for max_length in statistics.lengths_to_try(rows.lengths, config.max_length):
        packed = statistics.packed(rows, max_length, config.packing_strategy)
        own = "  (this run's)" if max_length == config.max_length else ""
        too_long = f", {counted(packed.too_long, 'row')} too long" if packed.too_long else ""
        print(f"  {max_length:>8}  {counted(packed.packs, 'pack')}, {packed.filled:.1%} filled{too_long}{own}")
    batch = config.per_device_train_batch_size
    processes = f", {data_ranks} processes" if data_ranks > 1 else ""
    print(
        f"\nper_device_train_batch_size {batch}, gradient_accumulation_steps {config.gradient_accumulation_steps}"
        f"{processes}:"
    )
    for layout in statistics.layouts(kept, config, data_ranks):
        units = counted(layout.units, "pack" if layout.name.startswith("packing:") else "row")
        steps = counted(layout.steps, "step")
        print(f"  {layout.name:<18}  {layout.padding:>6.1%} padding, {steps} an epoch ({units})")


def _check_png(png: Path | None) -> None:
    """Refuse a picture that could not be drawn, before rows are read."""
    from importlib.util import find_spec

    if png is None:
        return
    if png.suffix.lower() != ".png" or not png.parent.is_dir():
        why = f"there is no folder {png.parent}" if png.suffix.lower() == ".png" else "a picture is a .png file"
        raise Refused(Problem(key="--png", value=png, why=why, remedy="give FILE.png in a folder that exists"))
    if find_spec("matplotlib") is None:
        why = "pictures are drawn by matplotlib, which is not installed"
        remedy = "pip install 'halo-moe[plot]', or leave --png out"
        raise Refused(Problem(key="--png", value=png, why=why, remedy=remedy))


def _draw(png: Path, lengths: np.ndarray, config: RunConfig, account: SplitAccount) -> None:
    """Write the histogram of lengths as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(lengths, bins=60, color="#4477aa")
    if config.max_length is not None:
        axes.axvline(config.max_length, color="#cc3311", linestyle="--", label=f"max_length {config.max_length}")
        axes.legend()
    axes.set_xlabel("tokens of a row")
    axes.set_ylabel("rows")
    axes.set_title(f"{counted(len(lengths), 'row')}, {account.supervised_share:.1%} of the tokens learnt")
    figure.savefig(png, dpi=120)

