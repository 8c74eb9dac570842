"""Runs of `consilience run` on this machine, disturbed and resumed, against the same run undisturbed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from chaos import faults
from chaos.faults import Clock, Fault

ROUNDS = 12
SETTINGS = (
    *(f"rounds={ROUNDS}", "threads=1", "model.hidden=[6]", "partition.clients=6", "algorithm.epochs=1", "seed=3"),
    *("engine.device=cpu", "engine.lane=serial"),
)
ALGORITHMS: tuple[tuple[str, ...], ...] = (
    ("algorithm=fedavg",),
    ("algorithm=scaffold",),
    ("algorithm=fedavgm",),
    (
        "algorithm=dp_fedavg",
        "algorithm.noise_seed=2",
        "algorithm.rate=0.6",
        "algorithm.quantile=0.5",
        "algorithm.count_noise=3",
    ),
)
EQUAL = ("metrics.jsonl", "clients.jsonl", "model.safetensors", "privacy.jsonl")
LONGEST = 240.0  # seconds for one start of a run


class Broken(AssertionError):
    """Something that must hold did not."""


class LocalCases:
    """Cases one after another in a folder; the undisturbed runs are made once."""

    def __init__(self, place: Path) -> None:
        self._place, self._known = place, dict[tuple[str, ...], Path]()
        place.mkdir(parents=True, exist_ok=True)

    def drawn(self, draw: random.Random) -> tuple[tuple[str, ...], list[Fault]]:
        """The settings and the faults of a case."""
        settings = (*draw.choice(ALGORITHMS), f"checkpoint.every={draw.choice((1, 2, 5))}")
        return settings, faults.drawn(draw, faults.LOCAL, ROUNDS, draw.randrange(1, 6))

    def run(self, name: str, settings: tuple[str, ...], schedule: list[Fault]) -> str:
        """Play a case; how it went, in a few words. `Broken` if anything that must hold does not."""
        before = self._undisturbed(settings)
        folder, clock = self._place / name, Clock(self._place / f"{name}-clock")
        starts, left, saved = 0, list(schedule), 0
        while True:
            starts += 1
            if starts > 3 * len(schedule) + 3:
                raise Broken(f"the run does not end after {starts} starts")
            process = self._start(settings, folder, clock)
            try:
                left = self._disturb(process, folder, clock, left)
                code = process.wait(LONGEST)
            finally:
                process.kill()
                process.wait()
            rounds = checkpoints(folder)
            if max(rounds, default=0) < saved:
                raise Broken(f"round {saved} was saved and is gone: {rounds}")
            saved = max(rounds, default=0)
            if code == 0:  # perhaps before the rest of the schedule
                break
        for file in EQUAL:
            if (before / file).exists() and (before / file).read_bytes() != (folder / file).read_bytes():
                raise Broken(f"{file} differs from the undisturbed run's")
        return f"{starts} starts, {len(schedule) - len(left)} of {len(schedule)} faults"

    def _start(self, settings: tuple[str, ...], folder: Path, clock: Clock) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "consilience"]
        command += (
            ["resume", str(folder)]
            if (folder / "run.json").exists()
            else ["run", *SETTINGS, *settings, "--folder", str(folder)]
        )
        with open(f"{folder}.log", "ab") as log:
            around = {**os.environ, **clock.environment, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=around)

    def _disturb(self, process: subprocess.Popen[bytes], folder: Path, clock: Clock, left: list[Fault]) -> list[Fault]:
        """Let the next faults happen when their rounds are on disk; those that are left when the process has ended."""
        while left:
            fault, end = left[0], time.monotonic() + LONGEST
            while rows(folder) < fault.after_round and process.poll() is None:
                if time.monotonic() > end:
                    raise Broken(f"round {fault.after_round} was not reached in {LONGEST:g} seconds")
                time.sleep(0.01)
            time.sleep(fault.delay)
            if process.poll() is not None:
                return left
            left = left[1:]
            if fault.kind == "kill":
                faults.kill(process.pid)
                return left
            if fault.kind == "pause":
                faults.pause(process.pid, fault.amount)
            elif fault.kind == "clock":
                clock.jump(3600 * fault.amount)
            else:
                faults.fill(process.pid, folder, fault.amount)
        return left

    def _undisturbed(self, settings: tuple[str, ...]) -> Path:
        if settings not in self._known:
            folder = self._place / f"undisturbed-{len(self._known)}"
            if self._start(settings, folder, Clock(self._place / "clock")).wait(LONGEST) != 0:
                raise Broken(f"the undisturbed run failed: {Path(f'{folder}.log').read_text()[-2000:]}")
            self._known[settings] = folder
        return self._known[settings]


def rows(folder: Path) -> int:
    """Rounds whose rows are on disk."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def checkpoints(folder: Path) -> list[int]:
    """Rounds that are whole in a checkpoint."""
    found = (folder / "checkpoints").glob("round-*/manifest.json")
    return sorted(int(json.loads(file.read_text())["round"]) for file in found)
