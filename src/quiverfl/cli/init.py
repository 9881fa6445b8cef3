"""`quiver init`: a first project that runs."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from quiverfl import durable
from quiverfl.errors import QuiverError

FILES = ("run.toml", "my_data.py", "my_model.py", "my_method.py")


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("."),
) -> None:
    """Write a first project: a configuration, and data, model and method of your own that run."""
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise QuiverError(
            f"{folder / there[0]} is there already: choose another folder, or move it away."
        )
    templates = resources.files("quiverfl") / "templates"
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        durable.replace(folder / name, (templates / name).read_bytes())
        print(f"wrote {folder / name}")
    place = "" if folder == Path(".") else f"cd {folder} && "
    print(f"Try: {place}quiver compare run.toml --methods local,dfedpgp,my_method:MyMethod")
