"""The `halo` command: its subcommands, and what becomes of errors and exit codes.

Not for what a subcommand does: each has its own file. Exit codes: 0 done, 2 the user's mistake, 1 ours,
130 interrupted. No torch is imported before a command needs it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from halo_core import registry as facts
from halo_core.cli.data import DATA
from halo_core.cli.endings import JobEnded
from halo_core.cli.run import TOOLS
from halo_core.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_MISTAKE, Problem, Refused
from halo_core.plugins import PluginFault, fault_text

app = typer.Typer(
    name="halo",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Post-training for Hugging Face mixture-of-experts models: families are plugins.",
)
app.add_typer(TOOLS)
app.add_typer(DATA)
PluginFiles = Annotated[list[Path], typer.Option("--plugin", metavar="FILE.py", help="Load this plugin file as well.")]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    family: Annotated[
        str | None, typer.Option("--family", "-f", help="The model family; read from the model if left out.")
    ] = None,
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Number of processes on this machine.")] = 1,
    nnodes: Annotated[int | None, typer.Option("--nnodes", help="Number of machines.")] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", metavar="RANK", help="Which of the machines this is, from 0.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where machines meet: a port of RANK 0.")
    ] = None,
    plugin: PluginFiles = [],  # noqa: B006  typer reads the default, nobody changes it
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="As --dry-run, and list every parameter.")
    ] = False,
) -> None:
    """Train: halo train [--family F] CONFIG.yaml [key=value ...]. An override replaces the file's key."""
    from halo_core.cli.train import Options, run

    run(
        tuple(context.args),
        Options(
            family=family,
            nproc=nproc,
            nodes=nnodes,
            node_rank=node_rank,
            endpoint=rdzv_endpoint,
            plugin_files=tuple(plugin),
            dry_run=dry_run or parameters,
            parameters=parameters,
        ),
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="ID", help="A hub id whose shape a plugin knows, a folder, or tiny."),
    ] = None,
    family: Annotated[str | None, typer.Option("--family", "-f", help="The model family, for tiny.")] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Only the first so many layers.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", help="Tokens of each row: max_length.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Rows: per_device_train_batch_size.")] = None,
    mean_length: Annotated[
        int | None, typer.Option("--mean-length", help="Rows of many lengths, of so many tokens in the mean.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="How many of those are timed, each once, in place of --steps.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps that are timed.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Optimizer steps before them.")] = 3,
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Number of processes on this machine.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.json", help="Write the receipt there.")] = None,
    plugin: PluginFiles = [],  # noqa: B006
) -> None:
    """Measure the training step on random weights and rows: halo bench [CONFIG.yaml] [--model ID] [key=value ...]."""
    from halo_core.cli.bench import Options, run

    run(
        tuple(context.args),
        Options(
            model=model,
            family=family,
            layers=layers,
            seq=seq,
            batch=batch,
            mean_length=mean_length,
            rows=rows,
            steps=steps,
            warmup=warmup,
            nproc=nproc,
            out=out,
            plugin_files=tuple(plugin),
        ),
    )


@app.command()
def matrix(
    family: Annotated[str | None, typer.Option("--family", "-f", help="Only this family.")] = None,
    why: Annotated[
        tuple[str, str] | None,
        typer.Option("--why", metavar="FAMILY FEATURE", help="Every part of one answer, with its author."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="RUN.yaml", help="What this very run uses.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A list of cells.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of the documentation.")] = False,
    plugin: PluginFiles = [],  # noqa: B006
) -> None:
    """Say what runs with what, and why not."""
    from halo_core.cli.matrix import run

    run(family=family, why=why, config=config, as_json=as_json, markdown=markdown, plugin_files=tuple(plugin))


@app.command()
def plugins(plugin: PluginFiles = []) -> None:  # noqa: B006
    """List the plugins found, what each brings, and every fault of the broken ones."""
    from halo_core.cli.plugins import run

    run(tuple(plugin))


@app.command("init-tiny")
def init_tiny(
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    family: Annotated[str, typer.Option("--family", "-f", help="The model family.")],
    dense: Annotated[bool, typer.Option("--dense", help="The dense architecture instead of the MoE one.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random weights.")] = 0,
    plugin: PluginFiles = [],  # noqa: B006
) -> None:
    """Write a small complete Hugging Face folder of a family: random weights, tokenizer, chat template."""
    from halo_core.cli.init_tiny import run

    run(family=family, dense=dense, out=out, seed=seed, plugin_files=tuple(plugin))


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face folder, such as a run's output_dir.")],
    prompt: Annotated[str, typer.Argument(help="What the user says.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="At most this many tokens.")] = 64,
) -> None:
    """Let a model answer one prompt (greedy), to see with one's own eyes what a run has made."""
    from halo_core.cli.sample import run

    run(folder, prompt, max_new_tokens)


@app.command()
def doctor() -> None:
    """Say what is installed: torch, device, optional kernels, and how to install what is missing."""
    from halo_core.cli.doctor import run

    run()


def load_registry(plugin_files: Sequence[Path]) -> facts.Registry:
    """Return the registry of everything installed and of these files.

    Raises:
        Refused: a file does not exist.
    """
    missing = [file for file in plugin_files if not file.is_file()]
    if missing:
        raise Refused(
            Problem(key="--plugin", value=file, why="there is no such file", remedy="give the path of a Python file")
            for file in missing
        )
    return facts.load(tuple(plugin_files))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: the entry point of the `halo` script."""
    sys.exit(exit_code(sys.argv[1:] if arguments is None else list(arguments)))


def exit_code(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; a user's mistake is printed without a traceback."""
    words = list(arguments) or ["--help"]
    try:
        _add_plugin_commands(words)
        outcome: Any = app(args=words, standalone_mode=False, prog_name="halo")
        sys.stdout.flush()
        if outcome == EXIT_INTERRUPTED:  # typer turns Ctrl-C into this number
            print("halo: interrupted", file=sys.stderr)
        return int(outcome) if isinstance(outcome, int) else 0
    except (typer.Exit, JobEnded) as leave:
        return int(leave.exit_code)
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as leave:
        if isinstance(leave.__context__, BrokenPipeError):  # typer's own answer to it
            return _reader_left()
        raise
    except (Exception, KeyboardInterrupt) as fault:
        code, text = explain(fault, words)
        print(text, file=sys.stderr)
        return code


def explain(fault: BaseException, words: Sequence[str] = ("train",)) -> tuple[int, str]:
    """Return the exit code of what ended a command, and what a person reads about it.

    words: the command line. A traceback is only for what is nobody's mistake but ours, or a plugin's.
    """
    if isinstance(fault, Refused):
        return EXIT_MISTAKE, f"halo: refused\n{fault.text()}"
    if isinstance(fault, KeyboardInterrupt | typer.Abort):
        return EXIT_INTERRUPTED, "halo: interrupted"
    if isinstance(fault, PluginFault):
        trace = "".join(traceback.format_exception(fault.__cause__))
        return EXIT_BUG, f"{trace}halo: {fault}\nTell its authors, or leave it out with HALO_DISABLE_PLUGINS"
    if isinstance(fault, BrokenPipeError):  # only of one process among several, which may not leave the others
        return EXIT_BUG, "halo: nobody reads the output any more"
    from halo_core.checkpoint.atomic import SaveFailed

    if isinstance(fault, SaveFailed):
        return EXIT_MISTAKE, f"halo: {fault.what}\n    do:  {fault.remedy}"
    # The classes of the command line's own mistakes depend on typer's version: some bring a click of their own.
    if callable(said := getattr(fault, "format_message", None)):
        return EXIT_MISTAKE, f"halo: {said()}\nTry: {_help_line(words)}"
    code = getattr(fault, "exit_code", None)
    if isinstance(code, int):  # a stop that the run itself explains: no traceback
        return code, f"halo: {fault}"
    trace = "".join(traceback.format_exception(fault))
    return EXIT_BUG, f"{trace}halo: this is our fault, not yours; please report it with the lines above"


def _reader_left() -> int:
    """Return 0: the reader of our output (such as `head`) has enough. Python would complain again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _help_line(words: Sequence[str]) -> str:
    return f"halo {words[0]} --help" if words[0] in _our_commands() else "halo --help"


def _our_commands() -> set[str]:
    own = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    return own | {str(TOOLS.info.name), str(DATA.info.name)}


def _add_plugin_commands(arguments: Sequence[str]) -> None:
    """Offer plugins' own commands, loading plugins only where the command is none of ours."""
    if arguments[0] in _our_commands():
        return
    found = facts.load().plugins
    for row in found.loaded:
        if "halo_add_commands" in row.hooks:
            try:
                row.module.halo_add_commands(commands=app)
            except Exception as fault:
                print(
                    f"halo: plugin {row.name} could not add its commands: {fault_text(fault)}",
                    file=sys.stderr,
                )
    if found.broken:
        names = ", ".join(row.name for row in found.broken)
        print(f"halo: broken plugins: {names}; `halo plugins` says what is wrong", file=sys.stderr)


if __name__ == "__main__":
    main()
