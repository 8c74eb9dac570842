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
from consilience.core.settings import Invalid, options_of
from consilience.experiments.config import config

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
        if isinstance(value, dict):
            yield from places(value, (*path, key))


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
            node.pop(last, None)
        elif kind < 0.9:
            node[rng.choice(KEYS)] = copy.deepcopy(rng.choice(ODD))
        else:
            node[last] = {"name": rng.choice(["uniform", "dirichlet", "mlp"]), rng.choice(KEYS): rng.choice(ODD)}
    return table


def accepted_configs(count: int, seed: int) -> int:
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in RECIPES]
    rng, accepted = random.Random(seed), 0
    for _ in range(count):
        table = {key: v for key, v in mutant(rng.choice(tables), rng).items() if key not in ("compare", "tune")}
        try:
            config.from_table(table)
            accepted += 1
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


@pytest.mark.slow
def test_twenty_thousand_mutated_configs() -> None:
    assert accepted_configs(20_000, seed=1) > 1000
    assert accepted_overrides(5_000, seed=1) > 0
    assert accepted_options(12, seed=1) > 0
