"""Recurrent layers, attention and randomness inside a module: lanes agree, runs repeat, resumed runs are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sequence_layers
import torch
from torch import nn

from consilience.algorithms.fedavg import fedavg
from consilience.core import tree
from consilience.core.algorithm import Plain
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast
from consilience.core.rounds import run
from consilience.engines.vectorised.engine import Vectorised
from consilience.task.task import Task

LANES = ("serial", "streams", "batched")


def engine_for(module: nn.Module, lane: str, traced: bool, dtype: str = "float64") -> Vectorised:
    engine = Vectorised(Task(module), sequence_layers.federation(), device="cpu", dtype=dtype, lane=lane)  # type: ignore[arg-type]
    if traced:
        program = engine.program(RULE.client, RULE.channel)
        program.one.hot = program.group.hot = 0
    return engine


RULE = fedavg(lr=0.1, batch_size=4)


def trained(name: str, lane: str, *, traced: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    engine = engine_for(sequence_layers.model(name), lane, traced, **options)
    *_, last = run(RULE, engine, rounds=2, seed=1)
    return tree.flatten(last.model)


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("name", sequence_layers.MODELS)
def test_lanes_agree_traced_or_not(name: str) -> None:
    torch.manual_seed(0)
    first = trained(name, "serial")
    for lane in ("streams", "batched"):
        torch.manual_seed(1)
        assert gap(first, trained(name, lane, traced=True)) < 1e-12, lane


@pytest.mark.parametrize(("name", "lane"), [("LSTM, dropout", "serial"), ("encoder", "streams"), ("draws", "batched")])
def test_equal_runs_are_bit_equal_in_single_precision(name: str, lane: str) -> None:
    torch.manual_seed(1)
    once = trained(name, lane, dtype="float32", traced=True)
    torch.manual_seed(2)
    again = trained(name, lane, dtype="float32")
    assert all(torch.equal(once[key], again[key]) for key in once), "traced or not"


def test_a_resumed_run_is_equal() -> None:
    whole = trained("draws", "serial")
    first = list(run(RULE, engine_for(sequence_layers.model("draws"), "serial", False), rounds=1, seed=1))[-1]
    torch.manual_seed(5)
    resumed = engine_for(sequence_layers.model("draws"), "serial", False)
    *_, last = run(RULE, resumed, rounds=2, seed=1, resume=first.snapshot)
    assert gap(whole, tree.flatten(last.model)) == 0


def test_training_differs_with_the_seed_and_from_training_without_noise() -> None:
    *_, one = run(RULE, engine_for(sequence_layers.model("drop path"), "serial", False), rounds=1, seed=1)
    *_, other = run(RULE, engine_for(sequence_layers.model("drop path"), "serial", False), rounds=1, seed=2)
    assert gap(tree.flatten(one.model), tree.flatten(other.model)) > 1e-4


def test_evaluation_with_draws_is_the_same_in_every_lane() -> None:
    found = []
    for lane in LANES:
        engine = engine_for(sequence_layers.model("draws"), lane, False)
        cohort = engine.exchange(
            Evaluate(), Plain(), Broadcast(shared={"model": engine.start()}), np.arange(3), round=0, seed=0
        )
        found.append(cohort.reply)
    for other in found[1:]:
        assert gap(tree.flatten(found[0]), tree.flatten(other)) < 1e-12
