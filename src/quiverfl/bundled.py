"""Configurations that come with the package, by their names."""

from __future__ import annotations

from pathlib import Path

from quiverfl.errors import QuiverError, nearest


def configs() -> Path:
    """The folder of presets: in the package when it is installed, else in the source tree."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parents[1] / "configs"):
        if folder.is_dir():
            return folder
    raise QuiverError("the presets are missing: this installation has no configs folder.")


def config_file(path: Path) -> Path:
    """The file, or the configuration that comes with the package under this name."""
    if path.is_dir():
        found = sorted(path.glob("*.toml"))
        which = f"such as {found[0]}" if found else "and it has no .toml in it"
        raise QuiverError(f"{path} is a folder: name a configuration, {which}.")
    if path.exists():
        return path
    known = {file.stem: file for file in sorted(configs().glob("*.toml"))}
    if path.suffix == ".toml" and path.stem in known:
        raise QuiverError(
            f"{path}: no such configuration file. One of that name comes with Quiver: write "
            f"{path.stem} for it."
        )
    if path.suffix or len(path.parts) != 1:
        return path
    if path.name not in known:
        raise QuiverError(
            f"{path}: neither a file nor a configuration that comes with Quiver; "
            f"{nearest(path.name, known)}"
        )
    return known[path.name]
