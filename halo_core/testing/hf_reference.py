"""What transformers alone computes for a model folder: loss, gradients, expert outputs, weights after plain SGD steps.

Not part of Halo: a script of its own process that imports nothing of it, so that no socket, register or patch of ours
can make a comparison agree with itself. Run by path with one argument, a JSON file with a list of jobs:

    {"folder": HF folder, "rows": JSON file, "out": safetensors file to write, "model_class": "module:attribute",
     "experts_class": class name or null, "has_experts_socket": bool, "decrease": float, "steps": int}

`rows` holds [{"input_ids": [int], "supervised": [bool]}], one flag per token: whether that token is a target.
The steps' learning rate is the one at which the first lowers the loss by `decrease`, to first order: one rate for
models of very different gradients would leave some where they are and throw others about, until rounding decides.
Shapes: B rows, S tokens of the longest row, V vocabulary, H hidden.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

IGNORED = -100


def main(jobs_file: Path) -> None:
    """Do every job of the file, in order."""
    for job in json.loads(jobs_file.read_text(encoding="utf-8")):
        save_file(reference(job), job["out"])
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in ("halo_core", "halo_families"))
    assert not loaded, f"the reference must not know Halo, but it imported {', '.join(loaded)}"


def reference(job: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of one job.

    `learning_rate`: of the steps. `loss.0` to `loss.N`: token means before each of the N steps, and after the last.
    `logits` [B, S, V], `gradient.*` by parameter and `experts.*` by module [B, S, H]: at the weights of the folder.
    `weight.*`: parameters and persistent buffers after the last step.
    """
    model = load(job)
    input_ids, attention_mask, labels = padded(json.loads(Path(job["rows"]).read_text(encoding="utf-8")))
    found: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(recorder(f"experts.{name}", found, input_ids.shape))
        for name, module in model.named_modules()
        if type(module).__name__ == job["experts_class"]
    ]
    assert handles or job["experts_class"] is None, f"no {job['experts_class']} in {type(model).__name__}"
    for step in range(job["steps"]):
        logits, loss = forward(model, input_ids, attention_mask, labels)
        loss.backward()
        found[f"loss.{step}"] = loss.detach()
        if step == 0:
            for handle in handles:
                handle.remove()
            found["logits"] = logits.detach().clone()
            gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
            squares = sum(gradient.double().square().sum() for gradient in gradients.values())
            rate = job["decrease"] / float(squares)
            found.update({f"gradient.{name}": gradient for name, gradient in gradients.items()})
            found["learning_rate"] = torch.tensor(rate, dtype=torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found[f"loss.{job['steps']}"] = forward(model, input_ids, attention_mask, labels)[1]
    # Tied weights are one parameter under two names of the state dict; a file may hold each storage only once.
    kept = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {**found, **{f"weight.{name}": tensor for name, tensor in kept.items()}}


def forward(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (logits [B, S, V], loss)."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    return logits, token_mean(logits, labels)


def load(job: dict[str, Any]) -> PreTrainedModel:
    """Return the folder's model in fp32, training mode, with plain attention and plain experts.

    Through the Auto class where transformers knows the model type, else through the class the job names.
    """
    config = json.loads((Path(job["folder"]) / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] in CONFIG_MAPPING:
        model_class: Any = AutoModelForCausalLM
    else:
        module, _, name = job["model_class"].partition(":")
        model_class = getattr(import_module(module), name)
    plain = {"attn_implementation": "eager"}
    if job["has_experts_socket"]:
        plain["experts_implementation"] = "eager"
    model: PreTrainedModel = model_class.from_pretrained(job["folder"], dtype=torch.float32, **plain)
    return model.train()


def padded(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (input ids, attention mask, labels), each [B, S] int64, padded on the right. Labels are not shifted."""
    length = max(len(row["input_ids"]) for row in rows)
    input_ids, attention_mask, labels = [], [], []
    for row in rows:
        fill = length - len(row["input_ids"])
        input_ids.append([*row["input_ids"], *[0] * fill])
        attention_mask.append([*[1] * len(row["input_ids"]), *[0] * fill])
        kept = [token if flag else IGNORED for token, flag in zip(row["input_ids"], row["supervised"], strict=True)]
        labels.append([*kept, *[IGNORED] * fill])
    return torch.tensor(input_ids), torch.tensor(attention_mask), torch.tensor(labels)


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of -log p(next token) over all supervised tokens. logits [B, S, V]; labels [B, S]."""
    targets = labels[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits[:, :-1].reshape(len(targets), -1), targets, ignore_index=IGNORED)


def recorder(key: str, found: dict[str, Tensor], shape: torch.Size) -> Any:
    """Return a forward hook that keeps a module's output as [B, S, H] under `key`."""

    def record(module: nn.Module, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found[key] = hidden.detach().reshape(*shape, -1).clone()

    return record


if __name__ == "__main__":
    main(Path(sys.argv[1]))
