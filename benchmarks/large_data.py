"""Training on a file that is larger than the memory allowed, against the same rounds on rows in memory.

    python benchmarks/large_data.py                          # 20 GB of pictures under a limit of 4 GB, about 6 minutes
    python benchmarks/large_data.py --gb 2 --rounds 3

Pictures of 3 x 64 x 64 bytes and their labels lie in two .npy files, made and removed by the script. Clients own 1,500
consecutive rows each; 8 of them train for one epoch in batches of 50 in every round. Each case is a process of its own:
"file" has the whole file and a limit of its address space (RLIMIT_AS), "memory" has as many clients as fit into 1 GB,
whose rows are in memory as float32, "memory, bytes" the same as bytes. Before the file is read, it is dropped from the
system's cache. The cases alternate several times, so that other load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

SHAPE, ROWS, COHORT, BATCH, CLASSES = (3, 64, 64), 1_500, 8, 50, 10
CASES = ("memory", "memory, bytes", "file")
MEMORY_GB = 1.0  # of float32 rows in the cases in memory


def main() -> None:
    """Make the file, run the cases in turn, print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gb", type=float, default=20)
    options.add_argument("--limit-gb", type=float, default=4)
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--turns", type=int, default=2)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--lane", default="streams")
    options.add_argument("--folder", type=Path, help="where the files go; by default the system's temporary folder")
    options.add_argument("--case", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.case:
        print(json.dumps(measured(given.case, given)), flush=True)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        given.folder = Path(folder)
        began = time.perf_counter()
        write(given)
        print(f"wrote {given.gb:g} GB in {time.perf_counter() - began:.0f} s", flush=True)
        found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
        for _ in range(given.turns):
            for case in CASES:
                found[case].append(in_process(case, given))
                print(f"  {case}: {found[case][-1]}", flush=True)
    table(found)


def write(given: argparse.Namespace) -> None:
    """Random pictures, a brighter square in a place that depends on the class."""
    rng = np.random.default_rng(0)
    many = int(given.gb * 1e9 / np.prod(SHAPE)) // ROWS * ROWS
    labels = rng.integers(0, CLASSES, many)
    np.save(given.folder / "y.npy", labels)
    noise = rng.integers(0, 200, (ROWS, *SHAPE), dtype=np.uint8)
    with open(given.folder / "x.npy", "wb") as file:
        head = {"descr": "|u1", "fortran_order": False, "shape": (many, *SHAPE)}
        np.lib.format.write_array_header_2_0(file, head)
        for begin in range(0, many, ROWS):
            rows = noise.copy()
            for label in range(CLASSES):
                rows[labels[begin : begin + ROWS] == label, :, 6 * label : 6 * label + 6, :20] += 55
            file.write(rows.data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_process(case: str, given: argparse.Namespace) -> dict[str, float]:
    """One case, under the limit."""
    command = [sys.executable, __file__, "--case", case]
    for key in ("gb", "limit_gb", "rounds", "threads", "lane", "folder"):
        command += [f"--{key.replace('_', '-')}", str(getattr(given, key))]
    limit = int(given.limit_gb * 2**30)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=limited)
    return json.loads(done.stdout.splitlines()[-1])


def measured(case: str, given: argparse.Namespace) -> dict[str, float]:
    """Rows trained per second, the median round, and the peak of memory."""
    import consilience as cs
    from consilience.core.federation import Rows

    torch.set_num_threads(given.threads)
    began = time.perf_counter()
    x: Any = cs.open_rows(given.folder / "x.npy", mean=0.5, deviation=0.25)
    y = torch.from_numpy(np.load(given.folder / "y.npy"))
    clients = len(y) // ROWS
    if case != "file":
        clients = max(COHORT, int(MEMORY_GB * 1e9 / 4 / np.prod(SHAPE)) // ROWS)
        y = y[: clients * ROWS]
        x = x[: clients * ROWS] if case == "memory" else x.take(np.arange(clients * ROWS))
    starts, sizes = torch.arange(clients) * ROWS, torch.full((clients,), ROWS)
    federation = cs.Federation(train=Rows(x=x, y=y, starts=starts, sizes=sizes), classes=CLASSES)
    where = "host" if case == "memory, bytes" else "auto"
    engine = cs.Vectorised(cs.Task(network()), federation, device="cpu", lane=given.lane, rows=where)
    made = time.perf_counter() - began
    selection = cs.Uniform(count=COHORT)
    algorithm = cs.fedavg(lr=0.05, epochs=1, batch_size=BATCH, selection=selection)
    stamps = [time.perf_counter()]
    losses = []
    for done in cs.run(algorithm, engine, rounds=given.rounds + 1, seed=1):
        stamps.append(time.perf_counter())
        losses.append(float(done.cohort.reply["loss"].mean()))
    seconds = np.diff(stamps)[1:]  # the first round traces the step
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "rows_per_second": COHORT * ROWS / statistics.median(seconds),
        "fastest": COHORT * ROWS / float(seconds.min()),
        "peak_gib": peak,
        "made": made,
        "clients": clients,
        "loss": losses[-1],
    }


def network() -> nn.Module:
    """A small convolutional network."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 5 * 5, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
    )


def table(found: dict[str, list[dict[str, float]]]) -> None:
    """Print one line per case, its best turn, and the ratio to memory."""
    print(f"\n{'':16}{'clients':>9}{'rows/s':>9}{'of memory':>11}{'peak GiB':>10}{'make s':>8}")
    first = max(one["fastest"] for one in found["memory"])
    for case, turns in found.items():
        rate = max(one["fastest"] for one in turns)
        peak, made = (max(one[key] for one in turns) for key in ("peak_gib", "made"))
        print(f"{case:16}{turns[0]['clients']:>9,.0f}{rate:>9,.0f}{rate / first:>11.2f}{peak:>10.2f}{made:>8.1f}")


if __name__ == "__main__":
    main()
