"""Mutated configs, overrides and Python options: used or refused by name, never a traceback."""

from __future__ import annotations

import copy
import datetime
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from consilience import algorithms
from consilience.compare import plan as compare
from consilience.core.settings import Invalid, options_of
from consilience.experiments.config import config
from consilience.flower.deploy import settings
from consilience.runs import toml_text
from consilience.tuning import plan as tune

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
ODD: list[Any] = [
    *(True, False, -1, 0, 1, 2**63, 2**64, 10**400, -(10**400), 1e308, float("nan"), float("inf"), -0.5, 3.5),
    *("", "x", "fedavg", "uniform", "a" * 5000, "\x00", "../x", "1"),
    *([], [1], [[]], ["a", {}], [True], [10**400], {}, {"name": "fedavg"}, {"name": 1}, {"a": {"b": {}}}),
    *({"name": ["x"]}, {"name": "uniform", "count": 10**400}),
    *(datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), datetime.time(1, 2)),
]
ODD_IN_PYTHON: list[Any] = [*ODD, None, object(), b"x", (1, 2), {1: 2}, int, lambda: 1]
KEYS = ("name", "lr", "selection", "weighting", "x", "count", "clients", "every", "rounds", "seed", "epochs")
SETTINGS = (
    *("rounds", "seed", "algorithm", "algorithm.lr", "data", "data.name", "partition", "partition.alpha", "model"),
    *("engine", "engine.lane", "limits", "limits.max_ratio", "evaluation.every", "x", "a.b.c", "", ".", ".."),
    *("algorithm.selection", "algorithm.selection.count", "environment", "algorithm..lr", "checkpoint.keep", "log"),
)
VALUES = (
    *("1e999", "-", "[", "{", "[[", "{a=", "true", "1979-05-27", "'", '"', "0x", "1_", "nan", "inf", "[1,"),
    *("{name=1}", "x" * 3000, "\\", "=", "a=b", "9" * 500, "[]", "{}", "🙂"),
)


def places(table: dict[str, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in table.items():
        yield (*path, key)
        inside = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inside, dict):
            yield from places(inside, (*path, key))


def mutant(table: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    table = copy.deepcopy(table)
    for _ in range(rng.choice([1, 1, 2])):
        *parents, last = rng.choice(list(places(table)) or [("x",)])
        node = table
        for key in parents:
            node = node[key]
        kind = rng.random()
        if kind < 0.7:
            node[last] = copy.deepcopy(rng.choice(ODD))
        elif kind < 0.8:
            del node[last]
        elif kind < 0.9 and isinstance(node, dict):
            node[rng.choice(KEYS)] = copy.deepcopy(rng.choice(ODD))
        else:
            node[last] = {"name": rng.choice(["uniform", "dirichlet", "mlp"]), rng.choice(KEYS): rng.choice(ODD)}
    return table


def accepted_configs(count: int, seed: int) -> int:
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in RECIPES]
    rng, accepted = random.Random(seed), 0
    for _ in range(count):
        table = {
            key: v for key, v in mutant(rng.choice(tables), rng).items() if key not in ("compare", "tune", "learn")
        }
        try:
            config.from_table(table)
            accepted += 1
        except Invalid as problem:
            assert 0 < len(str(problem)) < 20_000
    return accepted


SECTIONS: dict[str, dict[str, Any]] = {
    "compare": {
        "algorithm": {"name": "fedavg", "lr": 0.1},
        "compare": {
            "seeds": [0, 1],
            "baseline": "FedAvg",
            "target": 0.9,
            "metric": "accuracy",
            "methods": [
                "simprox",
                {"algorithm": "fedavg", "options": {"lr": 0.2}, "label": "FedAvg"},
                {"algorithm": "fedprox", "options": {"mu": 0.1}, "settings": {"rounds": 2}},
            ],
        },
    },
    "tune": {
        "algorithm": {"name": "fedavg"},
        "compare": {"methods": ["fedavg", "fedprox"], "seeds": [0]},
        "tune": {
            "trials": 3,
            "seeds": [1000],
            "sampler": "random",
            "pruner": "none",
            "validation": 0.2,
            "metrics": {"fedavg": "accuracy"},
            "ranges": {
                "lr": {"low": 0.01, "high": 1.0, "log": True},
                "fedprox": {"mu": {"low": 0.1, "high": 1.0}},
                "epochs": {"low": 1, "high": 5},
            },
        },
    },
    "deploy": {
        "algorithm": {"name": "dp_fedavg", "noise": 1.0, "bound": 0.5},
        "limits": {"min_valid": 1},
        "validation": {"share": 0.2, "patience": 2, "metric": "loss"},
        "deploy": {
            "clients": 5,
            "classes": 3,
            "min_available": 3,
            "deadline": 5.0,
            "wait": 1.0,
            "retries": 1,
            "secure_aggregation": True,
            "secure_threshold": 0.6,
            "secure_colluding": 1,
            "secure_levels": 1024,
            "clear_tests": True,
        },
    },
}


def accepted_sections(count: int, seed: int, patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Mutated [compare], [tune] and [deploy] tables, read as their commands do."""
    rng, accepted = random.Random(seed), dict.fromkeys(SECTIONS, 0)
    read: dict[str, Any] = {"compare": compare.plan, "tune": tune.plan}
    for number in range(count):
        name = sorted(SECTIONS)[number % len(SECTIONS)]
        table = mutant(SECTIONS[name], rng)
        try:
            if name == "deploy":
                settings.from_given(table, own=bool(number % 2))
            else:
                patch.setattr(toml_text, "read", lambda path, table=table: copy.deepcopy(table))
                read[name]("some.toml")
            accepted[name] += 1
        except Invalid as problem:
            assert 0 < len(str(problem)) < 20_000
    return accepted


def accepted_overrides(count: int, seed: int) -> int:
    rng, accepted = random.Random(seed), 0
    for _ in range(count):
        try:
            config.load(None, [f"{rng.choice(SETTINGS)}={rng.choice(VALUES)}" for _ in range(rng.choice([1, 2]))])
            accepted += 1
        except Invalid as problem:
            assert str(problem)
    return accepted


def accepted_options(each: int, seed: int) -> int:
    rng, accepted = random.Random(seed), 0
    for name in algorithms.names():
        for option in rng.sample(sorted(options_of(algorithms.recipe(name))), 4):
            for odd in rng.sample(ODD_IN_PYTHON, each):
                try:
                    algorithms.recipe(name)(**{option: odd})
                    accepted += 1
                except Invalid as problem:
                    assert str(problem)
    return accepted


def test_mutated_configs_are_used_or_refused() -> None:
    assert 20 < accepted_configs(300, seed=0) < 200


def test_hostile_overrides_are_used_or_refused() -> None:
    assert 0 < accepted_overrides(300, seed=0) < 200


def test_odd_options_in_python_are_used_or_refused() -> None:
    assert accepted_options(2, seed=0) > 0


def test_mutated_sections_of_other_commands_are_used_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(accepted_sections(150, 0, monkeypatch).values())


@pytest.mark.slow
def test_twenty_thousand_mutated_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(accepted_sections(9_000, 1, monkeypatch).values())
    assert accepted_configs(20_000, seed=1) > 1000
    assert accepted_overrides(5_000, seed=1) > 0
    assert accepted_options(12, seed=1) > 0
