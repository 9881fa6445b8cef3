"""The code blocks of a Markdown page.

A comment of HTML before a block says what the page does not show:

    <!-- not run: why -->           the block cannot be run here
    <!-- run first:                 Python that a reader is expected to have already
    x = ...
    -->
    <!-- output -->                 what the block of Python or commands before it prints

In a block of output `…` stands for lines, or for the rest of a line, that are left out.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^>]+?) -->\n+)?(?P<output><!-- output -->\n+)?"
    r"```(?P<kind>\w*)\n(?P<code>.*?)^```"
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
    is_output: bool = False
    """Whether it is what the block before it prints."""

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
            is_output = match["output"] is not None
            kind, code = match["kind"], match["code"]
            found.append(Block(page, line, kind, code, match["reason"], is_output))
    return found


def commands(block: Block, which: str = "quiver") -> list[tuple[list[str], list[str]]]:
    """The `quiver` commands of a block, as words, each with the lines that it is said to print.

    With `which="any"` the other commands too, and every one with its first word.
    """
    code = block.code.replace("\\\n", " ")
    prompted = re.search(r"^\$ ", code, re.MULTILINE) is not None
    found: list[tuple[list[str], list[str]]] = []
    for line in code.splitlines():
        if line.startswith("#"):
            continue
        if prompted and not line.startswith("$ "):
            if found:
                found[-1][1].append(line)
            continue
        if line.startswith("#"):
            continue
        for words in _one_by_one(line.removeprefix("$ ").partition(" #")[0]):
            if which == "any" and words:
                found.append((words, []))
            elif words[:1] == ["quiver"]:
                found.append((words[1:], []))
    return found


def commands_in_tables(page: Path) -> list[tuple[Block, list[str]]]:
    """The `quiver` commands that stand as code in cells of tables."""
    found = []
    for number, row in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for code in re.findall(r"`(quiver [^`]+)`", row) if row.startswith("|") else []:
            found.append((Block(page, number, "sh", code), shlex.split(code)[1:]))
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


_MASKS = (
    (re.compile(r"\b\d+(?:\.\d+)? (?:s|min|h)\b"), "TIME"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[ T][\d:.]+\S*)?"), "DATE"),
)


def mask(text: str) -> list[str]:
    """Lines without what differs from run to run: seconds and dates."""
    for pattern, word in _MASKS:
        text = pattern.sub(word, text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def missing_line(shown: str, printed: str) -> str | None:
    """The first line of a page that was not printed, in its order; `…` stands for anything.

    Scores with three or more decimals may differ by SCORE_TOLERANCE: processors differ in the last
    bits of a sum, and quantised messages make whole examples of them.
    """
    lines = iter(mask(printed))
    for line in mask(shown):
        if line != "…" and not any(_same_line(line, one) for one in lines):
            return line
    return None


SCORE_TOLERANCE = 0.03
_SCORE = re.compile(r"(?<![\d.])\d\.\d{3,}(?![\d.])")


def _same_line(shown: str, printed: str) -> bool:
    pattern = "".join(
        r"(\d\.\d+)" if _SCORE.fullmatch(part) else re.escape(part).replace("…", ".*")
        for part in re.split(f"({_SCORE.pattern})", shown)
    )
    match = re.fullmatch(pattern, printed)
    if match is None:
        return False
    scores = zip(_SCORE.findall(shown), match.groups(), strict=True)
    return all(abs(float(one) - float(other)) <= SCORE_TOLERANCE for one, other in scores)
