"""Processes that run the cells of a reproduction side by side, until they are done or the time is up."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import connection, get_context
from pathlib import Path

from reproduction_cells import Cell

from consilience.compare.cells import run_cell
from consilience.compare.running import Data
from consilience.experiments.config.config import from_table
from consilience.runs import identity
from consilience.runs.toml_text import loads

STARTING = 20.0  # seconds that a process takes to import, read data and record its first step
ROUND = 15.0  # seconds kept for the round in progress; more where rounds take longer

Folders = dict[tuple[str, str, int], Path]


class Pool:
    """Processes that each run one cell after the other."""

    def __init__(self, slots: list[str]) -> None:
        context = get_context("spawn")  # a forked CUDA context would hang
        self.workers = []
        for device in slots:
            mine, theirs = context.Pipe()
            process = context.Process(target=work_on, args=(theirs, device), daemon=True)
            self.workers.append((device, process, mine))

    @staticmethod
    @contextlib.contextmanager
    def opened(todo: list[Cell], gpu_jobs: int, cpu_jobs: int) -> Iterator[Pool]:
        """No more processes than there are cells for; none outlives this."""
        counts = {"cuda": gpu_jobs, "cpu": cpu_jobs}
        there = {kind: sum(cell.experiment.device == kind for cell in todo) for kind in counts}
        pool = Pool([kind for kind, most in counts.items() for _ in range(min(most, there[kind]))])
        for _, process, _ in pool.workers:
            process.start()
        try:
            yield pool
        finally:
            for _, process, _ in pool.workers:
                if process.is_alive():
                    process.kill()
                process.join(timeout=10)

    def serve(self, todo: list[Cell], deadline: float, folders: Folders) -> Iterator[tuple[Cell, str, dict[str, str]]]:
        """Give every free process a cell that can be finished; yields how cells ended, and on what they ran."""
        waiting, at_work, slowest, told = list(todo), dict[int, Cell](), ROUND, False
        pace = Pace()
        while True:
            left = deadline - time.monotonic()
            if not told:
                for number, (device, process, pipe) in enumerate(self.workers):
                    if number not in at_work and process.is_alive():
                        cell = next_cell(waiting, device, left - slowest, folders, pace)
                        if cell is not None:
                            waiting.remove(cell)
                            at_work[number] = cell
                            pace.begin(cell, folders[cell.key])
                            pipe.send((str(folders[cell.key]), cell.method, cell.run.config.toml()))
            if not at_work:
                return
            if left < slowest and not told:
                told = True
                for number in at_work:
                    os.kill(self.workers[number][1].pid, signal.SIGTERM)  # it finishes its round and saves
            if left <= 0:
                return
            pipes = {self.workers[number][2]: number for number in at_work}
            for pipe in connection.wait(list(pipes), timeout=min(1.0, max(left, 0.0))):
                number = pipes[pipe]
                try:
                    kind, *rest = pipe.recv()
                except EOFError:
                    yield at_work.pop(number), "its process ended", {}
                    continue
                if kind == "round":
                    slowest = max(slowest, 1.5 * rest[0])
                else:
                    pace.end(at_work[number])
                    yield at_work.pop(number), rest[0], rest[1]


class Pace:
    """How long cells take here, over what was expected of them."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, str, int], tuple[float, float]] = {}
        self._ratios: dict[str, list[float]] = {}

    def begin(self, cell: Cell, folder: Path) -> None:
        """Note the time."""
        self._begun[cell.key] = time.monotonic(), cell.seconds_left(folder)

    def end(self, cell: Cell) -> None:
        """Compare with what was expected; processes start only once, so that later cells are faster, not slower."""
        began, expected = self._begun[cell.key]
        ratio = (time.monotonic() - began) / max(expected, 1.0)
        self._ratios.setdefault(cell.experiment.name, []).append(ratio)

    def expected(self, cell: Cell, folder: Path) -> float:
        """Seconds that the rest of a cell takes: as guessed, until one of the experiment is through."""
        found = self._ratios.get(cell.experiment.name)
        left = cell.seconds_left(folder)
        return left * max(found[-4:]) if found else left + STARTING


def next_cell(waiting: list[Cell], device: str, left: float, folders: Folders, pace: Pace) -> Cell | None:
    """The first that can be finished in time; if none can, the first, which is then cut short."""
    mine = [cell for cell in waiting if cell.experiment.device == device]
    fitting = [cell for cell in mine if pace.expected(cell, folders[cell.key]) <= left]
    if fitting:
        return fitting[0]
    return mine[0] if mine and left > 2 * STARTING else None


def work_on(pipe: connection.Connection, device: str) -> None:
    """A process's life: cells from the pipe until it is closed, or until a signal has stopped one."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(1)
    data, versions = Data(), identity.code()
    facts = {
        "device": "cpu" if device == "cpu" else f"cuda, {torch.cuda.get_device_name()}",
        "torch": versions["torch"],
        "consilience": versions["consilience"],
        "source": versions["source"][:16],
    }
    while True:
        try:
            folder, method, text = pipe.recv()
        except EOFError:  # nobody is left to run for
            return
        config, last = from_table(loads(text)), [time.monotonic()]

        def notify(number: int, text: str, last: list[float] = last) -> None:
            took, last[0] = time.monotonic() - last[0], time.monotonic()
            if number > 2:  # data are read and steps recorded before
                pipe.send(("round", took))

        found = run_cell(Path(folder), method, config, data=data.of(config), threads=1, notify=notify)
        with contextlib.suppress(BrokenPipeError):
            pipe.send(("end", found.text, facts if found.status != "failed" else {}))
        if found.signal:
            return
