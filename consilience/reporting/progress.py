"""Rounds as they finish: a live display on a terminal and in a notebook, plain lines anywhere else."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from consilience.core.progress import listening
from consilience.reporting.terminal import sparkline
from consilience.runs.interrupts import noted_by
from consilience.runs.metric_table import main_of
from consilience.runs.observation import Observation
from consilience.runs.text import duration, quality, rate

MOST_NAMED = 5  # refused replies a round
_NARROW = 72  # columns: in narrower terminals, speed and the clients of the round are left out
_LONGEST_HISTORY = 4000
_EVERY = 0.5  # seconds between two drawings in a notebook


def shown(
    observations: Iterable[Observation], *, rounds: int, done: int = 0, console: Console | None = None
) -> Iterator[Observation]:
    """Pass observations on and show the round, the main metric's curve, refused replies and the time left."""
    console = console or Console(stderr=True)
    if _in_notebook():
        return _notebook(observations, rounds, done)
    return (_live if console.is_terminal and not console.is_dumb_terminal else _lines)(
        observations, rounds, done, console
    )


def _live(observations: Iterable[Observation], rounds: int, done: int, console: Console) -> Iterator[Observation]:
    status = _Status(rounds, done, curve=console.encoding.lower().startswith("utf"))
    with (
        noted_by(status.note),
        Live(status, console=console, refresh_per_second=4) as live,
        listening(status.hear),
    ):
        for observation in observations:
            status.see(observation)
            _name_refused(observation, live.console)
            yield observation


def _lines(observations: Iterable[Observation], rounds: int, done: int, console: Console) -> Iterator[Observation]:
    clock, width = _Clock(rounds, done), len(str(rounds))
    for observation in observations:
        number = f"{observation.round.number:{width}}/{rounds}"
        known = f"{quality(observation.row, observation.metrics)}{_rejected(observation)}"
        speed = rate(observation.timing["clients_per_second"])
        line = f"round {number}  {known}  {speed}  left {clock.left(observation)}"
        console.print(line, highlight=False, soft_wrap=True, markup=False)
        if observation.round.cohort.refusals:
            _name_refused(observation, console)
        yield observation


def _notebook(observations: Iterable[Observation], rounds: int, done: int) -> Iterator[Observation]:
    """One HTML output that is replaced: it needs no widgets, and the notebook stores the last state."""
    from IPython.display import HTML, display

    status, drawn = _Status(rounds, done), time.monotonic()
    handle = display(HTML(status.html()), display_id=True)

    def draw(*, at_once: bool = False) -> None:
        nonlocal drawn
        if handle is not None and (at_once or time.monotonic() - drawn >= _EVERY):
            drawn = time.monotonic()
            handle.update(HTML(status.html()))

    def hear(clients: int, of: int) -> None:
        status.hear(clients, of)
        draw()

    with noted_by(status.note), listening(hear):
        try:
            for observation in observations:
                status.see(observation)
                draw()
                yield observation
        finally:
            draw(at_once=True)


class _Status:
    """The progress so far, as two lines in a terminal or a few lines of HTML."""

    def __init__(self, rounds: int, done: int, *, curve: bool = True) -> None:
        self._rounds, self._round, self._curve = rounds, done, curve
        self._clock = _Clock(rounds, done)
        self._history: list[float | None] = []
        self._metric, self._quality, self._speed, self._left = "", "preparing the first round", "", ""
        self._in_round = (0, 0)  # clients done, of so many
        self._refused = 0
        self._last_refused = self._note = ""

    def hear(self, done: int, of: int) -> None:
        """Clients of the round in progress."""
        self._in_round = (done, of)

    def note(self, text: str) -> None:
        """Such as that the run was interrupted."""
        self._note = text

    def see(self, observation: Observation) -> None:
        """A finished round."""
        main = main_of(observation.metrics) if observation.metrics else None
        self._metric = main.title if main else "train loss"
        value = observation.row.get(main.key if main else "train_loss")
        self._history = [*self._history[1 - _LONGEST_HISTORY :], value if isinstance(value, float) else None]
        self._round, self._quality = observation.round.number, quality(observation.row, observation.metrics)
        self._speed, self._left = rate(observation.timing["clients_per_second"]), self._clock.left(observation)
        self._refused += sum(observation.row["rejected"].values())
        self._last_refused = _rejected(observation).strip() or self._last_refused
        self._in_round = (0, self._in_round[1] if self._round < self._rounds else 0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = options.max_width < _NARROW
        first = Table.grid(padding=(0, 1), expand=False)
        bar = ProgressBar(total=self._rounds, completed=self._round, width=12 if narrow else 24)
        left = f"left {self._left}" if self._left else ""
        more = [] if narrow else [self._clients(), f"elapsed {self._clock.elapsed()}"]
        first.add_row(f"round {self._round}/{self._rounds}", bar, left, *more)
        yield first
        known = [value for value in self._history if value is not None]
        curve = sparkline(known, 12 if narrow else 30) if self._curve and len(known) > 1 else ""
        parts = [curve, self._quality, "" if narrow else self._speed]
        parts.append(f"refused {self._refused}" if self._refused else "")
        yield Text("  ".join(part for part in parts if part), no_wrap=True, overflow="ellipsis")
        if self._note:
            yield Text(self._note)

    def html(self) -> str:
        """The same for a notebook; texts from outside are escaped."""
        words = [f"round {self._round}/{self._rounds}", self._quality, self._speed, self._clients()]
        words += [f"left {self._left}" if self._left else "", f"elapsed {self._clock.elapsed()}"]
        share = 100 * self._round / max(1, self._rounds)
        refused = f"<div>{html.escape(f'refused {self._refused} in all; last: {self._last_refused}')}</div>"
        return (
            '<div style="font-family: monospace; line-height: 1.5">'
            f'<progress max="100" value="{share:.1f}" style="width: 16em" aria-label="rounds"></progress> '
            f"{html.escape('  '.join(word for word in words if word))}"
            f"{_curve_svg(self._history, self._metric)}{refused if self._refused else ''}"
            f"{f'<div>{html.escape(self._note)}</div>' if self._note else ''}</div>"
        )

    def _clients(self) -> str:
        done, of = self._in_round
        return f"clients {done}/{of}" if of else ""


def _curve_svg(values: Iterable[float | None], title: str) -> str:
    """The main metric over rounds, as a line that takes the text's colour."""
    known = [value for value in values if value is not None and abs(value) < float("inf")]
    known = known[:: max(1, len(known) // 200)]
    if len(known) < 2:
        return ""
    low, span = min(known), max(known) - min(known) or 1.0
    points = " ".join(
        f"{298 * k / (len(known) - 1) + 1:.1f},{38 - 36 * (v - low) / span:.1f}" for k, v in enumerate(known)
    )
    label = html.escape(f"{title} over rounds: from {known[0]:.4g} to {known[-1]:.4g}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 300 40" width="300" height="40" style="display: block">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )


def _in_notebook() -> bool:
    """Whether output goes to a kernel's front end; IPython in a terminal is a terminal."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _rejected(observation: Observation) -> str:
    """'  refused 3 (nonfinite 2, shape 1)', if any reply was."""
    found: dict[str, int] = observation.row["rejected"]
    return f"  refused {sum(found.values())} ({', '.join(f'{why} {n}' for why, n in found.items())})" if found else ""


def _name_refused(observation: Observation, console: Console) -> None:
    """Print one line per refused reply; external names and keys are escaped and never read as markup."""
    refusals = observation.round.cohort.refusals
    for refusal in refusals[:MOST_NAMED]:
        console.print(f"  {refusal}", highlight=False, soft_wrap=True, markup=False)
    if len(refusals) > MOST_NAMED:
        console.print(f"  ... and {len(refusals) - MOST_NAMED} more", highlight=False, markup=False)


class _Clock:
    """Time left by the mean of the rounds so far; the first, which also measures and compiles, has the least weight."""

    def __init__(self, rounds: int, done: int) -> None:
        self.rounds, self.first = rounds, done
        self.began = self.after_first = time.perf_counter()

    def elapsed(self) -> str:
        return duration(time.perf_counter() - self.began)

    def left(self, observation: Observation) -> str:
        now, number = time.perf_counter(), observation.round.number
        if number == self.first + 1:
            self.after_first = now
            return duration((now - self.began) * (self.rounds - number))
        return duration((now - self.after_first) / (number - self.first - 1) * (self.rounds - number))
