"""`quiver export` and `quiver extend`: what comes out of a finished run, and more of it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from quiverfl.cli.run import AsJson, Quiet, finish


class Stage(StrEnum):
    mixed = "mixed"
    local = "local"


def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    client: Annotated[int, typer.Option(help="Whose model, from 0.")] = 0,
    stage: Annotated[
        Stage, typer.Option(help="After the last communication, or before it.")
    ] = Stage.mixed,
    out: Annotated[Path | None, typer.Option("--out", help="A file NAME.safetensors.")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX beside it, too.")] = False,
    program: Annotated[
        bool, typer.Option("--program", help="Write a torch.export program (.pt2), too.")
    ] = False,
) -> None:
    """Write a client's personal model with its normalisation, its labels and how to load it."""
    from quiverfl.export import export_client
    from quiverfl.run_folder import RunFolder

    path = out or folder / f"client-{client}.safetensors"
    wanted: list[tuple[Literal["program", "onnx"], bool]] = [("program", program), ("onnx", onnx)]
    also = [kind for kind, asked in wanted if asked]
    for line in export_client(RunFolder(folder), client, stage.value, path, also):
        print(line)


def extend(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    rounds: Annotated[int, typer.Option(help="The total number of rounds.")],
    quiet: Quiet = False,
    json_: AsJson = False,
) -> None:
    """Give a run more rounds than it was planned for, and resume it."""
    from quiverfl.run_folder import RunFolder

    finish(RunFolder(folder).extend(rounds), folder, quiet, json_)
