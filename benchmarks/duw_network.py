"""Cost of learning a schedule of aggregation weights over a whole network, by each method of computing the gradient.

    python benchmarks/duw_network.py --model resnet18 --ways server server:cpu server:nothing autograd

Random pictures; prints seconds and peak memory of an unfolded run (all rounds and the terminal pass) for each way.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

import consilience as cs
from consilience.meta import learning
from consilience.task.task import Task


def main() -> None:
    """One line per way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rows", type=int, default=500, help="per client")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ways", nargs="+", default=["server", "server:cpu", "server:nothing", "autograd"])
    given = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    pictures = torch.randn(given.clients * given.rows, 3, 32, 32, generator=draw)
    labels = torch.randint(0, 10, (len(pictures),), generator=draw)
    parts = zip(pictures.split(given.rows), labels.split(given.rows))
    federation = cs.Federation.from_clients(list(parts), classes=10)
    task = Task(cs.build_model(given.model, (3, 32, 32), 10, seed=0))
    count = sum(leaf.numel() for leaf in task.start()["params"].values())
    kept = 4 * count * given.clients * given.rounds / 2**30
    print(f"{given.model}: {count:,} parameters; {given.rounds} rounds x {given.clients} models are {kept:.2f} GiB")
    algorithm = cs.fedavg(lr=0.01, batch_size=given.batch_size)
    for way in given.ways:
        engine = cs.Vectorised(task, federation, lane=given.lane, device=given.device)
        gradient, _, keep = way.partition(":")
        print(f"{way:15} {measured(algorithm, engine, gradient, keep or 'device', given)}", flush=True)


def measured(
    algorithm: cs.Algorithm, engine: cs.Vectorised, gradient: str, keep: str, given: argparse.Namespace
) -> str:
    """Seconds of the fastest iteration (the first ones measure and compile), and peak memory."""
    on_gpu, seconds, began = engine.device.type == "cuda", [], time.perf_counter()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    settings = {"rounds": given.rounds, "iterations": given.iterations, "lr": 0.01}
    try:
        for step in learning(algorithm, engine, gradient=gradient, keep=keep, **settings):
            seconds.append(time.perf_counter() - began)
            began, slope = time.perf_counter(), step.slope
    except torch.OutOfMemoryError:
        return f"out of memory ({torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB)"
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{min(seconds):8.2f} s an iteration, peak {peak / 2**30:.2f} GiB, |slope| {float(slope.abs().max()):.4g}"


if __name__ == "__main__":
    main()
