"""How far SimProx's weights are from uniform, and their effect on accuracy, option by option.

    python benchmarks/simprox_weights.py [--data mnist --data-dir ...] [--rounds 40] [--seeds 3] [--only relatives]

Twenty clients by Dirichlet 0.1, six a round by a sliding window, a perceptron. For each option: the largest over the
smallest weight of a round (median and largest over all rounds and seeds), the largest weight times the number of
clients, and the test accuracy over the last ten rounds (mean and standard deviation over the seeds). Methods whose
weights differ from tensor to tensor, or that keep several models, show their accuracy alone.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

import consilience as cs
from consilience import algorithms, models
from consilience.selection import SlidingWindow
from consilience.server import ByExamples, UniformWeights

OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg, N_k / N": {"weighting": ByExamples()},
    "uniform": {"weighting": UniformWeights()},
    "as printed": {},
    "softmax=False": {"softmax": False},
    "softmax=False, previous_model=own": {"softmax": False, "previous_model": "own"},
    "scaled_norms, softmax=False": {"scaled_norms": True, "softmax": False},
    "temperature=3": {"temperature": 3.0},
    "compare_on=updates": {"compare_on": "updates"},
    "compare_on=updates, softmax=False": {"compare_on": "updates", "softmax": False},
    "compare_on=updates, scaled_norms, softmax=False": {
        "compare_on": "updates",
        "scaled_norms": True,
        "softmax": False,
    },
    "compare_on=updates, scaled_norms, temperature=0.2": {
        "compare_on": "updates",
        "scaled_norms": True,
        "temperature": 0.2,
    },
}
RELATIVES = ("simagg", "fedatt", "hierarchical_averaging", "clustered_averaging")


def main() -> None:
    """One line per option, and per relative."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--only", choices=("options", "relatives"))
    asked = parser.parse_args()
    methods = {name: ("simprox", options) for name, options in OPTIONS.items() if asked.only != "relatives"}
    methods |= {name: (name, {}) for name in RELATIVES if asked.only != "options"}
    data = cs.load_data(asked.data, data_dir=asked.data_dir)
    print(f"{'options':42} max/min: median  largest   m x largest weight   accuracy")
    for name, (recipe, options) in methods.items():
        ratios, largest, accuracies = [], [], []
        for seed in range(asked.seeds):
            parts = cs.partition("dirichlet", clients=20, alpha=asked.alpha, min_size=2)
            federation, _ = cs.federate(data, parts, seed=seed)
            work = {"lr": asked.lr, "epochs": asked.epochs, "batch_size": asked.batch_size}
            algorithm = algorithms.recipe(recipe)(**work, selection=SlidingWindow(fraction=0.3), **options)
            module = models.build("mlp", tuple(data.x.shape[1:]), data.classes, seed=seed)
            result = cs.train(module, federation, algorithm, rounds=asked.rounds, seed=seed, progress=False)
            for row in result.history if recipe in ("simprox", "hierarchical_averaging") else ():
                weights = np.array(row["weights"])
                ratios.append(weights.max() / weights.min() if weights.min() > 0 else np.inf)
                largest.append(weights.max() * len(weights))
            accuracies.append(statistics.fmean(row["accuracy"] for row in result.history[-10:]))
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        shown = f"{np.median(ratios):15.3g} {max(ratios):8.3g} {np.mean(largest):20.3f}" if ratios else " " * 45
        print(f"{name:42} {shown}   {statistics.fmean(accuracies):.3f} +- {spread:.3f}", flush=True)


if __name__ == "__main__":
    main()
