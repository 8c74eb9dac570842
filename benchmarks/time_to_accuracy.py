"""Simulated seconds to an accuracy, with and without waiting for slow clients: `python benchmarks/time_to_accuracy.py`.

Twenty clients of digits (Dirichlet 0.5) with log-normal speeds; times are simulated, not waited for.
"""

from __future__ import annotations

import argparse
from typing import Any

import consilience as cs

COMMON: dict[str, Any] = {"lr": 0.2, "epochs": 1, "batch_size": 16}
CLOCK: dict[str, Any] = {"rows_per_second": 100, "speed_spread": 1.0, "latency": 0.1, "upload": 1e5, "download": 1e6}
RUNS: dict[str, tuple[cs.Algorithm, dict[str, Any], int]] = {
    "fedavg, wait for all": (cs.fedavg(**COMMON), {}, 20),
    "fedavg, first 10 of 20": (cs.fedavg(**COMMON), {"enough_replies": 10}, 10),
    "fedavg, deadline 3 s": (cs.fedavg(**COMMON), {"deadline": 3.0}, 20),
    "fedbuff, buffer 10": (cs.fedbuff(buffer=10, **COMMON), {}, 10),
    "fedbuff, buffer 5": (cs.fedbuff(buffer=5, **COMMON), {}, 5),
    "simprox_buffered, buffer 5": (cs.simprox_buffered(buffer=5, **COMMON), {}, 5),
    "fedasync": (cs.fedasync(**COMMON), {}, 1),
}
"""Algorithm, additions to the environment, and replies that make a round."""


def main() -> None:
    """A line for each way of waiting, with an equal budget of replies."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--target", type=float, default=0.9)
    options.add_argument("--replies", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    data = cs.load_data("digits")
    federation, _ = cs.federate(data, cs.partition("dirichlet", clients=20, alpha=0.5), seed=given.seed)
    print("| run | replies to target | simulated seconds to target | accuracy at the end | simulated seconds |")
    print("|---|---|---|---|---|")
    for name, (algorithm, changes, replies) in RUNS.items():
        model = cs.build_model("mlp", tuple(data.x.shape[1:]), data.classes, seed=given.seed)
        history = cs.train(
            model,
            federation,
            algorithm,
            rounds=given.replies // replies,
            seed=given.seed,
            environment=cs.Environment(**CLOCK, **changes),
            progress=False,
        ).history
        hit = next((row for row in history if row["accuracy"] >= given.target), None)
        heard = sum(len(row["cohort"]) for row in history[: hit["round"]]) if hit else None
        seconds = f"{hit['simulated_seconds']:.1f}" if hit else "never"
        last = history[-1]
        print(f"| {name} | {heard or '—'} | {seconds} | {last['accuracy']:.3f} | {last['simulated_seconds']:.1f} |")


if __name__ == "__main__":
    main()
