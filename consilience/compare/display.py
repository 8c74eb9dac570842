"""One display for all cells: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from consilience.compare.plan import Cell
from consilience.runs.text import duration


class Display:
    """`with Display(...) as display:`, then call it when cells begin, finish a round and end."""

    def __init__(self, console: Console, cells: int, done: int) -> None:
        self._console, self._cells, self._done = console, cells, done
        self._began: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.fields[name]}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
            self._bars = Progress(*columns, TextColumn("{task.description}"), TimeElapsedColumn(), console=console)
            self._all = self._bars.add_task("", total=cells, completed=done, name="runs")

    def __enter__(self) -> Display:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, cell: Cell) -> None:
        """A cell starts or is resumed."""
        self._began[cell.name] = time.perf_counter()
        if self._bars is not None:
            rounds = cell.config.rounds
            self._tasks[cell.name] = self._bars.add_task("preparing", total=rounds, name=f"  {cell.name}")

    def round(self, cell: Cell, number: int, text: str) -> None:
        """A round of a cell is finished."""
        if self._bars is not None:
            self._bars.update(self._tasks[cell.name], completed=number, description=text)

    def end(self, cell: Cell, text: str) -> None:
        """A cell is finished, stopped or has failed."""
        self._done += 1
        took = duration(time.perf_counter() - self._began.get(cell.name, time.perf_counter()))
        line = f"{self._done:{len(str(self._cells))}}/{self._cells}  {cell.method}, seed {cell.seed}: {text} ({took})"
        if self._bars is None:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            return
        self._bars.remove_task(self._tasks.pop(cell.name))
        self._bars.update(self._all, completed=self._done)
        self._bars.console.print(line, highlight=False, markup=False, soft_wrap=True)
