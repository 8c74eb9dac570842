"""CPU time of a round with a thousand and with a million clients, with almost nothing but host work.

    python benchmarks/population_host.py                     # or: fedavg scaffold

The network is so small that training takes next to nothing; one core, 50 clients a round, the median of 50 rounds after
ten. Other processes affect CPU time less than wall-clock time. The last column is the sum of all selected ids, which
shows whether a change selects other clients.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from torch import nn

import consilience as cs
from consilience.core.federation import Rows

ALGORITHMS = ("fedavg", "scaffold", "feddyn", "ditto", "simfedswap", "fedper")
COHORT, ROWS, STORED, ROUNDS, WARM = 50, 20, 2_000, 60, 10


def main(names: list[str]) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    print(f"{'':12}{'clients':>10}{'ms a round':>12}{'chosen':>16}")
    for name in names or ALGORITHMS:
        for clients in (1_000, 1_000_000):
            took, chosen = measured(name, clients)
            print(f"{name:12}{clients:>10,}{1e3 * took:>12.2f}{chosen:>16,}", flush=True)


def measured(name: str, clients: int) -> tuple[float, int]:
    """(median seconds of processor time, the sum of all chosen ids)."""
    torch.manual_seed(0)
    x, y = torch.randn(STORED, 16), torch.randint(0, 10, (STORED,))
    starts, sizes = torch.arange(clients) * ROWS % (STORED - ROWS), torch.full((clients,), ROWS)
    federation = cs.Federation(train=Rows(x=x, y=y, starts=starts, sizes=sizes), classes=10)
    network = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 10))
    engine = cs.Vectorised(cs.Task(network), federation, device="cpu", lane="batched")
    selection = cs.Uniform(count=COHORT)
    algorithm = getattr(cs, name)(lr=0.05, epochs=1, batch_size=ROWS, selection=selection)
    stamps, chosen = [], 0
    for done in cs.run(algorithm, engine, rounds=ROUNDS, seed=3):
        stamps.append(time.process_time())
        chosen += int(done.chosen.sum())
    return float(np.median(np.diff(stamps)[WARM:])), chosen


if __name__ == "__main__":
    main(sys.argv[1:])
