"""Take one client's rows away: the clipped sum may move by one bound, in every setting that a private run accepts.

The others keep their rows, their coins and what they are sent. Settings in which the sum moves further are refused by
name; with the refusal switched off the same experiment finds them, so that it would find others, too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch

import consilience as cs
from consilience.algorithms.dp_fedavg import dp_fedavg
from consilience.channel import Clip, Quantise
from consilience.client.inexactness import ReportsGamma
from consilience.client.memory.corrections import Drift
from consilience.client.personal_layers import Head
from consilience.client.reporting import LossAtStart
from consilience.client.terms.linear import DriftCorrected
from consilience.client.terms.proximal import Proximal
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.core.screening import Limits
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.environments.environment import Environment
from consilience.experiments import runner
from consilience.experiments.config import config
from consilience.privacy import proof
from consilience.selection import Everyone, Poisson, Uniform
from consilience.server.averaging.steps.adaptive import AdagradStep, AdamStep, YogiStep
from consilience.server.averaging.steps.plain import MomentumStep, Noisy
from consilience.server.rules import private_averaging

pytestmark = pytest.mark.usefixtures("untraced")
SIZES = (9, 4, 1, 12, 6, 7, 3)
BOUND = 0.02  # updates are longer: all are clipped, and each could move the sum by all of it
TIMED = {"rows_per_second": 100.0}

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "epochs": {"epochs": (2, 1, 1, 3, 1, 0, 1)},
    "steps": {"steps": (5, 0, 1, 2, 9, 1, 4)},
    "communication": {"communication": 0.6},
    "communication each": {"communication": (1.0, 0.5, 0.5, 0.5, 1.0, 0.0, 0.7)},
    "stand-ins": {"communication": 0.6, "silent": "broadcast_model"},
    "availability": {"availability": 0.6},
    "dropout": {"dropout": 0.4},
    "no stragglers to drop": {"straggler_policy": "drop"},
    "deadline": {**TIMED, "deadline": 0.09, "speed_spread": 0.5},
    "jitter": {**TIMED, "deadline": 0.09, "jitter": 0.5},
    "slow links": {"download": 4e4, "upload": (3e4,) * 7, "latency": 0.01, "jitter": 0.3, "deadline": 0.2},
}
LOCAL: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.01, "lr_decay": 0.9},
    "adam": {"optimiser": "adam", "lr": 0.01},
    "adamw": {"optimiser": "adamw", "weight_decay": 0.1, "epochs": 2},
    "all rows at once": {"batch_size": None},
    "half an epoch": {"epochs": 0.5, "batch_size": 2},
    "proximal term": {"terms": (Proximal(mu=1.0),)},
    "momentum step": {"step": MomentumStep()},
    "adagrad step": {"step": AdagradStep()},
    "adam step": {"step": AdamStep()},
    "yogi step": {"step": YogiStep()},
    "noisy step": {"step": Noisy(deviation=0.1)},
    "half of the clients": {"rate": 0.5},
}
LIMITS: dict[str, Limits] = {
    "max_norm": Limits(max_norm=0.01),
    "as they are": Limits(),
    "replies one by one": Limits(
        max_examples=10, on_excess="cap", max_steps=3, castable=("float32",), slack=0, needs_digest=True, max_metrics=0
    ),
}
REFUSED_ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "stragglers": {"stragglers": 0.5},
    "dropped stragglers": {"stragglers": 0.5, "straggler_policy": "drop"},
    "late stragglers": {"stragglers": 0.5, **TIMED, "deadline": 0.05},
    "enough_replies": {"enough_replies": 3, **TIMED},
}


@dataclass(frozen=True)
class Setting:
    """All that a run is made of."""

    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    limits: Limits | None = None
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)

    def algorithm(self) -> Algorithm:
        return dp_fedavg(**{"bound": BOUND, "lr": 0.5, "batch_size": 4, **self.recipe})


def without(federation: Federation, client: int) -> Federation:
    """The same clients, one of them with no rows."""
    pairs = [federation.train.of(k) for k in range(len(SIZES))]
    pairs[client] = (pairs[client][0][:0], pairs[client][1][:0])
    return Federation.from_clients(pairs, classes=tiny.CLASSES)


def clipped_sum(setting: Setting, data: Federation, seed: int, algorithm: Algorithm | None = None) -> Tree:
    """What noise would be added to, in the first round."""
    sums: list[Tree] = []
    real = private_averaging._sum_of_clipped

    def recorded(found: tuple[Tree, int]) -> tuple[Tree, int]:
        sums.append(found[0])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_averaging, "_sum_of_clipped", lambda *a: recorded(real(*a)))
        model = tiny.plain_convnet if setting.engine else tiny.mlp  # lanes and precisions have their own convolutions
        engine = tiny.engine(model, data, environment=Environment(**setting.environment), **setting.engine)
        given = algorithm or setting.algorithm()
        next(run(given, engine, rounds=1, seed=seed, limits=setting.limits, keys=lambda _: bytes([seed]) * 32))
    return sums[0]


def moved(setting: Setting, *, seeds: int = 2, algorithm: Algorithm | None = None) -> tuple[float, float]:
    """The furthest that one client moves the sum, in bounds, and how long the sum is."""
    data, furthest, longest = tiny.federation(SIZES), 0.0, 0.0
    for seed in range(seeds):
        whole = clipped_sum(setting, data, seed, algorithm)
        longest = max(longest, _norm(whole))
        for client in range(len(SIZES)):
            less = clipped_sum(setting, without(data, client), seed, algorithm)
            furthest = max(furthest, _norm({name: whole[name] - less[name] for name in whole}))
    return furthest, longest


def _norm(values: Tree) -> float:
    return float(torch.cat([leaf.flatten() for leaf in values.values()]).norm()) / BOUND


ACCEPTED = {
    **{f"environment: {name}": Setting(environment=given) for name, given in ENVIRONMENTS.items()},
    **{f"local: {name}": Setting(recipe=given) for name, given in LOCAL.items()},
    **{f"limits: {name}": Setting(limits=given) for name, given in LIMITS.items()},
    **{f"lane: {lane}": Setting(engine={"lane": lane}) for lane in ("serial", "streams", "batched", "batched-matmul")},
    "groups of two": Setting(engine={"lane": "batched", "clients_at_once": 2}),
    "single precision": Setting(engine={"dtype": "float32"}),
    "bfloat16": Setting(engine={"dtype": "float32", "precision": "bf16"}),
    "rate and silence": Setting(recipe={"rate": 0.6}, environment={"communication": 0.7, "availability": 0.8}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_one_client_moves_the_sum_by_one_bound_at_most(name: str) -> None:
    furthest, longest = moved(ACCEPTED[name])
    assert 0.4 < furthest <= 1 + 1e-9 and longest > 0.5, "nobody was clipped: the experiment says nothing"


def test_what_clients_remember_of_their_own_is_no_matter_of_others() -> None:
    plain = Setting().algorithm()
    client = dataclasses.replace(plain.client, terms=(DriftCorrected(alpha=0.5),), memory=(Drift(),))  # type: ignore
    assert moved(Setting(), algorithm=dataclasses.replace(plain, client=client))[0] <= 1 + 1e-9


BROKEN = {
    **{name: Setting(environment=given) for name, given in REFUSED_ENVIRONMENTS.items()},
    "min_valid": Setting(limits=Limits(min_valid=7)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_experiment_finds_what_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Invalid, match="a private run cannot have"):
        moved(BROKEN[name])
    monkeypatch.setattr(private_averaging, "refuse_unproven", lambda *given, **options: None)
    assert moved(BROKEN[name], seeds=4)[0] > 1.01


@pytest.mark.parametrize(
    ("section", "kind", "accepted", "refused"),
    [
        (proof.ENVIRONMENT, Environment, ENVIRONMENTS.values(), REFUSED_ENVIRONMENTS.values()),
        (
            proof.LIMITS,
            Limits,
            map(vars, LIMITS.values()),
            [{"min_valid": 7}, {"max_ratio": 10.0}, {"max_growth": 2.0}, {"examples_ratio": 5.0}],
        ),
    ],
)
def test_every_setting_was_looked_at(section: tuple[str, ...], kind: Any, accepted: Any, refused: Any) -> None:
    """Of each field, the experiment was made with another value than the default, or it is refused."""
    default = {field.name: field.default for field in dataclasses.fields(kind)}
    tried = {key for given in accepted for key, value in given.items() if value != default[key]}
    stopped = {key for given in refused for key in given} - set(section)
    assert tried == set(section) and tried | stopped == set(default)


@dataclass(frozen=True, kw_only=True)
class NextYear(Environment):
    """An environment with a setting that the proof has never seen."""

    moonlight: float = 0.0


def test_what_the_proof_does_not_know_is_refused() -> None:
    class Engine:
        environment: Any = NextYear()

    algorithm = Setting().algorithm()
    proof.refuse_unproven(algorithm, Engine(), None, rate=1.0)
    Engine.environment = NextYear(moonlight=0.5)
    with pytest.raises(Invalid, match=r"environment\.moonlight = 0\.5: it is not part of the privacy proof"):
        proof.refuse_unproven(algorithm, Engine(), None, rate=1.0)


def changed(**parts: Any) -> Algorithm:
    return dataclasses.replace(Setting(recipe={"rate": 0.5}).algorithm(), **parts)


LOCALLY = Setting().algorithm().client
PARTS = {
    "selection Everyone": changed(selection=Everyone()),
    "selection Uniform": changed(selection=Uniform(count=3)),
    "selection rate 0.1": changed(selection=Poisson(rate=0.1)),
    "channel Clip": changed(channel=Clip()),
    "channel Quantise": changed(channel=Quantise()),
    "client ReportsGamma": changed(client=ReportsGamma(training=LOCALLY)),
    "client LossAtStart": changed(client=LossAtStart(training=LOCALLY)),
    "personal_layers": changed(
        client=dataclasses.replace(LOCALLY, personal_layers=Head())  # type: ignore[type-var]
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_outside_the_proof_are_refused_by_name(name: str) -> None:
    with pytest.raises(Invalid, match=f"a private run cannot have {name}"):
        next(run(PARTS[name], tiny.engine(), rounds=1))
    with pytest.raises(Invalid, match=f"a private run cannot have {name}"):
        cs.train(tiny.mlp().double(), tiny.federation(), PARTS[name], rounds=1, progress=False)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("limits.min_valid=2", r"limits\.min_valid = 2: it drops all replies"),
        ("environment.stragglers=0.5", r"environment\.stragglers = 0\.5: it makes a fixed share"),
        ("environment.enough_replies=3", r"environment\.enough_replies = 3: it leaves out"),
        ("environment=fedprox_stragglers", r"environment\.stragglers"),
    ],
)
def test_a_run_is_refused_before_it_has_a_folder(override: str, named: str, tmp_path: Any) -> None:
    given = ["algorithm=dp_fedavg", "partition.clients=5", "model=logistic", f"runs={tmp_path}", override]
    with pytest.raises(Invalid, match=named):
        runner.execute(config.load(None, given))
    assert not any(tmp_path.iterdir())


def test_training_from_python_is_refused_as_well() -> None:
    rows = tiny.federation()
    for given in ({"environment": Environment(stragglers=0.5)}, {"limits": Limits(min_valid=2)}):
        with pytest.raises(Invalid, match="a private run cannot have"):
            cs.train(tiny.mlp().double(), rows, dp_fedavg(batch_size=4), rounds=1, progress=False, **given)  # type: ignore
