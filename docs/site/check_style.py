"""Check that pages can be read: short lines of code, short sentences, small cells, named links.

    python docs/site/check_style.py [PAGE…]     prints what it finds; 1 if there is anything

`style_exceptions.txt` lists what is excused: a page, or `page: rule` for one rule of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXCEPTIONS = Path(__file__).with_name("style_exceptions.txt")
CODE_WIDTH, SENTENCE_WORDS, CELL_SENTENCES, PARAGRAPH_LINES, LINE_WIDTH = 76, 30, 2, 5, 100
ELSEWHERE = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/README.md",
    "results/README.md",
)
"""Pages outside of `docs`."""
RULES = ("code", "cell", "sentence", "paragraph", "link", "line")


@dataclass(frozen=True)
class Finding:
    page: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.rule}: {self.text}"


def pages() -> list[Path]:
    docs = [page for page in (ROOT / "docs").rglob("*.md") if "site" not in page.parts]
    return sorted([*(ROOT / name for name in ELSEWHERE), *docs])


def check_page(page: Path) -> list[Finding]:
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    return list(check_text(page.read_text(encoding="utf-8"), name))


def check_text(text: str, page: str) -> Iterator[Finding]:
    for kind, start, lines in split_blocks(text):
        if kind == "code":
            for number, line in enumerate(lines, start):
                if len(line) > CODE_WIDTH:
                    yield Finding(page, number, "code", f"{len(line)} characters: {line.strip()}")
            continue
        for number, line in enumerate(lines, start):
            for label, target in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", line):
                if re.fullmatch(r"`?[\w./-]+\.md`?", label):
                    yield Finding(
                        page, number, "link", f"{label} names a file, not {target}'s title"
                    )
            if kind != "table" and len(line) > LINE_WIDTH and "](" not in line:
                yield Finding(page, number, "line", f"{len(line)} characters")
        if kind == "table":
            for number, line in enumerate(lines, start):
                for cell in split_row(line):
                    count = len(sentences(cell))
                    if count > CELL_SENTENCES:
                        yield Finding(page, number, "cell", f"{count} sentences: {cell[:60]}")
                    yield from long_sentences(page, number, cell)
            continue
        if len(lines) > PARAGRAPH_LINES:
            yield Finding(page, start, "paragraph", f"{len(lines)} lines: {lines[0][:60]}")
        yield from long_sentences(page, start, " ".join(line.strip() for line in lines))


def long_sentences(page: str, line: int, text: str) -> Iterator[Finding]:
    for sentence in sentences(text):
        words = count_words(sentence)
        if words > SENTENCE_WORDS:
            yield Finding(page, line, "sentence", f"{words} words: {sentence[:60]}")


def split_blocks(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """(code, table or prose; first line's number; lines). An item of a list is a block."""
    kind, start, lines = "", 0, list[str]()
    inside = comment = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        if fence or inside:
            if fence:
                if lines:
                    yield kind, start, lines
                inside, kind, start, lines = not inside, "code", number + 1, []
            else:
                lines.append(line)
            continue
        if "<!--" in line:
            comment = True
        if comment:
            comment = "-->" not in line
            line = ""
        is_table = line.lstrip().startswith("|")
        new = "table" if is_table else "prose"
        is_item = re.match(r"\s*(?:[-*]|\d+\.)\s", line) is not None
        is_head = line.startswith(("#", "!!!", "::: ", "    "))
        if lines and (not line.strip() or new != kind or is_item or is_head):
            yield kind, start, lines
            lines = []
        if line.strip() and not is_head:
            kind = new
            start = start if lines else number
            lines.append(line)


def split_row(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", re.sub(r"`[^`]*`", "code", line).strip().strip("|"))
    return [cell.strip() for cell in cells]


def sentences(text: str) -> list[str]:
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\b(e\.g|i\.e|et al|vs|cf|Fig|Eq|No|resp)\.", r"\1", text)
    text = re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text)
    parts = re.split(r"(?<=[.!?])[)\"']*\s+(?=[\"'(]*[A-Z0-9μΣη])", text)
    return [part for part in parts if re.search(r"\w", part)]


def count_words(sentence: str) -> int:
    return len(re.findall(r"[^\W_][\w'’.,-]*", sentence))


def excused() -> set[tuple[str, str]]:
    found = set()
    for line in EXCEPTIONS.read_text(encoding="utf-8").splitlines():
        entry = line.partition("#")[0].strip()
        if entry:
            page, _, rule = entry.partition(":")
            if rule.strip() and rule.strip() not in RULES:
                raise ValueError(f"{EXCEPTIONS.name}: {rule.strip()} is no rule; known: {RULES}.")
            found.add((page.strip(), rule.strip()))
    return found


def check(chosen: list[Path]) -> list[Finding]:
    allowed = excused()
    findings = [finding for page in chosen for finding in check_page(page)]
    return [f for f in findings if not {(f.page, ""), (f.page, f.rule)} & allowed]


if __name__ == "__main__":
    found = check([Path(name).resolve() for name in sys.argv[1:]] or pages())
    print("\n".join(map(str, found)))
    sys.exit(bool(found))
