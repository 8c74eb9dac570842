"""Runs the missing cells of a comparison, one after another or several at once; finished cells are kept."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from consilience.compare.cells import OVER, CellEnd, run_cell, status_of
from consilience.compare.display import Display
from consilience.compare.plan import Cell, Comparison, spelled
from consilience.compare.results import refuse_questions
from consilience.compare.together import run_together
from consilience.core.settings import Invalid
from consilience.data.dataset import Dataset
from consilience.experiments.assembly import assemble, read_data, spread
from consilience.experiments.config.config import Config, from_table
from consilience.runs import canonical, identity
from consilience.runs.disk import explain, make_folder, read_file, replace_file
from consilience.runs.identity import changed_keys
from consilience.runs.interrupts import Interrupts
from consilience.runs.lock import RunLock
from consilience.runs.row_log import RecordError
from consilience.runs.toml_text import loads

_PLAN = "plan.json"
_WAIT = 0.5  # seconds between two checks that the workers are alive


class Data:
    """A cache of the data set read last: most cells of a comparison share it."""

    def __init__(self) -> None:
        self._key = ""
        self._data: Dataset | None = None

    def of(self, config: Config) -> Dataset:
        """The data that these settings name."""
        key = repr((config.data, config.data_dir))
        if self._data is None or key != self._key:
            self._data, self._key = read_data(config), key
        return self._data


def execute(comparison: Comparison, *, jobs: int, console: Console, together: int = 1) -> dict[str, CellEnd]:
    """Run all unfinished cells; how each of them ended."""
    make_folder(comparison.folder)
    with RunLock(comparison.folder / "lock"):
        _check_plan(comparison)
        todo = [cell for cell in comparison.cells if status_of(comparison.folder / cell.name) not in OVER]
        data = Data()
        _try_everything(comparison, todo, data, console)
        _store_plan(comparison)
        if not todo:
            return {}
        with Display(console, len(comparison.cells), len(comparison.cells) - len(todo)) as display:
            if together > 1:
                return _jointly(comparison.folder, todo, together, data, display)
            if jobs > 1 and len(todo) > 1:
                return _side_by_side(comparison.folder, todo, min(jobs, len(todo)), display)
            return _in_turn(comparison.folder, todo, data, display)


def _check_plan(comparison: Comparison) -> None:
    """Refuse cells whose settings differ from those of the earlier start; new cells may be added."""
    before = _stored_plan(comparison.folder).get("cells", {})
    now = spelled(comparison)["cells"]
    found = []
    for name, cell in now.items():
        if name in before:
            found += [f"{name}: {change}" for change in _changes(before[name]["settings"], cell["settings"])]
    if found:
        shown = "\n  ".join(found[:20]) + (f"\n  and {len(found) - 20} more" if len(found) > 20 else "")
        raise Invalid(
            f"{comparison.folder} holds another comparison, whose runs have other settings:\n  {shown}\n"
            "undo the change, or give this comparison a folder of its own with --out"
        )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Changed settings that affect results; rounds too, since cells of unequal length cannot be compared."""
    rounds = [{"rounds": settings.get("rounds")} for settings in (before, now)]
    return changed_keys(rounds[0], rounds[1]) + identity.differences(before, now)


def _stored_plan(folder: Path) -> dict[str, Any]:
    path = folder / _PLAN
    try:
        found = canonical.decode(read_file(path))
    except FileNotFoundError:
        return {}
    except OSError as problem:
        raise RecordError(explain("read", path, problem)) from problem
    except ValueError as problem:
        raise RecordError(f"{path} is damaged: {problem}") from problem
    if not isinstance(found, dict) or not isinstance(found.get("cells", {}), Mapping):
        raise RecordError(f"{path} is damaged: it holds no cells")
    return found


def _store_plan(comparison: Comparison) -> None:
    now = spelled(comparison)
    together = {**now, "cells": {**_stored_plan(comparison.folder).get("cells", {}), **now["cells"]}}
    replace_file(comparison.folder / _PLAN, canonical.encode(together, pretty=True))


def _try_everything(comparison: Comparison, todo: Sequence[Cell], data: Data, console: Console) -> None:
    """Assemble every method once, and partition the data for every seed, before the first cell runs."""
    seen_methods: set[str] = set()
    seen_cuts: set[str] = set()
    with console.status("checking all methods") if console.is_terminal else contextlib.nullcontext():
        for cell in todo:
            cut = repr((cell.config.data, cell.config.partition, cell.seed))
            try:
                if cell.method not in seen_methods:
                    with contextlib.closing(assemble(cell.config, data.of(cell.config))) as experiment:
                        refuse_questions(comparison, experiment.task.metrics.rows)
                elif cut not in seen_cuts:
                    spread(cell.config, data.of(cell.config))
            except Invalid as problem:
                raise Invalid(f"{cell.method}, seed {cell.seed}: {problem}") from problem
            seen_methods.add(cell.method)
            seen_cuts.add(cut)


def _in_turn(folder: Path, todo: Sequence[Cell], data: Data, display: Display) -> dict[str, CellEnd]:
    ended: dict[str, CellEnd] = {}
    for cell in todo:
        display.begin(cell)

        def notify(number: int, text: str, cell: Cell = cell) -> None:
            display.round(cell, number, text)

        known = data.of(cell.config)
        found = run_cell(folder / cell.name, cell.method, cell.config, data=known, threads=None, notify=notify)
        display.end(cell, found.text)
        ended[cell.name] = found
        if found.signal:
            break
    return ended


def _jointly(folder: Path, todo: Sequence[Cell], together: int, data: Data, display: Display) -> dict[str, CellEnd]:
    """Train new cells in groups of `together`; cells that were begun before are resumed alone."""
    begun = [cell for cell in todo if status_of(folder / cell.name)]
    ended = _in_turn(folder, begun, data, display)
    fresh = [cell for cell in todo if not status_of(folder / cell.name)]
    # methods with the same local work share a group: all methods of a seed, then the next seed
    for first in range(0, len(fresh), together):
        if any(found.signal for found in ended.values()):
            break
        cells = fresh[first : first + together]
        for cell in cells:
            display.begin(cell)
        found = run_together(folder, cells, [data.of(cell.config) for cell in cells], display.round)
        for cell in cells:
            display.end(cell, found[cell.name].text)
        ended |= found
    return ended


def _side_by_side(folder: Path, todo: Sequence[Cell], jobs: int, display: Display) -> dict[str, CellEnd]:
    """Workers take cells from a queue; a signal to this process is passed on to them, and they save and stop."""
    context = multiprocessing.get_context("spawn")  # a forked CUDA context or thread pool would hang
    tasks, events = context.Queue(), context.Queue()
    for cell in todo:
        tasks.put((cell.name, cell.method, cell.config.toml()))
    threads = max(1, (os.cpu_count() or 1) // jobs)
    workers = [context.Process(target=work, args=(str(folder), threads, tasks, events)) for _ in range(jobs)]
    ended: dict[str, CellEnd] = {}
    begun: set[str] = set()
    by_name = {cell.name: cell for cell in todo}
    with Interrupts() as interrupts, ending(workers):
        notified = False
        for kind, name, number, text, signal in _events(events, workers):
            if interrupts.asked and not notified:
                notified = True
                for worker in workers:
                    worker.terminate()  # SIGTERM: they finish the round and save
            cell = by_name[name]
            if kind == "begin":
                begun.add(name)
                display.begin(cell)
            elif kind == "round":
                display.round(cell, number, text)
            elif kind != "":
                ended[name] = CellEnd(kind, text, interrupts.asked or signal)
                display.end(cell, text)
        for name in begun - ended.keys():
            ended[name] = CellEnd("failed", "its process ended without a word", interrupts.asked)
            display.end(by_name[name], ended[name].text)
    return ended


def _events(events: Any, workers: Sequence[Any]) -> Iterator[tuple[str, str, int, str, int]]:
    """Events of the workers while any is alive; an empty event from time to time, so that signals are handled."""
    name = ""
    while True:
        try:
            event = events.get(timeout=_WAIT)
            name = event[1]
            yield event
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                return
            if name:
                yield "", name, 0, "", 0


@contextlib.contextmanager
def ending(workers: Sequence[Any]) -> Iterator[None]:
    """Start the workers, and end all of them on exit."""
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
            worker.join(timeout=60)
            if worker.is_alive():
                worker.kill()
                worker.join(timeout=10)


def work(folder: str, threads: int, tasks: Any, events: Any) -> None:
    """The main function of a worker: cells from the queue until there are no more, or a signal stops it."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C at the terminal is handled by the parent, which passes it on once
    parent, data = os.getppid(), Data()
    while True:
        try:
            name, method, text = tasks.get(timeout=_WAIT)
        except queue.Empty:
            return
        config = from_table(loads(text))
        events.put(("begin", name, 0, "", 0))

        def notify(number: int, text: str, name: str = name) -> None:
            if os.getppid() != parent:
                raise SystemExit(1)  # the parent has ended; every round so far is saved
            events.put(("round", name, number, text, 0))

        found = run_cell(Path(folder) / name, method, config, data=data.of(config), threads=threads, notify=notify)
        events.put((found.status, name, 0, found.text, found.signal))
        if found.signal:
            return
