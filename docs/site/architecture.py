"""The picture and the tables of docs/explanation/architecture.md, made from the code.

    python docs/site/architecture.py            # write the picture and the marked parts of the page
    python docs/site/architecture.py --check    # say whether rooms or imports are out of date

Rooms, files and imports are read from the source. The ways of a round and of a share are what
`python -m benchmarks.walk` records; tests/engine/test_walk.py and tests/peer/test_walk.py hold
their bounds.
"""

from __future__ import annotations

import ast
import html
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "quiverfl"
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

VOCABULARY = "vocabulary"
ROOMS = {
    "cli": "the command `quiver`, one file per group of commands",
    "paper": "the paper's tables, figures and theory",
    "laws": "the laws that every method keeps, tried on small problems",
    "sweeps": "many runs: plan, execute, estimate, tune",
    "peer": "one client per machine: ledger, links, operation",
    "distributed": "one federation on several processes (torch.distributed)",
    "runs": "configuration, experiment, run, run folder, comparison, export",
    "clock": "devices, links, absence; when things happen; runs that do not wait",
    "engine": "the round loop, how a client trains, how messages are mixed, checks",
    "results": "reads run folders: summary, statistics, tables, figures, report",
    "transforms": "what happens to messages: compression, privacy, robustness, attacks",
    "methods": "one paper, one file",
    "topologies": "who sends to whom in which round, with which weight",
    "data": "data sets, partitions, batches, sources",
    "models": "networks, LoRA, compiled layers",
    VOCABULARY: "errors, seeds, trees, options, task, objectives, training, types",
    "support": "durable files, locks, optional packages, compiled code",
}
"""Every room with what is in it, from the top to the bottom."""
FLOORS = (
    ("cli",),
    ("paper", "laws"),
    ("sweeps", "peer", "distributed"),
    ("runs",),
    ("clock",),
    ("engine",),
    ("results",),
    ("transforms",),
    ("methods", "topologies", "data", "models"),
    (VOCABULARY,),
    ("support",),
)
WIDTH, HEIGHT, GAP = 940, 58, 14


def room_of(path: Path) -> str | None:
    """The room of a file; None for the package's own files and the templates of `quiver init`."""
    parts = path.relative_to(SOURCE).parts
    if len(parts) == 1:
        return None if parts[0].startswith("__") else VOCABULARY
    return None if parts[0] == "templates" else parts[0]


def count_files() -> Counter[str]:
    rooms = (room_of(path) for path in SOURCE.rglob("*.py"))
    return Counter(room for room in rooms if room is not None)


def list_imports() -> dict[str, set[str]]:
    """The rooms that each room imports from, in whatever form."""
    rooms: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        if room is None:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quiverfl"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                target = _room_of_module(name)
                if target is not None and target != room:
                    rooms.setdefault(room, set()).add(target)
    return rooms


def _room_of_module(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] != "quiverfl" or len(parts) < 2:
        return None
    if (SOURCE / parts[1]).is_dir():
        return parts[1]
    below_all = parts[1] == "errors"
    return VOCABULARY if (SOURCE / f"{parts[1]}.py").is_file() and not below_all else None


def draw_rooms() -> str:
    """The rooms as an SVG: each floor imports from those below it."""
    files = count_files()
    boxes = []
    for number, floor in enumerate(FLOORS):
        width = (WIDTH - GAP * (len(floor) - 1)) / len(floor)
        y = number * (HEIGHT + GAP) + GAP
        for place, room in enumerate(floor):
            boxes.append(_box(room, files[room], place * (width + GAP) + GAP, y, width))
    height = len(FLOORS) * (HEIGHT + GAP) + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * GAP} {height}" '
        'font-family="system-ui, sans-serif" role="img" '
        'aria-label="The rooms of Quiver; each imports from those below it">\n'
        '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>\n' + "".join(boxes) + "</svg>\n"
    )


def _box(name: str, files: int, x: float, y: float, width: float) -> str:
    words = _wrap(ROOMS[name].replace("`", ""), int(width / 6.2))
    text = "".join(
        f'<text x="{x + 10:.0f}" y="{y + 36 + 14 * number:.0f}" font-size="11.5" fill="#444444">'
        f"{html.escape(line)}</text>\n"
        for number, line in enumerate(words[:2])
    )
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="6" '
        'fill="#f6f4f1" stroke="#c9c2b8"/>\n'
        f'<text x="{x + 10:.0f}" y="{y + 19:.0f}" font-size="14" font-weight="600" '
        f'fill="#1a1a1a">{name}</text>\n'
        f'<text x="{x + width - 10:.0f}" y="{y + 19:.0f}" font-size="11" fill="#777777" '
        f'text-anchor="end">{files} files</text>\n{text}'
    )


def _wrap(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def rooms_table() -> str:
    files, imports = count_files(), list_imports()
    rows = ["| room | what is in it | files | imports from |", "|---|---|---:|---|"]
    for name, words in ROOMS.items():
        below = ", ".join(room for room in ROOMS if room in imports.get(name, set()))
        rows.append(f"| `{name}` | {words} | {files[name]} | {below} |")
    rows.append(f"| all | | {files.total()} | |")
    return "\n".join(rows)


def round_table() -> str:
    """What one round of DFedPGP enters, as it is carried out."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.walk import trace_rounds

    rows = ["| round | files entered | changes of file | functions |", "|---|---:|---:|---:|"]
    for number, walk in enumerate(trace_rounds(), start=1):
        rows.append(f"| {number} | {len(walk.files)} | {walk.changes} | {walk.functions} |")
    return "\n".join(rows)


def share_table() -> str:
    """The files of `peer/` that a share between two peers crosses, as it is carried out."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.walk import trace_share

    folders: dict[str, list[str]] = {}
    for file in trace_share().files:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(name.removesuffix(".py"))
    rows = ["| folder | files that a share crosses | |", "|---|---|---:|"]
    rows += [f"| `{f}` | {', '.join(names)} | {len(names)} |" for f, names in folders.items()]
    return "\n".join([*rows, f"| all | | {sum(map(len, folders.values()))} |"])


PARTS = {"rooms": rooms_table, "round": round_table, "share": share_table}


def fill_page(text: str, names: tuple[str, ...] = tuple(PARTS)) -> str:
    """The page with some of its marked parts made anew."""
    for name in names:
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        found = re.search(pattern, text, flags=re.S)
        if found is None:
            raise SystemExit(f"{PAGE.name}: there is no part <!-- {name} --> … <!-- /{name} -->.")
        text = text[: found.end(1)] + PARTS[name]() + "\n" + text[found.start(2) :]
    return text


def main() -> None:
    check = "--check" in sys.argv[1:]
    page = PAGE.read_text(encoding="utf-8")
    made = {PICTURE: draw_rooms(), PAGE: fill_page(page, ("rooms",) if check else tuple(PARTS))}
    stale = [p for p, text in made.items() if not p.exists() or p.read_text("utf-8") != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python docs/site/architecture.py")
        sys.exit(1 if stale else 0)
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
