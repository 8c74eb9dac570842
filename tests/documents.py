"""The pages and their fenced blocks, for the tests that run them.

A block is run unless the line above it says `<!-- not run: why -->`, or `<!-- needs: flwr -->` where that package is
not installed. Shell blocks hold `consilience ...` and `python examples/...` commands alone: whatever else stands in
one has to be marked.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
MARK = re.compile(r"<!-- not run: (\S.*) -->")
NEEDS = re.compile(r"<!-- needs: (\w+) -->")
ASSIGNMENT = re.compile(r"[A-Z_]+=")  # an environment variable in front of a command


class Block(NamedTuple):
    """A fenced block: where it begins, what it is, whether it follows the one before, and why it is not run."""

    file: Path
    line: int
    kind: str
    text: str
    follows: bool
    not_run: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


class Command(NamedTuple):
    """One command of a shell block, as words without variables and prompt, and the lines shown below it."""

    block: Block
    line: int
    words: tuple[str, ...]
    shown: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.block.file.relative_to(ROOT)}:{self.line}"

    @property
    def refused(self) -> bool:
        """Whether the page shows how the command is refused."""
        return bool(self.shown) and self.shown[0].startswith("error: ")


def blocks(file: Path) -> Iterator[Block]:
    """The fenced blocks of a document, in order."""
    lines = file.read_text(encoding="utf-8").splitlines()
    at, last_end = 0, -2
    while at < len(lines):
        if lines[at].startswith("```"):
            end = lines.index("```", at + 1)
            kind, text = lines[at].removeprefix("```").strip(), "\n".join(lines[at + 1 : end]) + "\n"
            above = next((line for line in reversed(lines[:at]) if line.strip()), "")
            yield Block(file, at + 1, kind, text, follows=at == last_end + 1, not_run=_reason(above.strip()))
            at = last_end = end
        at += 1


def _reason(above: str) -> str:
    """Why a block is not run, by the line above it; "" if it is."""
    mark, needs = MARK.fullmatch(above), NEEDS.fullmatch(above)
    if needs and importlib.util.find_spec(needs[1]) is None:
        return f"{needs[1]} is not installed"
    return mark[1] if mark else ""


def of_kind(*kinds: str) -> list[Block]:
    """The blocks that are to be run, of some kinds, from all documents."""
    return [block for file in FILES for block in blocks(file) if block.kind in kinds and not block.not_run]


def commands(block: Block) -> list[Command]:
    """The commands of a shell block; in `console` blocks they follow a prompt, and the rest is what they print."""
    found: list[Command] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        prompted = line.startswith("$ ")
        if block.kind == "console" and not prompted:
            if found:
                found[-1] = found[-1]._replace(shown=(*found[-1].shown, line))
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and ASSIGNMENT.match(words[0]):
            words = words[1:]
        if words:
            found.append(Command(block, number, tuple(words), ()))
    return found


@functools.cache  # pages ask for theirs one by one
def all_commands() -> tuple[Command, ...]:
    """Every command that is to be run."""
    return tuple(command for block in of_kind("bash", "console") for command in commands(block))
