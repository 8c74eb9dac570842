"""`cs.train` takes names and tables where people give them, and says what to write where it cannot."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.settings import Invalid

torch.manual_seed(3)
X = torch.randn(40, 5)
Y = (X[:, 0] > 0).long()
CLIENTS = [(X[:20], Y[:20]), (X[20:], Y[20:])]


def values(model: Any, algorithm: Any, **more: Any) -> torch.Tensor:
    found = cs.train(model, CLIENTS, algorithm, rounds=2, progress=False, lane="serial", **more)
    return torch.cat([leaf.flatten() for leaf in found.model.state_dict().values()])


def test_names_and_tables_are_the_objects_they_name() -> None:
    module = cs.build_model("mlp", (5,), 2, seed=4)
    expected = values(module, cs.fedprox(mu=0.5), seed=4, environment=cs.Environment(stragglers=0.5))
    found = values("mlp", {"name": "fedprox", "mu": 0.5}, seed=4, environment={"stragglers": 0.5})
    assert torch.equal(found, expected)
    assert torch.equal(values(module, "fedprox"), values(module, cs.fedprox()))


def test_a_named_model_has_the_outputs_of_its_kind() -> None:
    targets = [(x, x[:, :3]) for x, _ in CLIENTS]
    found = cs.train("logistic", targets, "fedavg", rounds=1, progress=False, lane="serial")
    assert found.model(X).shape == (40, 3) and found.task.kind.name == "regression"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": cs.fedavg}, r"algorithm = fedavg is no Algorithm but function: call it, fedavg\(\)"),
        ({"algorithm": 3}, r"algorithm = 3 is no Algorithm but int: write cs.fedavg"),
        ({"algorithm": "simprx"}, "algorithm 'simprx' is unknown .did you mean 'simprox'"),
        (
            {"algorithm": {"name": "fedavg", "rounds": 3}},
            "fedavg.rounds is not a setting of an algorithm: give rounds to",
        ),
        ({"algorithm": {"name": "fedavg", "optimiser": "adamm"}}, r"nadam, lion, accumulated, clipped, scheduled \("),
        (
            {"environment": "stragglers"},
            "environment.name = 'stragglers' is not one of plain, .*did you mean 'fedprox_",
        ),
        ({"environment": 0.5}, r"environment = 0.5 is not an Environment: write cs"),
        ({"environment": {"straglers": 0.5}}, "environment.straglers is not a setting .did you mean 'stragglers'"),
        ({"model": nn.Linear}, r"model is type, not an nn.Module, .* call it, Linear\(...\)"),
        ({"model": "mlpp"}, "'mlpp'.*did you mean 'mlp'"),
        ({"round": 3}, "train.round is not a setting .did you mean 'rounds'"),
        ({"learning_rate": 0.1}, "learning_rate is an option of the algorithm, not of train: write cs.fedavg.lr="),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(change: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"model": nn.Linear(5, 2), "federation": CLIENTS, "algorithm": cs.fedavg()}
    with pytest.raises(Invalid, match=message):
        cs.train(**{**usual, **change}, rounds=1, progress=False)


def test_an_interrupt_gives_back_the_finished_rounds() -> None:
    """The interrupt comes in the third round; the two before it are as if they had been asked for alone."""
    seen: list[int] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        if len(seen) == stop:
            raise KeyboardInterrupt
        return nn.functional.cross_entropy(output, target, reduction="none")

    module, stop = nn.Linear(5, 2), 0
    settings: dict[str, Any] = {"progress": False, "lane": "serial", "loss": loss}
    full = cs.train(module, CLIENTS, cs.fedavg(), rounds=2, **settings)
    stop, _ = len(seen) + 2, seen.clear()
    with pytest.warns(UserWarning, match="interrupted: the result has 2 of 9 rounds"):
        cut = cs.train(module, CLIENTS, cs.fedavg(), rounds=9, **settings)
    assert cut.stopped == signal.SIGINT and len(cut.history) == 2 and "interrupted" in repr(cut)
    assert all(torch.equal(a, b) for a, b in zip(cut.model.parameters(), full.model.parameters()))
