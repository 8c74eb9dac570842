"""Learning-rate schedules and the number of rounds: fills in horizons, refuses rounds with a rate of zero."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from consilience.client.solver_wrappers import Scheduled
from consilience.core.algorithm import Algorithm
from consilience.core.rate_schedules import RateSchedule
from consilience.core.settings import Invalid, options_of
from consilience.options.parts import NONE, find
from consilience.server.averaging.steps.plain import ScheduledStep

BY_ROUND = ("lr_schedule", "server_lr_schedule")


def with_horizons(given: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """The options of an algorithm, in which round schedules without a horizon get the run's number of rounds.

    The horizon becomes part of the stored config: more rounds on resume do not change it.
    """
    return {
        key: _filled(f"algorithm.{key}", value, rounds) if key in BY_ROUND else value for key, value in given.items()
    }


def _filled(key: str, given: Any, rounds: int) -> Any:
    table = {"name": given} if isinstance(given, str) and given != NONE else given
    if not isinstance(table, Mapping) or "name" not in table:
        return given
    known, table = (
        options_of(find(key if isinstance(given, str) else f"{key}.name", table["name"], RateSchedule)),
        dict(table),
    )
    if "horizon" in known:
        if rounds < 1 and "horizon" not in table:
            raise Invalid(f"{key}: the warm-up takes all rounds of the run, so that none is left for {table['name']!r}")
        return {"horizon": rounds, **table}
    length = table.get("length")
    if "then" in table and isinstance(length, int):
        table["then"] = _filled(f"{key}.then", table["then"], rounds - length)
    return table


def refuse_idle_rounds(algorithm: Algorithm, rounds: int) -> None:
    """Refuse more rounds than a schedule has nonzero rates for."""
    for schedule in _by_round(algorithm):
        end = schedule.zero_from
        if end is not None and end < rounds:
            raise Invalid(
                f"rounds = {rounds}, but the learning rate of {schedule!r} is 0 from round {end + 1} on, so that "
                "nothing would be learned: give it a floor, another horizon, or fewer rounds"
            )


def _by_round(part: Any) -> Iterator[RateSchedule]:
    """All round schedules of an algorithm, at any depth."""
    if isinstance(part, Scheduled) and part.rounds is not None:
        yield part.rounds
    elif isinstance(part, ScheduledStep):
        yield part.schedule
    for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
        yield from _by_round(getattr(part, field.name))
