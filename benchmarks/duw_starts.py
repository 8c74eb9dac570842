"""DUW's environments I to IV from several initial models, in parallel; rows for the verdicts of docs/reproductions.md.

    python benchmarks/duw_starts.py --data path/to/data --minutes 9                  # on a GPU, six processes
    python benchmarks/duw_starts.py --data path/to/data --environments 1 --starts 5 --results folder
    python benchmarks/duw_starts.py --data path/to/data --tenth --device cpu --lane serial --jobs 1 --minutes 60

Each start of each environment is a process of examples/duw_environment.py. Starts that are stored with all their digits
are not run again; what does not fit into the time is left for the next call, which continues from the states in
--work. `benchmarks/reproduce.py --merge folder` takes the rows over.

Give it a GPU of its own: beside six processes that train convolutional networks an unfolded run of Environment IV took
2.0 s, and with DUW's processes alone 0.4 s (one H200 with MPS).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multi_process_service import shared_gpu
from reproduction_cells import RESULTS, ROOT, store, stored

from consilience.environments import preset
from consilience.runs import identity

Weights = Sequence[Sequence[float]]


def main() -> int:
    """Start what is missing, a few at a time, and store what is finished."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder that holds mnist and duw_mnist")
    parser.add_argument("--environments", type=int, nargs="+", default=[3, 1, 4, 2])
    parser.add_argument("--starts", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lane", default="auto")
    parser.add_argument(
        "--work", type=Path, help="where states of learning are kept, to go on with; else they are lost"
    )
    parser.add_argument("--iterations", type=int, help="the paper's number by default")
    parser.add_argument(
        "--tenth", action="store_true", help="a tenth of the paper's unfolded runs at ten times its rate; stored apart"
    )
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0)
    given = parser.parse_args()
    if given.work is not None:
        given.work.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * given.minutes
    waiting = [(e, s) for e in given.environments for s in given.starts if not known(e, s, given)]
    running: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as name, shared_gpu() as said:
        print(said, flush=True)
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < given.jobs:
                environment, start = waiting.pop(0)
                running[environment, start] = begin(environment, start, given, Path(name))
            time.sleep(0.5)
            for (environment, start), process in list(running.items()):
                if process.poll() is not None:
                    del running[environment, start]
                    failed += not finish(environment, start, process.returncode, given, Path(name))
        for (environment, start), process in running.items():
            process.kill()
            process.wait()
            said = (Path(name) / f"{environment}-{start}" / "log").read_text(encoding="utf-8").splitlines()
            print(f"environment {environment}: {said[-1] if said else 'nothing yet'}", flush=True)
    left = len(waiting) + len(running) + failed
    print(f"{left} starts are left" if left else "all starts are stored")
    return 1 if failed else 0


def experiment(environment: int, given: argparse.Namespace) -> str:
    """The name under which rows are stored."""
    return f"duw_environment_{environment}{'_tenth' if given.tenth else ''}"


def known(environment: int, start: int, given: argparse.Namespace) -> bool:
    """Whether a start's learned weights are stored with their digits."""
    rows = stored([RESULTS, given.results], experiment(environment, given))
    return any(row["seed"] == start and row["status"] == "finished" and row.get("learned") for row in rows)


def begin(environment: int, start: int, given: argparse.Namespace, work: Path) -> subprocess.Popen[bytes]:
    """A process that learns and compares."""
    out = work / f"{environment}-{start}"
    out.mkdir()
    command = [sys.executable, str(ROOT / "examples" / "duw_environment.py"), "--data", given.data]
    command += ["--environment", str(environment), "--starts", str(start), "--device", given.device]
    command += ["--out", str(out), "--results", str(out / "rows.json")]
    command += ["--lane", given.lane, *(["--work", str(given.work)] if given.work else [])]
    iterations, paper = given.iterations, preset(f"duw_{environment}").settings["unfolding"]
    if given.tenth:
        iterations = iterations or paper["iterations"] // 10
        command += ["--lr", str(10 * paper["lr"])]
    command += ["--iterations", str(iterations)] if iterations else []
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(out / "log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": paths})


def finish(environment: int, start: int, code: int, given: argparse.Namespace, work: Path) -> bool:
    """Store a start's rows, or show why there are none; whether there are."""
    out = work / f"{environment}-{start}"
    place = f"{time.strftime('%H:%M:%S')} environment {environment}, start {start}"
    if code != 0:
        print(f"{place}: failed\n{(out / 'log').read_text(encoding='utf-8')[-1500:]}", flush=True)
        return False
    rows = [row_of(found, given.device) for found in json.loads((out / "rows.json").read_text(encoding="utf-8"))]
    store(given.results, experiment(environment, given), rows)
    print(f"{place}: " + ", ".join(f"{row['method']} {row['final']:.4f}" for row in rows), flush=True)
    return True


def row_of(found: dict[str, Any], device: str) -> dict[str, Any]:
    """A row as those of benchmarks/reproduce.py."""
    import torch

    tests = [{"round": number, "accuracy": value} for number, value in enumerate(found["accuracy"], start=1)]
    row = {"method": found["algorithm"], "seed": found["start"], "digest": "", "status": "finished"}
    row |= {"rounds": len(tests), "planned": len(tests), "tests": tests, "final": found["accuracy"][-1]}
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    row |= {"device": f"cuda, {torch.cuda.get_device_name()}" if on_gpu else "cpu"}
    row |= {"torch": torch.__version__, "source": identity.source_digest()[:16]}
    if "weights" in found:
        tests[-1]["emphasis"] = emphasis(found["environment"], found["weights"])
        row |= {"learned": found["weights"], "iterations": found["iterations"]}
        row |= {"seconds": found["seconds"]} if found["seconds"] is not None else {}
    return row


def emphasis(environment: int, weights: Weights) -> float:
    """How much more weight the clients have that the paper says are emphasised; Environment IV: a rank correlation.

    I: client 4, which has most rows, before the last round. II: clients 0 and 1, whose labels nobody else has, in the
    second half of the rounds. III: client 0, which does two epochs. These are the mean weight of such a client minus
    that of another one. IV: Spearman's correlation of the weights with the probabilities of sending, in the first half.
    """
    rounds, half = len(weights), len(weights) // 2
    if environment == 4:
        from scipy import stats

        sending = preset("duw_4").environment.communication
        means = [math.fsum(row[client] for row in weights[:half]) / half for client in range(len(sending))]
        return float(stats.spearmanr(means, sending).statistic)
    chosen = {1: weights[: rounds - 1], 2: weights[half:], 3: weights}[environment]
    named = {1: (4,), 2: (0, 1), 3: (0,)}[environment]
    mine = [row[client] for row in chosen for client in named]
    others = [row[client] for row in chosen for client in range(len(row)) if client not in named]
    return math.fsum(mine) / len(mine) - math.fsum(others) / len(others)


if __name__ == "__main__":
    raise SystemExit(main())
