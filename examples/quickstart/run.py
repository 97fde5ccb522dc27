"""The quickstart: an untrained tiny model answers held-out prompts, is trained by Halo, and answers them again.

Not a part of Halo: training is one call, `halo_core.train("examples/quickstart.yaml")`, and everything else here is
what anyone would do with a Hugging Face folder. Answers come from transformers alone, before and after.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The data set and the output folder of the YAML are relative to the root of the repository.
ROOT = Path(__file__).resolve().parents[2]
CONFIG = "examples/quickstart.yaml"
HELD_OUT = "examples/quickstart/heldout.jsonl"
MAX_NEW_TOKENS = 16
SHOWN_TASKS = ("sort digits", "reverse words", "opposites")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out prompt with its only right answer."""

    task: str
    prompt: str
    answer: str


def main(config: str | Mapping[str, Any] = CONFIG) -> Path:
    """Run the quickstart and return the run's folder; `config` is what `halo_core.train` takes."""
    os.chdir(ROOT)
    # One thread takes about 40 seconds; two are faster on idle cores, and far slower beside anything else that runs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import halo_core

    questions = read_questions(Path(HELD_OUT))
    checked = halo_core.check(config)
    print(f"Before: {len(questions)} held-out prompts, answered by the untrained model.")
    before = untrained_answers(checked, questions)

    started = time.monotonic()
    result = halo_core.train(config)
    seconds = time.monotonic() - started

    folder = Path(result.output_dir)
    after = answers(folder, questions)
    picture = draw_loss(folder)
    write_summary(folder / "quickstart.json", questions, before, after, seconds)
    print(report(questions, before, after, seconds))
    print(what_next(folder, picture))
    return folder


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a file of rows {task, messages}."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Question(task=row["task"], prompt=row["messages"][0]["content"], answer=row["messages"][1]["content"])
        for row in rows
    ]


def untrained_answers(checked: Any, questions: Sequence[Question]) -> list[str]:
    """Return the answers of the very model that training starts from: same architecture, the same random weights."""
    from halo_core.models.tiny import write_tiny

    with tempfile.TemporaryDirectory() as folder:
        write_tiny(checked.architecture, Path(folder))
        return answers(Path(folder), questions)


def answers(folder: Path, questions: Sequence[Question]) -> list[str]:
    """Return the greedy answer to each prompt, by transformers; an answer that does not end is marked with an ellipsis.

    Prompts of equal length are answered together, so that no padding is needed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in questions
    ]
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)

    said = [""] * len(questions)
    for length, indices in by_length.items():
        ids = torch.tensor([prompts[index] for index in indices])
        with torch.inference_mode():
            generated = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
            )
        for index, tokens in zip(indices, generated[:, length:].tolist(), strict=True):
            ended = tokenizer.eos_token_id in tokens
            tokens = tokens[: tokens.index(tokenizer.eos_token_id)] if ended else tokens
            said[index] = tokenizer.decode(tokens) + ("" if ended else " ...")
    return said


def matches(questions: Sequence[Question], said: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return for each task how many answers equal the right one, and how many there are."""
    counts: dict[str, tuple[int, int]] = {}
    for question, answer in zip(questions, said, strict=True):
        right, total = counts.get(question.task, (0, 0))
        counts[question.task] = (right + (answer == question.answer), total + 1)
    return dict(sorted(counts.items()))


def share(counts: Mapping[str, tuple[int, int]]) -> float:
    """Return right answers divided by all."""
    return sum(right for right, _ in counts.values()) / sum(total for _, total in counts.values())


def report(questions: Sequence[Question], before: Sequence[str], after: Sequence[str], seconds: float) -> str:
    """Return what changed, as text: exact match per task, and three answers before and after."""
    old, new = matches(questions, before), matches(questions, after)
    lines = ["", f"Exact match on held-out prompts, after {seconds:.0f} seconds of training:", ""]
    for task in old:
        lines.append(f"  {task:<16} {old[task][0]:>3} -> {new[task][0]:>3}  of {new[task][1]}")
    lines.append(f"  {'all':<16} {share(old):>4.0%} -> {share(new):.0%}")
    for task in SHOWN_TASKS:
        index = next(index for index, question in enumerate(questions) if question.task == task)
        lines += [
            "",
            f"  {questions[index].prompt}",
            f"    before: {shortened(before[index])}",
            f"    after:  {shortened(after[index])}",
        ]
    return "\n".join(lines)


def shortened(answer: str) -> str:
    """Return an answer on one line of at most 70 characters: an untrained model says anything."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in answer.strip())
    return printable if len(printable) <= 70 else printable[:66] + " ..."


def draw_loss(folder: Path) -> Path | None:
    """Draw the losses of metrics.jsonl into loss.png and return its path, or None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    with (folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    steps = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held_out = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*steps, strict=True), linewidth=0.8, color="tab:blue", label="training, every step")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), marker="o", color="tab:orange", label="held out, every epoch")
    axes.set(xlabel="step", ylabel="loss per answer token", yscale="log", title="Quickstart")
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    return path


def write_summary(
    path: Path, questions: Sequence[Question], before: Sequence[str], after: Sequence[str], seconds: float
) -> None:
    """Write exact matches and every answer as JSON, for tools."""
    old, new = matches(questions, before), matches(questions, after)
    summary = {
        "exact_match_before": share(old),
        "exact_match_after": share(new),
        "training_seconds": seconds,
        "tasks": {task: {"before": old[task][0], "after": new[task][0], "of": new[task][1]} for task in old},
        "answers": [
            {"task": q.task, "prompt": q.prompt, "answer": q.answer, "before": b, "after": a}
            for q, b, a in zip(questions, before, after, strict=True)
        ],
    }
    path.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def what_next(folder: Path, picture: Path | None) -> str:
    """Return the commands a person may want to type now."""
    lines = ["", f"The trained model is an ordinary Hugging Face folder: {folder}"]
    if picture is not None:
        lines.append(f"Its loss curve: {picture}")
    lines += ["", "What next:"]
    for command, meaning in (
        (f'sample {folder} "Sort these numbers: 8 3 5 1"', "ask it something"),
        ("train examples/quickstart.yaml family=qwen3", "another family on the same rows"),
        (
            "train examples/quickstart.yaml dataset_name=YOUR.jsonl max_length=512",
            'your rows, a line of {"messages": [...]} each',
        ),
        ("matrix", "what runs with what, and why not"),
    ):
        lines += [f"  {meaning}:", f"    .venv/bin/halo {command}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
    sys.exit(0)
