"""Environments of published experiments, with their data, partition and training settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from consilience.core.settings import Checked, Invalid, Probability
from consilience.environments.environment import Environment

DUW = (
    "A. Nakai-Kasai, T. Wadayama, Deep unfolding-based weighted averaging for federated learning in "
    "heterogeneous environments, arXiv 2212.12191"
)
FEDPROX = "T. Li et al., Federated optimization in heterogeneous networks, MLSys 2020"
DUW_LABELS = ((2, 9), (0, 4, 6), (1, 3, 5, 7, 8), (1, 3, 5, 7, 8), (1, 3, 5, 7, 8))
EVEN_SIZES = (1713, 1713, 1713, 1713, 1716)


@dataclass(frozen=True, kw_only=True)
class Preset(Checked):
    """A paper's environment with its data set, partition (name and options) and settings."""

    environment: Environment
    data: str = ""
    partition: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    citation: str = ""


def plain() -> Preset:
    """Every client is always available, does all the work and replies."""
    return Preset(environment=Environment())


def duw_1(*, indices: str | None = None) -> Preset:
    """DUW Environment I: five IID clients of unequal size; `indices`: the authors' split file, if any."""
    sizes = (1042, 1023, 862, 1184, 4459)
    return _duw_mnist(Environment(), _drawn(sizes), 400, indices, "env1")


def duw_2(*, indices: str | None = None) -> Preset:
    """DUW Environment II: five clients of equal size with 2, 3, 5, 5 and 5 of the ten digits."""
    sizes = (6775, 6774, 6776, 6776, 6776)
    partition = {"name": "label_sets", "labels": DUW_LABELS, "sizes": sizes, "allow_rest": True}
    return _duw_mnist(Environment(), partition, 400, indices, "env2")


def duw_3(*, indices: str | None = None) -> Preset:
    """DUW Environment III: five IID clients of equal size; the first does two local epochs, others one."""
    return _duw_mnist(Environment(epochs=(2, 1, 1, 1, 1)), _drawn(EVEN_SIZES), 500, indices, "env34")


def duw_4(*, indices: str | None = None) -> Preset:
    """DUW Environment IV: five IID clients of equal size; replies arrive with probability 0.2, 0.3, 0.8, 0.9, 1."""
    # Paper: does not say what the server does without a reply. Here: the broadcast model replaces it, because
    # the authors' code does so (also in A and B).
    environment = Environment(communication=(0.2, 0.3, 0.8, 0.9, 1.0), silent="broadcast_model")
    return _duw_mnist(environment, _drawn(EVEN_SIZES), 1000, indices, "env34")


def duw_a() -> Preset:
    """DUW Environment A: Stanford Dogs, Dirichlet 0.0005, five clients with different reply probabilities."""
    communication = (0.9600, 0.6995, 0.9999, 0.2201, 0.3611)
    return _duw_dogs(Environment(communication=communication, silent="broadcast_model"), rounds=100)


def duw_b() -> Preset:
    """DUW Environment B: as A, with different numbers of local epochs too."""
    communication = (0.5173, 0.9470, 0.7655, 0.2824, 0.2210)
    environment = Environment(communication=communication, epochs=(4, 7, 1, 2, 7), silent="broadcast_model")
    return _duw_dogs(environment, rounds=70)


def fedprox_stragglers(*, level: Probability = 0.9, policy: Literal["partial", "drop"] = "partial") -> Preset:
    """FedProx's systems heterogeneity: 0, 50 or 90 % of each cohort do fewer epochs ("drop": none count)."""
    if level not in (0.0, 0.5, 0.9):
        raise Invalid(
            f"level = {level!r} is not one of the paper's 0, 0.5, 0.9: for any other fraction use "
            f"the environment 'plain' with stragglers = {level!r}"
        )
    return Preset(
        environment=Environment(stragglers=level, straggler_policy=policy),
        data="mnist",
        partition={
            "name": "classes_per_client",
            "clients": 1000,
            "classes_per_client": 2,
            "skew": "power_law",
            # Paper: a power law, mean 69 rows, standard deviation 106; authors' code: log-normal. Here: a power
            # law whose exponent gives that deviation (over 60,000 rows the mean is 60), and five rows of a digit at
            # least, as in the code.
            "exponent": 0.67,
            "min_per_class": 5,
        },
        settings={"model": "logistic", "cohort": 10, "epochs": 20, "batch_size": 10, "lr": 0.03},
        citation=FEDPROX,
    )


def _drawn(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Random rows of MNIST in the paper's amounts."""
    return {"name": "quantity", "clients": len(sizes), "kind": "sizes", "sizes": sizes, "allow_rest": True}


def _duw_mnist(
    environment: Environment, drawn: dict[str, Any], iterations: int, indices: str | None, prefix: str
) -> Preset:
    """Section V-B and Table 1; with the authors' file their own rows, else new rows in the same numbers."""
    return Preset(
        environment=environment,
        data="mnist",
        partition=drawn if indices is None else {"name": "stored", "path": indices, "prefix": prefix},
        settings={
            "model": "mlp",
            "hidden": (128, 128),
            "rounds": 10,
            "epochs": 2,
            "batch_size": 50,
            "lr": 0.01,
            "unfolding": {"iterations": iterations, "lr": 0.001},
        },
        citation=DUW,
    )


def _duw_dogs(environment: Environment, *, rounds: int) -> Preset:
    """Section V-D and Table 2: a frozen ViT with one dense layer on top."""
    return Preset(
        environment=environment,
        data="stanford_dogs",
        partition={"name": "dirichlet", "clients": 5, "alpha": 0.0005},
        settings={
            "model": "linear_head",
            "rounds": rounds,
            "epochs": 5,
            "batch_size": 100,
            "lr": 0.01,
            "unfolding": {"iterations": 1000, "lr": 0.001},
        },
        citation=DUW,
    )
