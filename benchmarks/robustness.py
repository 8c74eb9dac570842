"""Accuracy of every robust rule under every attack, on digits or MNIST, mean (and range) over seeds.

    python benchmarks/robustness.py [--data digits] [--alpha 0.5] [--seeds 3] [--rounds 30] [--only Krum,mean]

20 clients, all of whom take part; 4 of them (`fraction=0.2`) are hostile, and the rules are told so. With `--alpha 0`
the rows are spread evenly, otherwise by a Dirichlet draw per class. "broke down": the model overflowed. The last two
columns are one attack: accuracy under a pixel backdoor, and how often the trigger then works.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from typing import Any

import torch

from consilience.algorithms.fedavg import fedavg
from consilience.channel.attacks import (
    ALittleIsEnough,
    GaussianUpdate,
    InnerProduct,
    Mimic,
    Scaling,
    SignFlip,
    Trigger,
    attack_success,
    flip_labels,
    plant_backdoor,
)
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.protocols import Channel
from consilience.core.rounds import Diverged, run
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.data import datasets
from consilience.data.federate import federate
from consilience.data.partition import Dirichlet, Iid
from consilience.engines.vectorised.engine import Vectorised
from consilience.models import build
from consilience.server.averaging.combining.centred_clipping import CentredClipping
from consilience.server.averaging.combining.coordinate_wise import Median, TrimmedMean
from consilience.server.averaging.combining.geometric_median import GeometricMedian
from consilience.server.averaging.combining.krum import Bulyan, Krum, MultiKrum
from consilience.server.averaging.combining.nearest_neighbour_mixing import NearestNeighbourMixing
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.weighting.by_size import UniformWeights
from consilience.server.protocols import Combine

CLIENTS, HOSTILE = 20, 0.2
F = int(CLIENTS * HOSTILE)
RULES: dict[str, Combine] = {
    "mean": WeightedMean(),
    "coordinate median": Median(),
    "trimmed mean": TrimmedMean(f=F),
    "geometric median": GeometricMedian(),
    "Krum": Krum(f=F),
    "Multi-Krum": MultiKrum(f=F),
    "Bulyan": Bulyan(f=F),
    "centred clipping": CentredClipping(),
    "mixing + trimmed mean": NearestNeighbourMixing(f=F, then=TrimmedMean(f=F)),
    "mixing + geometric median": NearestNeighbourMixing(f=F, then=GeometricMedian()),
}
TRIGGER = Trigger(target=0, size=2, value=1.0)
ATTACKS = ("none", "sign flip", "scaling", "Gaussian", "label flip", "ALIE", "IPM, searched", "mimic", "backdoor")


def channel_of(attack: str, rule: Combine) -> dict[str, Channel]:
    """The channel of an attack on replies; none for those on data."""
    known: dict[str, Channel] = {
        "sign flip": SignFlip(fraction=HOSTILE),
        "scaling": Scaling(fraction=HOSTILE, factor=-10.0),
        "Gaussian": GaussianUpdate(fraction=HOSTILE, sigma=1.0),
        "ALIE": ALittleIsEnough(fraction=HOSTILE, strength=1.5),
        "IPM, searched": InnerProduct(fraction=HOSTILE, against=rule),
        "mimic": Mimic(fraction=HOSTILE),
    }
    return {"channel": known[attack]} if attack in known else {}


def poisoned(federation: Federation, attack: str) -> Federation:
    """The clients' data under an attack."""
    if attack == "label flip":
        return flip_labels(federation, fraction=HOSTILE)
    if attack == "backdoor":
        return plant_backdoor(federation, TRIGGER, fraction=HOSTILE)
    return federation


@functools.cache
def engine_of(data: str, data_dir: str | None, alpha: float, seed: int, attack: str) -> Vectorised:
    """One engine for all rules, so that what it has traced is used again."""
    found = datasets.load(data, data_dir=data_dir)
    partition = Dirichlet(clients=CLIENTS, alpha=alpha) if alpha else Iid(clients=CLIENTS)
    federation, _ = federate(found, partition, seed=seed)
    task = Task(build("mlp", inputs=tuple(found.x.shape[1:]), classes=found.classes, seed=seed))
    return Vectorised(task, poisoned(federation, attack), lane="batched", device="auto")


def trained(algorithm: Algorithm, engine: Vectorised, rounds: int, seed: int) -> Tree | None:
    """The model after the last round; None when the run broke down."""
    model: Tree | None = None
    try:
        for one in run(algorithm, engine, rounds=rounds, seed=seed):
            model = one.model
    except Diverged:
        return None
    return model


@torch.no_grad()
def accuracy(engine: Vectorised, model: Tree) -> float:
    """On all test rows."""
    test = engine.store("test")
    output, _ = engine.task.apply(model, test.x, train=False)
    return float((engine.task.decide(output) == test.y).double().mean())


def cell(options: argparse.Namespace, rule: Combine, attack: str) -> list[tuple[float, float]]:
    """(accuracy, backdoor success) per seed, in percent."""
    found = []
    for seed in range(options.seeds):
        on_data = attack if attack in ("label flip", "backdoor") else "none"
        engine = engine_of(options.data, options.data_dir, options.alpha, seed, on_data)
        common: dict[str, Any] = {"lr": options.lr, "epochs": 1, "batch_size": 32, **channel_of(attack, rule)}
        algorithm = fedavg(combine=rule, weighting=UniformWeights(), **common)
        model = trained(algorithm, engine, options.rounds, seed)
        if model is None:
            found.append((math.nan, math.nan))
            continue
        hit = attack_success(engine.task, model, engine.store("test"), TRIGGER) if attack == "backdoor" else 0.0
        found.append((100 * accuracy(engine, model), 100 * hit))
    return found


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else list(RULES)
    print(f"| rule | {' | '.join(ATTACKS)} | trigger works |")
    print("|---" * (len(ATTACKS) + 2) + "|")
    begun = time.perf_counter()
    for name in wanted:
        cells = [cell(options, RULES[name], attack) for attack in ATTACKS]
        means = [statistics.mean(a for a, _ in values) for values in cells]
        spreads = [max(a for a, _ in values) - min(a for a, _ in values) for values in cells]
        hits = statistics.mean(hit for _, hit in cells[-1])
        texts = [
            "broke down" if math.isnan(mean) else f"{mean:.1f} ({spread:.1f})" for mean, spread in zip(means, spreads)
        ]
        print(f"| {name} | {' | '.join(texts)} | {hits:.1f} |", flush=True)
    print(f"\n{time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
