"""Curves of any length in bounded memory: a series with too many points drops every second one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

MOST_POINTS = 600
_MOST_KEYS = 120  # of a record


class Series:
    """(round, value) in order; the last point is always included, the others are thinned evenly."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most, self._every, self._count = most, 1, 0
        self.rounds: list[int] = []
        self.values: list[float] = []
        self._waiting: tuple[int, float] | None = None  # the last point, if thinning dropped it
        self.low: tuple[float, int] | None = None
        self.high: tuple[float, int] | None = None

    def add(self, round: int, value: float) -> None:
        """The next point."""
        self.low = (value, round) if self.low is None or value < self.low[0] else self.low
        self.high = (value, round) if self.high is None or value > self.high[0] else self.high
        if self._count % self._every == 0:
            self.rounds.append(round)
            self.values.append(value)
            self._waiting = None
        else:
            self._waiting = (round, value)
        self._count += 1
        if len(self.rounds) >= self._most:
            self.rounds, self.values, self._every = self.rounds[::2], self.values[::2], self._every * 2
            if self._count - 1 != (len(self.rounds) - 1) * self._every:
                self._waiting = (round, value)

    @property
    def last(self) -> float | None:
        """The newest value."""
        return self._waiting[1] if self._waiting else self.values[-1] if self.values else None

    def points(self, most: int = MOST_POINTS) -> list[list[float]]:
        """[rounds, values] of at most `most` points, including the last."""
        rounds, values = list(self.rounds), list(self.values)
        if self._waiting:
            rounds.append(self._waiting[0])
            values.append(self._waiting[1])
        step = math.ceil(len(rounds) / most)
        if step > 1:
            kept = range((len(rounds) - 1) % step, len(rounds), step)  # counted from the end
            rounds, values = [rounds[k] for k in kept], [values[k] for k in kept]
        return [[float(number) for number in rounds], [float(f"{value:.6g}") for value in values]]


class Curves:
    """A series for every number of a record."""

    def __init__(self) -> None:
        self.by_key: dict[str, Series] = {}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """New rows, in order."""
        for row in rows:
            for key, value in row.items():
                if is_number(value) and key != "round" and (key in self.by_key or len(self.by_key) < _MOST_KEYS):
                    self.by_key.setdefault(key, Series()).add(row["round"], float(value))


def is_number(value: Any) -> bool:
    """Whether it is a finite number and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
