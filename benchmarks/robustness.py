"""Accuracy of every robust rule under every attack, on digits or MNIST, mean (and range) over seeds.

    python benchmarks/robustness.py [--data digits] [--alpha 0.5] [--seeds 3] [--rounds 30] [--only Krum,mean]
    python benchmarks/robustness.py --clients 14 --hostile 4 --only mean,defence,"mixing + geometric median"

All clients take part; `--hostile` of them are hostile, evenly spread among the others, and the rules are told so. With
`--alpha 0` the rows are spread evenly, otherwise by a Dirichlet draw per class. "broke down": the model overflowed.
"defence" is `defence = "auto"`; the attacks that search for their strength know its rule, with the scores of the first
round. "worst": the least mean over the attacks. The last two columns are one attack: accuracy under a pixel backdoor,
and how often the trigger then works.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.federation import Federation
from consilience.core.protocols import Channel
from consilience.core.rounds import Diverged, run
from consilience.core.screening import Limits, limit_growth, screen_replies
from consilience.core.tree import Tree
from consilience.data import datasets
from consilience.data.federate import federate
from consilience.data.partition import Dirichlet, Iid
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments.config.defence import GROWTH, bounded, defended
from consilience.models import build
from consilience.server.averaging.combining.centred_clipping import CentredClipping
from consilience.server.averaging.combining.coordinate_wise import Median, TrimmedMean
from consilience.server.averaging.combining.geometric_median import GeometricMedian
from consilience.server.averaging.combining.krum import Bulyan, Krum, MultiKrum
from consilience.server.averaging.combining.nearest_neighbour_mixing import NearestNeighbourMixing
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.weighting.agreement import AgreementWeights
from consilience.server.averaging.weighting.by_size import UniformWeights
from consilience.server.protocols import Combine
from consilience.task.task import Task

DEFENCE = "defence"


@dataclass(frozen=True)
class Defence:
    """What an attacker knows of `defence = "auto"`: its weights in the first round, for equal sizes."""

    f: int

    @property
    def needs_each_reply(self) -> bool:
        """It compares them."""
        return True

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Around the mean, where the broadcast model is not known."""
        return self.merge_around(models, weights, WeightedMean().merge(models, weights))

    def merge_around(self, models: Tree, weights: Tensor, centre: Tree) -> Tree:
        """Stacked models [m, ...] that started from `centre` -> one model."""
        count = len(weights)
        cohort = Cohort(
            reply={"model": models},
            ids=np.arange(count),
            examples=torch.ones_like(weights),
            steps=np.ones(count, np.int64),
            round=0,
        )
        received = Broadcast(shared={"model": centre})
        short, _ = limit_growth(screen_replies(cohort, received), received, GROWTH)
        rule = AgreementWeights(inner=UniformWeights(), untrusted=self.f)
        share, _, _ = rule.weigh(short, centre, rule.init(centre, count))
        return WeightedMean().merge(short.reply["model"], share)


def rules(f: int) -> dict[str, Combine]:
    """Every rule, for f hostile clients."""
    return {
        "mean": WeightedMean(),
        DEFENCE: Defence(f),
        "coordinate median": Median(),
        "trimmed mean": TrimmedMean(f=f),
        "geometric median": GeometricMedian(),
        "Krum": Krum(f=f),
        "Multi-Krum": MultiKrum(f=f),
        "Bulyan": Bulyan(f=f),
        "centred clipping": CentredClipping(),
        "mixing + trimmed mean": NearestNeighbourMixing(f=f, then=TrimmedMean(f=f)),
        "mixing + geometric median": NearestNeighbourMixing(f=f, then=GeometricMedian()),
    }


TRIGGER = Trigger(target=0, size=2, value=1.0)
ATTACKS = ("none", "sign flip", "scaling", "Gaussian", "label flip", "ALIE", "IPM, searched", "mimic", "backdoor")


def hostile(clients: int, number: int) -> tuple[int, ...]:
    """Which clients are hostile: every (clients / number)-th."""
    share = number / clients
    return tuple(k for k in range(clients) if math.floor((k + 1) * share + 1e-9) > math.floor(k * share + 1e-9))


def channel_of(attack: str, rule: Combine, who: tuple[int, ...]) -> dict[str, Channel]:
    """The channel of an attack on replies; none for those on data."""
    known: dict[str, Channel] = {
        "sign flip": SignFlip(clients=who),
        "scaling": Scaling(clients=who, factor=-10.0),
        "Gaussian": GaussianUpdate(clients=who, sigma=1.0),
        "ALIE": ALittleIsEnough(clients=who, strength=1.5),
        "IPM": InnerProduct(clients=who),
        "IPM, searched": InnerProduct(clients=who, against=rule),
        "mimic": Mimic(clients=who),
    }
    return {"channel": known[attack]} if attack in known else {}


def poisoned(federation: Federation, attack: str, who: tuple[int, ...]) -> Federation:
    """The clients' data under an attack."""
    if attack == "label flip":
        return flip_labels(federation, clients=who)
    if attack == "backdoor":
        return plant_backdoor(federation, TRIGGER, clients=who)
    return federation


@functools.cache
def engine_of(
    data: str, data_dir: str | None, alpha: float, clients: int, seed: int, attack: str, who: tuple[int, ...]
) -> Vectorised:
    """One engine for all rules, so that what it has traced is used again."""
    found = datasets.load(data, data_dir=data_dir)
    partition = Dirichlet(clients=clients, alpha=alpha) if alpha else Iid(clients=clients)
    federation, _ = federate(found, partition, seed=seed)
    task = Task(build("mlp", inputs=tuple(found.x.shape[1:]), classes=found.classes, seed=seed))
    return Vectorised(task, poisoned(federation, attack, who), lane="batched", device="auto")


def trained(
    algorithm: Algorithm, engine: Vectorised, rounds: int, seed: int, limits: Limits | None = None
) -> Tree | None:
    """The model after the last round; None when the run broke down."""
    model: Tree | None = None
    try:
        for one in run(algorithm, engine, rounds=rounds, seed=seed, limits=limits):
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
    who = hostile(options.clients, options.hostile)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        on_data = attack if attack in ("label flip", "backdoor") else "none"
        engine = engine_of(options.data, options.data_dir, options.alpha, options.clients, seed, on_data, who)
        common: dict[str, Any] = {"lr": options.lr, "epochs": 1, "batch_size": 32, **channel_of(attack, rule, who)}
        if isinstance(rule, Defence):
            algorithm, limits = defended(fedavg(**common), rule.f), bounded(Limits())
        else:
            algorithm, limits = fedavg(combine=rule, weighting=UniformWeights(), **common), Limits()
        model = trained(algorithm, engine, options.rounds, seed, limits)
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
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--hostile", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--attacks", default=",".join(ATTACKS).replace(", ", ";"), help="with commas; ; for a comma")
    options = parser.parse_args()
    known = rules(options.hostile)
    wanted = options.only.split(",") if options.only else list(known)
    attacks = [name.replace(";", ", ") for name in options.attacks.split(",")]
    print(f"| rule | {' | '.join(attacks)} | worst | trigger works |")
    print("|---" * (len(attacks) + 3) + "|")
    begun = time.perf_counter()
    for name in wanted:
        cells = [cell(options, known[name], attack) for attack in attacks]
        means = [statistics.mean(a for a, _ in values) for values in cells]
        spreads = [max(a for a, _ in values) - min(a for a, _ in values) for values in cells]
        hits = statistics.mean(hit for _, hit in cells[-1])
        hurt = [mean for attack, mean in zip(attacks, means) if attack != "none"]
        worst = "broke down" if any(map(math.isnan, hurt)) else f"{min(hurt, default=math.nan):.1f}"
        texts = [
            "broke down" if math.isnan(mean) else f"{mean:.1f} ({spread:.1f})" for mean, spread in zip(means, spreads)
        ]
        print(f"| {name} | {' | '.join(texts)} | {worst} | {hits:.1f} |", flush=True)
    print(f"\n{time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
