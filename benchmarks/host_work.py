"""Work of the host in a round besides training: CPU time, operations and reads of values from tensors.

    python benchmarks/host_work.py [--clients 100] [--rounds 60] [--layers 2]

A round of FedAvg over clients whose training is left out, so that selecting, drawing batches, screening, averaging and
keeping records remain. On a GPU the device waits for most of this. Less than a minute on one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from consilience.algorithms.fedavg import fedavg
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.engines.vectorised.engine import Vectorised
from consilience.task.task import Task

READS = ("aten::_local_scalar_dense", "aten::item")


class Counting(TorchDispatchMode):
    """Counts operations, and reads of single values."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.reads += op._schema.name in READS
        return op(*args, **(kwargs or {}))


def model(layers: int) -> nn.Module:
    """A small perceptron: its arithmetic hardly counts."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(16, 10))


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(100, 1, 4, 4, generator=generator), torch.randint(10, (100,), generator=generator))
        for _ in range(options.clients)
    ]
    engine = Vectorised(Task(model(options.layers)), Federation.from_clients(data), device="cpu", lane="batched")
    rounds = run(fedavg(lr=0.05, batch_size=5), engine, rounds=10**6)
    for _ in range(3):
        next(rounds)
    engine._tuner.fold = lambda program, carry, *_: carry  # type: ignore[method-assign]
    next(rounds)
    took = []
    for _ in range(options.rounds):
        began = time.process_time()
        next(rounds)
        took.append(time.process_time() - began)
    with Counting() as counting:
        next(rounds)
    print(
        f"{options.clients} clients, {2 * options.layers + 2} tensors: {statistics.median(took) * 1e3:.2f} ms "
        f"(least {min(took) * 1e3:.2f}) of processor time a round, {counting.operations} operations, "
        f"{counting.reads} reads"
    )


if __name__ == "__main__":
    main()
