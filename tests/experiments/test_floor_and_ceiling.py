"""Each client alone, all data in one place; and asynchronous runs on disk."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

import consilience as cs
from consilience.algorithms.centralised import centralised
from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.local_only import local_only
from consilience.core import tree
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.experiments import runner
from consilience.experiments.config.config import load
from consilience.server import UniformWeights

SMALL = ("rounds=6", "model=logistic", "partition.clients=6", "engine.lane=serial", "engine.dtype=float64", "threads=1")


def alone(data: Federation, client: int) -> Federation:
    return Federation.from_clients([data.train.of(client)], classes=data.classes)


def test_alone_is_as_if_there_were_nobody_else() -> None:
    """Client 0's model after three rounds is that of a federation of one (its batches are those of client 0)."""
    data = tiny.federation()
    *_, one = run(local_only(batch_size=4, lr=0.05), tiny.engine(tiny.convnet, data), rounds=3, seed=1)
    *_, only = run(fedavg(batch_size=4, lr=0.05), tiny.engine(tiny.convnet, alone(data, 0)), rounds=3, seed=1)
    own = tree.rows(one.snapshot.memory["client"]["own_model"], 0)
    assert tiny.gap(own, only.model) <= 1e-12
    assert tiny.same(one.model, tiny.engine(tiny.convnet, data).start())
    assert one.bytes_down == 0 and one.bytes_up == 5 * 8  # losses


def test_alone_a_client_that_sits_out_keeps_its_model() -> None:
    some = local_only(batch_size=4, selection=cs.Uniform(count=2))
    rounds = list(run(some, tiny.engine(), rounds=3, seed=1))
    for before, after in itertools.pairwise(rounds):
        for k in range(5):
            held = [tree.rows(one.snapshot.memory["client"]["own_model"], k) for one in (before, after)]
            assert tiny.same(*held) == (k not in after.cohort.ids)


def test_alone_nothing_is_sent() -> None:
    with pytest.raises(Invalid, match=r"weighting = .* has no effect in local_only"):
        local_only(weighting=UniformWeights())


def test_pooled_rows() -> None:
    data = tiny.federation((3, 0, 2))
    one = data.pooled()
    assert len(one) == 1 and one.train.sizes.tolist() == [5] and one.names == ("all",)
    assert torch.equal(one.train.x, data.train.x) and torch.equal(one.train.y, data.train.y)
    assert one.test is data.test and one.classes == data.classes


def test_centralised_is_plain_training_on_all_rows() -> None:
    """With full batches and no shuffling left to chance: three steps of gradient descent on all rows."""
    data = tiny.federation()
    result = cs.train(
        tiny.mlp().double(),
        data,
        centralised(batch_size=None, lr=0.1),
        rounds=3,
        progress=False,
        dtype="float64",
        device="cpu",
    )
    module = tiny.mlp().double()
    for _ in range(3):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(data.train.x), data.train.y).backward()
        with torch.no_grad():
            for value in module.parameters():
                value -= 0.1 * value.grad
    for name, value in module.named_parameters():
        np.testing.assert_allclose(result.values["params"][name].numpy(), value.detach().numpy(), atol=1e-12)
    assert result.history[-1]["cohort"] == [0] and result.history[-1]["client_accuracy_worst_tenth"] is not None


def test_centralised_refuses_a_federation_that_was_not_pooled() -> None:
    with pytest.raises(Invalid, match=r"there are 5 clients: give the engine federation\.pooled\(\)"):
        next(run(centralised(), tiny.engine(), rounds=1))


def test_floor_and_ceiling_run_from_a_config(tmp_path: Path) -> None:
    top = runner.execute(load(None, (*SMALL, "algorithm.name=centralised", f"runs={tmp_path}")))
    assert {tuple(row["cohort"]) for row in top.history} == {(0,)} and top.history[-1]["accuracy"] > 0.8
    low = runner.execute(load(None, (*SMALL, "algorithm.name=local_only", f"runs={tmp_path}")))
    assert low.history[-1]["bytes_down_total"] == 0
    assert low.history[-1]["personal_accuracy_mean"] > low.history[0]["accuracy"]


CLOCK = ("environment.rows_per_second=100", "environment.speed_spread=0.8", "environment.upload=1e5")
BUFFERED = (*SMALL, *CLOCK, "algorithm.name=fedbuff", "algorithm.buffer=2", "environment.jitter=0.2")


def test_an_asynchronous_run_resumes_exactly_with_work_in_flight(tmp_path: Path) -> None:
    whole = runner.execute(load(None, BUFFERED), folder=tmp_path / "whole")
    runner.execute(load(None, (*BUFFERED, "rounds=3")), folder=tmp_path / "parts")
    rest = runner.proceed(tmp_path / "parts", ("rounds=6",))
    assert rest.history == whole.history and tiny.same(rest.values, whole.values)
    seconds = [row["simulated_seconds"] for row in whole.history]
    assert (np.diff([0.0, *seconds]) > 0).all() and max(max(row["staleness"]) for row in whole.history) > 0


def test_parts_of_time_can_be_named_in_a_config(tmp_path: Path) -> None:
    settings = ("algorithm.staleness={name='hinge',tolerance=1}", "algorithm.selection.name=everyone")
    found = runner.execute(load(None, (*BUFFERED, *settings, "rounds=2", f"runs={tmp_path}")))
    assert len(found.history) == 2
    for selection in ("{name='power_of_choice',count=2}", "{name='by_availability',count=2,prefer='fast'}"):
        options = (
            *SMALL,
            *CLOCK,
            "algorithm.name=fedavg",
            f"algorithm.selection={selection}",
            "environment.deadline=9",
        )
        found = runner.execute(load(None, (*options, "rounds=2", f"runs={tmp_path}")))
        assert found.history[-1]["late"] >= 0 and len(found.history[-1]["cohort"]) <= 2
