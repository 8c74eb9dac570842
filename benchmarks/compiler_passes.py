"""Whether tracing a step and updating its carry in place save time on a CPU: CPU seconds of a round with and without.

    python benchmarks/compiler_passes.py [--repeat 7] [--only mlp]

The passes for GPUs only (fuse, products, thin_convolutions) are measured by `benchmarks/lanes.py` on such a machine.
CPU seconds of the process are counted, not wall-clock time, so that other load on the machine matters less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from lanes import Workload, ours, workloads

from consilience.core.federation import Federation
from consilience.engines.compiler import in_place
from consilience.engines.compiler.in_place import CarryUpdates
from consilience.engines.compiler.trace import Trace
from consilience.engines.vectorised import program

NEVER = 10**9


def all_copied(traced: Trace, leaves: int, *, products: bool = False) -> CarryUpdates:
    """What `work_in_place` gives where every leaf of the carry is copied."""
    return CarryUpdates({}, [], {}, list(range(leaves)))


@contextmanager
def passes(name: str) -> Iterator[None]:
    """The compiler as it is, or without one pass."""
    hot = NEVER if name == "untraced" else program.HOT
    move = all_copied if name == "traced" else in_place.work_in_place
    with mock.patch.object(program, "HOT", hot), mock.patch.object(in_place, "work_in_place", move):
        yield


def clients_of(w: Workload) -> Federation:
    """Random rows."""
    draw, size = torch.Generator().manual_seed(0), w.steps * w.batch
    pairs = [
        (torch.randn(size, *w.shape, generator=draw), torch.randint(10, (size,), generator=draw))
        for _ in range(w.clients)
    ]
    return Federation.from_clients(pairs)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print("| workload | lane | untraced, ms | traced | traced, in place |\n|---|---|---|---|---|")
    for w in workloads(small=True):
        if options.only not in w.name:
            continue
        federation = clients_of(w)
        for lane in ("serial", "batched"):
            rounds, took = {}, dict[str, list[float]]()
            for name in ("untraced", "traced", "in place"):
                with passes(name):
                    rounds[name], _ = ours(w, federation, device="cpu", lane=lane)
                    for _ in range(60 // w.steps + 1 if lane == "batched" else 60 // (w.steps * w.clients) + 2):
                        rounds[name]()  # until a step has been met often enough to be traced
            for _ in range(options.repeat):  # in turn: what disturbs the machine disturbs all
                for name, one_round in rounds.items():
                    with passes(name):
                        began = time.process_time()
                        one_round()
                        took.setdefault(name, []).append(time.process_time() - began)
            best = [min(took[name]) * 1e3 for name in rounds]
            print(f"| {w.name} | {lane} | {' | '.join(f'{ms:,.1f}' for ms in best)} |", flush=True)


if __name__ == "__main__":
    main()
