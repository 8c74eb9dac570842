"""The workload, defined once for all: 100 clients with 600 pictures each, 10 a round, one epoch of SGD on an MLP."""

import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

CLIENTS, COHORT, ROWS = 100, 10, 600
EPOCHS, BATCH, LR = 1, 32, 0.05


def build() -> nn.Module:
    """784-200-10, the same at every start."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def write(folder: Path, data_dir: str | None) -> str:
    """Put the rows into a folder, from which all contestants map them; what they are, in words."""
    if data_dir:
        from consilience.data.datasets import load

        found = load("mnist", data_dir=data_dir)
        x, y, kind = found.x.numpy(), found.y.numpy(), "MNIST"
    else:
        rng = np.random.default_rng(0)
        y = rng.integers(10, size=CLIENTS * ROWS)
        x = rng.standard_normal((len(y), 1, 28, 28), dtype=np.float32) + rng.standard_normal((10, 1, 28, 28))[y] * 0.3
        kind = "synthetic data of MNIST's shape"
    np.save(folder / "x.npy", x.astype(np.float32)[: CLIENTS * ROWS])
    np.save(folder / "y.npy", y.astype(np.int64)[: CLIENTS * ROWS])
    return kind


def rows(folder: str | Path, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One client's rows."""
    mine = slice(client * ROWS, (client + 1) * ROWS)
    x, y = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in "xy")
    return torch.from_numpy(np.array(x[mine])), torch.from_numpy(np.array(y[mine]))


def stamp(folder: str | Path) -> None:
    """Write down the time, and the CPU time that all processes of this contestant have used so far."""
    with Path(folder, "stamps.jsonl").open("a") as out:
        out.write(json.dumps([time.time(), cpu_seconds()]) + "\n")


def cpu_seconds() -> float:
    """Of all processes that were started with our mark in their environment, wherever they are (Linux)."""
    mark, total = f"FLOWER_BENCH={os.environ['FLOWER_BENCH']}".encode(), 0.0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "environ").read_bytes().split(b"\0"):
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                total += sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue  # not ours, or gone
    return total
