"""Thousands of rounds in one run folder: do memory, descriptors, tracked objects or the time of a round grow?

python benchmarks/long_run.py --rounds 10000                 (fedavg; about ten minutes on one core)
python benchmarks/long_run.py --rounds 10000 --algorithm dp_fedavg

A small run, with everything that a run does: metrics, client log, timing, a checkpoint every ten rounds, evaluation.
CPU time is this process's own, whatever else the machine does. The table comes last, a plot beside the run folder.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consilience.experiments import runner
from consilience.experiments.config.config import from_table
from consilience.experiments.live_run import Run
from consilience.runs.observation import Observation


def table(rounds: int, algorithm: str) -> dict[str, Any]:
    """The settings of the run."""
    more = {"noise": 20.0, "rate": 0.5} if algorithm == "dp_fedavg" else {"selection": {"name": "uniform", "count": 3}}
    return {
        "name": "long",
        "rounds": rounds,
        "threads": 1,
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": 6},
        "model": {"name": "logistic"},
        "algorithm": {"name": algorithm, "lr": 0.05, "epochs": 1, "batch_size": 64, **more},
        "engine": {"lane": "serial", "device": "cpu"},
        "checkpoint": {"every": 10, "keep": 3},
        "evaluation": {"every": 10},
    }


def measured() -> dict[str, float]:
    """What this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "fds": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }


class Meter:
    """Passes observations on and measures after every window of rounds."""

    def __init__(self, window: int) -> None:
        self.window, self.rows = window, list[dict[str, float]]()

    def __call__(self, run: Run) -> Iterator[Observation]:
        began, used = time.perf_counter(), time.process_time()
        for observation in run.observations():
            yield observation
            if observation.round.number % self.window:
                continue
            took, worked = time.perf_counter() - began, time.process_time() - used
            size = sum(file.stat().st_size for file in run.folder.path.rglob("*") if file.is_file()) / 2**20
            row = {"round": observation.round.number, "ms_per_round": 1000 * took / self.window}
            self.rows.append({**row, "cpu_ms": 1000 * worked / self.window, **measured(), "folder_mb": size})
            print("  ".join(f"{key} {value:,.1f}" for key, value in self.rows[-1].items()), flush=True)
            began, used = time.perf_counter(), time.process_time()


def plot(rows: list[dict[str, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(14, 3), constrained_layout=True)
    for axis, key in zip(axes, ("cpu_ms", "rss_mb", "fds", "objects")):
        axis.plot([row["round"] for row in rows], [row[key] for row in rows], marker="o")
        axis.set(title=key, xlabel="round", ylim=(0, None))
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--folder", type=Path, help="a new run folder (a temporary one)")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="long-run-")) / "run"
    meter = Meter(given.window)
    runner.execute(from_table(table(given.rounds, given.algorithm)), folder=folder, watch=meter)
    plot(meter.rows, folder.with_name(f"{folder.name}.png"))
    print(f"\n{given.algorithm}, {given.rounds} rounds in {folder}\n")
    print("| round | ms per round | CPU ms | RSS MB | descriptors | tracked objects | folder MB |")
    print("|---|---|---|---|---|---|---|")
    for row in meter.rows:
        print(
            f"| {row['round']:.0f} | {row['ms_per_round']:.1f} | {row['cpu_ms']:.1f} | {row['rss_mb']:.0f} "
            f"| {row['fds']:.0f} | {row['objects']:.0f} | {row['folder_mb']:.1f} |"
        )


if __name__ == "__main__":
    main()
