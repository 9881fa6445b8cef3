"""Configuration files: TOML on disk, presets that come with Quiver, and `--set` texts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quiverfl.errors import QuiverError, suggest
from quiverfl.runs.config import UNSET, Config, parse_config, set_values

SWEEP_KEYS = ("base", "methods", "seeds", "grid", "case", "scale", "tuning")
"""Top-level keys of a sweep, which a configuration never has."""


def configs_folder() -> Path:
    """Return the folder of presets, in the package or in the source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parents[1] / "configs"):
        if folder.is_dir():
            return folder
    raise QuiverError("the presets are missing: this installation has no configs folder.")


def is_bundled(name: str) -> bool:
    """Whether a configuration of this name comes with the package."""
    return name in {file.stem for file in configs_folder().glob("*.toml")}


def config_file(path: Path) -> Path:
    """Return the path of a file, or of the preset that comes with Quiver under this name."""
    if path.is_dir():
        files = sorted(path.glob("*.toml"))
        which = f"such as {files[0]}" if files else "and it has no .toml in it"
        raise QuiverError(f"{path} is a folder: name a configuration, {which}.")
    if path.exists():
        return path
    known = {file.stem: file for file in sorted(configs_folder().glob("*.toml"))}
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
            f"{suggest(path.name, known)}"
        )
    return known[path.name]


def load_config(path: Path, values: Iterable[str] = ()) -> Config:
    """Read a TOML file, or a preset by its name; `section.key=value` texts win over it."""
    values = list(values)
    name, path = path, config_file(path)
    tree = read_toml(path, f"{path}: no such configuration file.")
    _refuse_sweep(tree, name)
    settings = [parse_setting(text) for text in values]
    for key, _ in settings:
        if key.partition(".")[0] == "peers":
            raise QuiverError(
                f"--set {key}: [peers] is for real peers and changes nothing here; write it into "
                "their run.toml."
            )
    set_values(tree, settings)
    tree.pop("peers", None)  # [peers] is for real peers; the same file can be simulated first
    return parse_config(tree, f"{name} and --set" if values else str(name))


def read_peers_section(path: Path) -> dict[str, Any]:
    """[peers] of a file or preset, which says how real peers deal with each other."""
    path = config_file(path)
    section = read_toml(path, f"{path}: no such configuration file.").get("peers", {})
    if not isinstance(section, dict):
        raise QuiverError(f"{path}: peers must be a section: write [peers].")
    return section


def _refuse_sweep(tree: Mapping[str, Any], path: Path) -> None:
    """Refuse a file for `quiver sweep` in place of a configuration."""
    keys = [key for key in SWEEP_KEYS if key in tree]
    if keys:
        raise QuiverError(
            f"{path} is a sweep (it has {', '.join(keys)}), not a configuration: `quiver sweep "
            f"{path}` runs it."
        )


def read_toml(path: Path, missing: str) -> dict[str, Any]:
    """Read a TOML file; `missing` is the error if there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise QuiverError(missing) from None
    except OSError as error:
        raise QuiverError(f"{path}: cannot be read: {error.strerror}.") from error
    try:
        return tomllib.loads(content.decode("utf-8-sig"))  # editors on Windows write a mark first
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise QuiverError(
            f"{path}: cannot be read: line {line} is not UTF-8 (byte {content[error.start]:#04x}); "
            "save it as UTF-8."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise QuiverError(f"{path}: not valid TOML: {error}.") from error
    except RecursionError:
        raise QuiverError(f"{path}: not readable: its lists are too deep in one another.") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """Split `section.key=value` into the key and its value, UNSET if there is none."""
    key, separator, value = text.partition("=")
    if not separator:
        raise QuiverError(f"--set {text!r}: write section.key=value.")
    return key.strip(), parse_toml_value(value.strip()) if value.strip() else UNSET


def parse_toml_value(text: str) -> Any:
    """Parse a TOML value; other text stays as it is, so `method.name=dfedpgp` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
