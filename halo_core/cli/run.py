"""`halo run`: tools for the folders that a run leaves behind, one command each.

Not for training. A tool is a function here with the decorator; what it does lies in the module it imports, which is
imported when the tool is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TOOLS = typer.Typer(
    name="run",
    add_completion=False,
    rich_markup_mode=None,
    help="Tools for the folders that a run leaves behind.",
)


@TOOLS.command("merge-ep-shards")
def merge_ep_shards(
    folder: Annotated[Path, typer.Argument(metavar="IN", help="A run's ep-shards folder, or its output_dir.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The Hugging Face folder to write: new, or empty.")],
    plugin: Annotated[
        list[Path], typer.Option("--plugin", metavar="FILE.py", help="Load this plugin file as well.")
    ] = [],  # noqa: B006  typer reads the default, nobody changes it
) -> None:
    """Make a Hugging Face folder of the parts that a run with save_sharded_ep: true has written."""
    from halo_core.checkpoint.merge import merge
    from halo_core.cli.main import load_registry

    written = merge(folder, out, load_registry(plugin))
    print(f"{written.note}: {written.folder}")


@TOOLS.command("inspect")
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint-N folder, or a run's output_dir.")],
    words: Annotated[
        list[str], typer.Argument(metavar="[key=value ...]", help="Settings of the run, as for halo train.")
    ] = [],  # noqa: B006
    config: Annotated[
        Path | None, typer.Option("--config", metavar="RUN.yaml", help="Say whether this run can go on from it here.")
    ] = None,
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Number of processes of that run.")] = 1,
    family: Annotated[str | None, typer.Option("--family", "-f", help="The model family of that run.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compare names and sizes, and no checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
    plugin: Annotated[
        list[Path], typer.Option("--plugin", metavar="FILE.py", help="Load this plugin file as well.")
    ] = [],  # noqa: B006
) -> None:
    """Say what a checkpoint holds, whether it is whole, and whether a run can go on from it and why not."""
    from halo_core.cli.inspect import run

    run(
        folder,
        config=config,
        overrides=tuple(words),
        nproc=nproc,
        family=family,
        quick=quick,
        as_json=as_json,
        plugin_files=tuple(plugin),
    )


@TOOLS.command("convert-to-bf16")
def convert_to_bf16(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A Hugging Face folder, such as an output_dir.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write: new, or empty.")],
    plugin: Annotated[
        list[Path], typer.Option("--plugin", metavar="FILE.py", help="Load this plugin file as well.")
    ] = [],  # noqa: B006
) -> None:
    """Write a model again with its weights in bf16; what its code keeps in fp32 stays."""
    from halo_core.checkpoint.convert import convert_to_bf16 as convert
    from halo_core.cli.main import load_registry

    written = convert(source.expanduser(), out.expanduser(), load_registry(plugin))
    print(f"{written.note}: {written.folder}")
