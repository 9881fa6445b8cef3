"""The code blocks of a Markdown page.

A comment of HTML before a block says what the page does not show:

    <!-- not run: why -->           the block cannot be run here
    <!-- run first:                 Python that a reader is expected to have already
    x = ...
    -->
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^>]+?) -->\n+)?```(?P<kind>\w*)\n(?P<code>.*?)^```"
    r"|^<!-- run first:\n(?P<before>.*?)^-->",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    code: str
    reason: str | None = None
    """Why it is not run."""

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        if match["before"] is not None:
            found.append(Block(page, line, "python", match["before"]))
        else:
            found.append(Block(page, line, match["kind"], match["code"], match["reason"]))
    return found


def commands(block: Block) -> list[tuple[list[str], list[str]]]:
    """The `quiver` commands of a block, as words, each with the lines that it is said to print."""
    code = block.code.replace("\\\n", " ")
    prompted = re.search(r"^\$ ", code, re.MULTILINE) is not None
    found: list[tuple[list[str], list[str]]] = []
    for line in code.splitlines():
        if prompted and not line.startswith("$ "):
            if found:
                found[-1][1].append(line)
            continue
        for words in _one_by_one(line.removeprefix("$ ").partition(" #")[0]):
            if words[:1] == ["quiver"]:
                found.append((words[1:], []))
    return found


def _one_by_one(line: str) -> list[list[str]]:
    """The commands of a line, which semicolons part unless they are quoted."""
    words = shlex.shlex(line, posix=True, punctuation_chars=";")
    words.whitespace_split, words.commenters = True, ""
    found: list[list[str]] = [[]]
    for word in words:
        if word == ";":
            found.append([])
        else:
            found[-1].append(word)
    return found
