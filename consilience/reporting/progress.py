"""Rounds as they finish: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from consilience.runs.observation import Observation
from consilience.runs.text import duration, rate

MOST_NAMED = 5  # refused replies a round


def shown(
    observations: Iterable[Observation], *, rounds: int, done: int = 0, console: Console | None = None
) -> Iterator[Observation]:
    """Pass observations on and show round, main metric, loss, clients per second and the time left."""
    console = console or Console(stderr=True)
    return (_live if console.is_terminal else _lines)(observations, rounds, done, console)


def _live(observations: Iterable[Observation], rounds: int, done: int, console: Console) -> Iterator[Observation]:
    status = TextColumn("{task.description}", markup=False)
    columns = (TextColumn("round {task.completed}/{task.total}"), BarColumn(), status)
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("preparing the first round", total=rounds, completed=done)
        clock = _Clock(rounds, done)
        for observation in observations:
            bar.update(task, completed=observation.round.number, description=_status(observation, clock))
            _name_refused(observation, bar.console)
            yield observation


def _lines(observations: Iterable[Observation], rounds: int, done: int, console: Console) -> Iterator[Observation]:
    clock, width = _Clock(rounds, done), len(str(rounds))
    for observation in observations:
        number = f"{observation.round.number:{width}}/{rounds}"
        console.print(f"round {number}  {_status(observation, clock)}", highlight=False, soft_wrap=True, markup=False)
        _name_refused(observation, console)
        yield observation


def _status(observation: Observation, clock: _Clock) -> str:
    speed = rate(observation.timing["clients_per_second"])
    return f"{observation.quality()}{_rejected(observation)}  {speed}  left {clock.left(observation)}"


def _rejected(observation: Observation) -> str:
    """'  refused 3 (nonfinite 2, shape 1)', if any reply was."""
    found: dict[str, int] = observation.row["rejected"]
    return f"  refused {sum(found.values())} ({', '.join(f'{why} {n}' for why, n in found.items())})" if found else ""


def _name_refused(observation: Observation, console: Console) -> None:
    """Who sent what could not be used, a line each: names and keys from outside are escaped and never marked up."""
    refusals = observation.round.cohort.refusals
    for refusal in refusals[:MOST_NAMED]:
        console.print(f"  {refusal}", highlight=False, soft_wrap=True, markup=False)
    if len(refusals) > MOST_NAMED:
        console.print(f"  ... and {len(refusals) - MOST_NAMED} more", highlight=False, markup=False)


class _Clock:
    """Time left by the mean of the rounds so far; the first one, which also measures and compiles, counts least."""

    def __init__(self, rounds: int, done: int) -> None:
        self.rounds, self.first = rounds, done
        self.began = self.after_first = time.perf_counter()

    def left(self, observation: Observation) -> str:
        now, number = time.perf_counter(), observation.round.number
        if number == self.first + 1:
            self.after_first = now
            return duration((now - self.began) * (self.rounds - number))
        return duration((now - self.after_first) / (number - self.first - 1) * (self.rounds - number))
