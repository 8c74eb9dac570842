"""Positions of keys and strings in a TOML text, for edits that keep comments, order and layout."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Path = tuple[str | int, ...]
Span = tuple[int, int]

_SPACE = re.compile(r"[ \t]*")
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_KEY = re.compile(r"[A-Za-z0-9_-]+|\"(?:[^\"\\]|\\.)*\"|'[^']*'")
_STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'")
_LONG = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}', re.DOTALL)
_OTHER = re.compile(r"[^,\]}#\r\n]*")


@dataclass
class TomlSpans:
    """The spans of every key (a table may be named often) and of every one-line string, by their paths."""

    text: str
    keys: dict[Path, list[Span]] = field(default_factory=dict)
    strings: dict[Path, Span] = field(default_factory=dict)
    _at: int = 0
    _counts: dict[Path, int] = field(default_factory=dict)  # of the tables in an array of tables

    def __post_init__(self) -> None:
        here: Path = ()
        self._skip(_BLANK)
        while self._at < len(self.text):
            if self.text.startswith("[", self._at):
                here = self._header()
            else:
                self._pair(here)
            self._skip(_BLANK)

    def _skip(self, pattern: re.Pattern[str]) -> Span:
        """Skip a match at the current position; returns its span."""
        found = pattern.match(self.text, self._at)
        if found is None:
            raise ValueError(f"no {pattern.pattern} at character {self._at}")
        start, self._at = self._at, found.end()
        return start, found.end()

    def _take(self, mark: str) -> bool:
        if self.text.startswith(mark, self._at):
            self._at += len(mark)
            return True
        return False

    def _header(self) -> Path:
        many = self._take("[[") or not self._take("[")
        path = self._key((), header=True)
        if many:
            self._counts[path] = self._counts.get(path, 0) + 1
        self._take("]]" if many else "]")
        return self._inside(path)

    def _inside(self, path: Path) -> Path:
        """The path of the last table, where the path is that of an array of tables."""
        return (*path, self._counts[path] - 1) if path in self._counts else path

    def _key(self, path: Path, header: bool = False) -> Path:
        """A key, dotted or not, below a path."""
        while True:
            self._skip(_SPACE)
            start, end = self._skip(_KEY)
            if header:
                path = self._inside(path)
            path = (*path, self.text[start:end].strip("\"'"))
            self.keys.setdefault(path, []).append((start, end))
            self._skip(_SPACE)
            if not self._take("."):
                return path

    def _pair(self, path: Path) -> None:
        below = self._key(path)
        self._take("=")
        self._skip(_SPACE)
        self._value(below)

    def _value(self, path: Path) -> None:
        if _LONG.match(self.text, self._at):
            self._skip(_LONG)
        elif _STRING.match(self.text, self._at):
            self.strings[path] = self._skip(_STRING)
        elif self._take("["):
            number = 0
            self._skip(_BLANK)
            while not self._take("]"):
                self._value((*path, number))
                number += 1
                self._skip(_BLANK)
                self._take(",")
                self._skip(_BLANK)
        elif self._take("{"):
            self._skip(_BLANK)
            while not self._take("}"):
                self._pair(path)
                self._skip(_BLANK)
                self._take(",")
                self._skip(_BLANK)
        else:
            self._skip(_OTHER)
