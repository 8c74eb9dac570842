"""Batch plans, some of them drawn ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from consilience.core.plans import Plan, Work
from consilience.engines.workload import Workload

Draw = Callable[[np.ndarray, np.ndarray], Plan]
"""(ids, steps) -> their plan."""


class DrawnPlans:
    """A cache of the next round's plans, keyed by everything they depend on."""

    def __init__(self) -> None:
        self._kept: dict[Any, Plan] = {}

    def get(self, work: Work, ids: np.ndarray, steps: np.ndarray, round: int, seed: int, draw: Draw) -> Plan:
        """Remove and return the plan that was drawn ahead, or draw a new one."""
        found = self._kept.pop(_key(work, ids, steps, round, seed), None)
        return draw(ids, steps) if found is None else found

    @property
    def kept(self) -> list[Plan]:
        """The plans drawn ahead, in the order of their groups."""
        return list(self._kept.values())

    def draw_ahead(
        self, work: Work, workload: Workload, groups: Iterable[np.ndarray], round: int, seed: int, draw: Draw
    ) -> None:
        """Draw the plans of these groups of a workload; what was kept before is dropped."""
        self._kept.clear()
        for group in groups:
            ids, steps = workload.ids[group], workload.steps[group]
            self._kept[_key(work, ids, steps, round, seed)] = draw(ids, steps)


def longest_first(workload: Workload) -> np.ndarray:
    """[m] places of the clients, then by id."""
    return np.lexsort((workload.ids, -workload.steps))


def _key(work: Work, ids: np.ndarray, steps: np.ndarray, round: int, seed: int) -> Any:
    return work, round, seed, ids.tobytes(), steps.tobytes()
