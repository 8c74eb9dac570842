"""A rule fitted to learned weights: recovered where the truth is known, used for other clients and other rounds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import consilience as cs
from consilience.client.label_counting import LabelCounting
from consilience.core import rng
from consilience.core.exchange import Cohort
from consilience.core.federation import Federation
from consilience.core.settings import Invalid
from consilience.environments.environment import Environment
from consilience.meta.transfer import fit_rule
from consilience.server.averaging.weighting.transferred import (
    FEATURES,
    TransferredWeights,
    observe,
    save_rule,
    terms,
    unknown,
)

pytestmark = pytest.mark.usefixtures("untraced")
LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 4}
TRUTH = TransferredWeights(
    features=FEATURES,
    coefficients=(
        (0.7, -0.4, 0.1),  # size
        (-0.5, 0.3, -0.3),  # steps
        (1.5, -1.0, 0.2),  # loss
        (0.8, 0.6, -0.5),  # similarity
        (2.0, -2.0, 0.3),  # arrival
        (-1.0, 1.5, 0.4),  # label entropy
    ),
    rounds=6,
)
ENVIRONMENT = Environment(communication=0.7, silent="broadcast_model", epochs=(1, 2, 1, 3, 1, 2, 2, 1, 4))


def ruled(rule: TransferredWeights) -> Any:
    plain = cs.fedavg(**LOCAL)
    server = replace(plain.server, weighting=rule)
    return replace(plain, client=LabelCounting(training=plain.client), server=server)


def weights_of(rule: TransferredWeights, engine: Any, rounds: int, seed: int) -> torch.Tensor:
    """[rounds, clients] that a rule computes in a run."""
    return torch.stack([done.notes["weights"] for done in cs.run(ruled(rule), engine, rounds=rounds, seed=seed)])


def test_a_known_rule_is_recovered_and_transferred() -> None:
    """Weights computed by the truth in a run; the fit sees the same run, so that its answer must be the truth."""
    engine = tiny.engine(tiny.mlp, tiny.federation((9, 4, 1, 12, 6, 3, 8, 5, 10)), environment=ENVIRONMENT)
    seed = rng.key(0, "rule", 0) % 2**63
    table = weights_of(TRUTH, engine, 6, seed)
    assert float(table.std(0).max()) > 0.01
    found = fit_rule(table, cs.fedavg(**LOCAL), engine, trials=1, ridge=1e-13)
    assert found.divergence < 1e-10 < found.by_examples
    other = tiny.engine(
        tiny.mlp,
        tiny.federation((3, 8, 5, 2, 9, 4, 7, 6), seed=4),
        environment=Environment(communication=0.8, silent="broadcast_model"),
    )
    for rounds in (3, 10):
        expected = weights_of(replace(TRUTH, rounds=rounds), other, rounds, 11)
        got = weights_of(replace(found.rule, rounds=rounds), other, rounds, 11)
        assert got.shape == (rounds, 8)
        np.testing.assert_allclose(got, expected, atol=1e-4)
        assert float((expected - 1 / 8).abs().max()) > 0.05


def test_coefficients_of_few_features_are_recovered_to_many_digits() -> None:
    truth = TransferredWeights(features=("size", "loss"), coefficients=((0.7, -0.4, 0.1), (1.5, -1.0, 0.2)), rounds=6)
    engine = tiny.engine(tiny.mlp)
    algorithm = cs.fedavg(weighting=truth, **LOCAL)
    seed = rng.key(0, "rule", 0) % 2**63
    table = torch.stack([done.notes["weights"] for done in cs.run(algorithm, engine, rounds=6, seed=seed)])
    found = fit_rule(table, cs.fedavg(**LOCAL), engine, features=("size", "loss"), trials=1, ridge=1e-15)
    np.testing.assert_allclose(found.rule.coefficients, truth.coefficients, atol=1e-5)


def test_features_by_hand() -> None:
    start = {"params": {"w": torch.zeros(2, dtype=torch.float64)}, "buffers": {}}
    models = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], dtype=torch.float64)
    cohort = Cohort(
        reply={
            "model": {"params": {"w": models}, "buffers": {}},
            "loss": torch.tensor([1.0, math.e, 7.0], dtype=torch.float64),
            "labels": torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.3, 0.7]], dtype=torch.float64),
        },
        ids=np.array([0, 1, 3]),
        examples=torch.tensor([10.0, 20.0, 40.0], dtype=torch.float64),
        steps=np.array([1, 4, 0]),
        round=0,
        heard=np.array([True, True, False]),
    )
    values, state = observe(FEATURES, cohort, start, unknown(start, 4))
    raw = np.array([
        np.log([10, 20, 40]),
        [0, np.log(4), np.log(4) / 2],  # the third client was not heard: the mean of the known ones
        [0, 1, 0.5],
        [0, 0, 0],  # the first two updates are orthogonal
        [2 / 3, 2 / 3, 1 / 3],
        [0, 1, 0.5],
    ])  # fmt: skip
    np.testing.assert_allclose(values.T, raw - raw.mean(1, keepdims=True), atol=1e-12)
    assert state["heard"].tolist() == [1, 1, 0, 0] and state["rounds"].tolist() == [1] * 4
    known, _ = observe(("arrival",), cohort, start, unknown(start, 4), (0.2, 0.4, 0.9, 0.6))
    np.testing.assert_allclose(known[:, 0], np.array([0.2, 0.4, 0.6]) - 0.4, atol=1e-12)
    assert [terms(t, 5).tolist() for t in (0, 2, 4, 7)] == [[1, 0, 0], [1, 0.5, 0], [1, 1, 1], [1, 1, 0]]


def spoiled(honest: int, noisy: int) -> Federation:
    """Clients that agree, and larger ones whose labels are shuffled."""
    draw = torch.Generator().manual_seed(honest)

    def client(rows: int, shuffled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, 4, generator=draw, dtype=torch.float64)
        y = (x[:, 0] > 0).long()
        return x, y[torch.randperm(rows, generator=draw)] if shuffled else y

    return Federation.from_clients(
        [client(40, True) if k >= honest else client(20, False) for k in range(honest + noisy)]
    )


def test_what_was_learned_with_three_clients_helps_seven(tmp_path: Path) -> None:
    """Noisy clients lose weight in a federation that no weights were learned for."""

    def engine(data: Federation) -> Any:
        module = tiny.seeded(lambda: torch.nn.Linear(4, 2, dtype=torch.float64))
        return cs.Vectorised(cs.Task(module), data, device="cpu", dtype="float64", lane="serial")

    local: dict[str, Any] = {"lr": 0.5, "batch_size": 10}
    small = engine(spoiled(2, 1))
    schedule = cs.learn_schedule(cs.duw_fedavg(**local), small, rounds=3, iterations=40, lr=0.05, progress=False)
    found = fit_rule(schedule.weights, cs.duw_fedavg(**local), small, features=("loss", "similarity"), ridge=1e-3)
    assert found.divergence < found.by_examples
    save_rule(found.rule, tmp_path / "rule.json", divergence=found.divergence)
    large = engine(spoiled(4, 3))
    ruled = cs.duw_fedavg(rule=str(tmp_path / "rule.json"), rule_rounds=5, **local)
    for done in cs.run(ruled, large, rounds=5):
        assert float(done.notes["weights"][4:].sum()) < 0.5  # they hold 60 % of the rows


def test_the_file_of_a_rule(tmp_path: Path) -> None:
    path = tmp_path / "rule.json"
    save_rule(TRUTH, path, divergence=0.25)
    assert json.loads(path.read_text())["divergence"] == 0.25
    assert replace(TransferredWeights(path=str(path)), path="") == TRUTH
    assert TransferredWeights(path=str(path), rounds=20).rounds == 20
    algorithm = cs.duw_fedavg(rule=str(path))
    assert isinstance(algorithm.client, LabelCounting) and algorithm.server.weighting.rounds == 6
    with pytest.raises(Invalid, match="both say how replies are weighted"):
        cs.duw_fedavg(rule=str(path), schedule="other.safetensors")
    with pytest.raises(Invalid, match="reads 'labels' in the replies"):
        cs.fedavg(weighting=TransferredWeights(path=str(path)))
    with pytest.raises(Invalid, match="there is no rule at"):
        cs.fedavg(weighting={"name": "transferred", "path": str(tmp_path / "none.json")})
    with pytest.raises(Invalid, match=r"the rule of TransferredWeights is empty.*consilience learn --rule"):
        list(cs.run(cs.fedavg(weighting="transferred"), tiny.engine(), rounds=1))
    path.write_text('{"features": ["size"], "coefficients": [[1, 2]], "rounds": 3}')
    with pytest.raises(Invalid, match="needs 3 numbers for each"):
        TransferredWeights(path=str(path))
    path.write_bytes(b"\x80" + bytes(2000))
    with pytest.raises(Invalid, match="is not the file of a rule") as refused:
        TransferredWeights(path=str(path))
    assert len(str(refused.value)) < 600  # UnicodeDecodeError's repr holds the whole file
    path.write_text("[]")
    with pytest.raises(Invalid, match="is not the file of a rule"):
        TransferredWeights(path=str(path))
