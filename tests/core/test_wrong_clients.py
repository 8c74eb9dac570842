"""Clients and models as people get them wrong: each is refused before any work, with what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import consilience as cs
from consilience import environments

QUICK: dict[str, Any] = {"rounds": 1, "progress": False, "lane": "serial"}


def client(rows: int = 8, width: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.arange(rows) % 3


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs))


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> Any:
        if row == 2:
            raise OSError("no such file")
        return torch.zeros(4), 0


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(x), x


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x if bool(x.sum() > 0) else -x)


def without_gradient(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) != target).float()


def not_a_number(output: Tensor, target: Tensor) -> Tensor:
    return output.sum(1) * float("nan")


def train(model: nn.Module | cs.Task | str, clients: Any, **options: Any) -> cs.Result:
    return cs.train(model, clients, cs.fedavg(lr=0.1), **{**QUICK, **options})


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "sparse": (lambda: train(network(), [(client()[0].to_sparse(), client()[1])]), r"sparse tensor: .*to_dense\(\)"),
    "other_parts": (
        lambda: train(network(), [({"a": client()[0]}, client()[1]), ({"b": client()[0]}, client()[1])]),
        r"client 1 has rows of b: \(4,\) float32, y: \(\) int64, client 0 of a: \(4,\) float32",
    ),
    "test_width": (
        lambda: cs.Federation.from_clients([client()], test=client(width=5)),
        r"test has rows of \(5,\) float32, \(\) int64, client 0 of \(4,\)",
    ),
    "client_test_width": (
        lambda: cs.Federation.from_clients([client()], client_tests=[client(width=5)]),
        r"client_tests has rows of \(5,\)",
    ),
    "names": (lambda: cs.Federation.from_clients([client(), client()], names=["a", "a"]), "names has 'a' twice"),
    "no_targets": (lambda: train(network(), [(client()[0], None)]), "client 0 has no targets, y is None"),
    "negative": (lambda: train(network(), [(client()[0], -1 - client()[1])]), "class numbers are negative.*-1"),
    "identifiers": (
        lambda: train("mlp", [(client(3)[0], torch.tensor([0, 1, 2**40]))]),
        "highest class number is 1,099,511,627,776 for 3 rows: number the classes from 0",
    ),
    "one_hot": (lambda: train(network(), [(client()[0], torch.eye(3)[client()[1]])]), r"one-hot: .*y.argmax\(1\)"),
    "column": (lambda: train(network(), [(client()[0], client()[1][:, None])]), r"y.squeeze\(1\)"),
    "one_class": (lambda: train("mlp", [(client()[0], client()[1] * 0)]), "every training row has the class 0"),
    "outputs": (lambda: train(network(2), [client()]), r"class number 2 \(training row 2 of client '0'\)"),
    "whole_numbers": (lambda: train(network(), [(client()[0].long(), client()[1])]), r"such as by x.float\(\)"),
    "unreadable": (
        lambda: train(network(), [Broken()]),
        r"client 0: row 2 of Broken cannot be read \(OSError: no such",
    ),
    "two_outputs": (lambda: train(Pair(), [client()]), "forward must return one tensor"),
    "no_gradient": (
        lambda: train(cs.Task(network(), kind="classification", loss=without_gradient), [client()]),
        "'without_gradient' does not depend on the parameters of the model Sequential: nothing can be learned",
    ),
    "nan_loss": (
        lambda: train(cs.Task(network(), kind="classification", loss=not_a_number), [client()]),
        "'not_a_number' of the model Sequential is nan at the start",
    ),
    "unbatched": (
        lambda: train(Branching(), [client(), client()], lane="batched"),
        "lane = 'batched' cannot run this model: it reads a value out of a tensor",
    ),
    "environment": (lambda: train(network(), [client()], environment="duw_9"), "'duw_9' is not one of plain, duw_1"),
    "tune": (lambda: cs.tune(["fedavg"], "rounds=1"), r"methods by algorithms=\['fedavg'\]"),
    "build": (lambda: cs.build_model("mlp", (4,), 3, hiden=(3,)), "mlp.hiden is not a setting .did you mean 'hidden'"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_before_any_work(name: str) -> None:
    call, said = CASES[name]
    with pytest.raises(cs.Invalid, match=said):
        call()


def test_one_hot_targets_are_used_where_their_kind_is_given() -> None:
    rows = (client()[0], torch.eye(3)[client()[1]])
    assert "mean_absolute_error" not in train(network(), [rows], kind="multi_label").history[-1]
    assert train(network(), [rows], kind="regression").history


def test_an_environment_may_be_named() -> None:
    model, five = network(), [client() for _ in range(5)]
    same = environments.environment("fedprox_stragglers", level=0.9)
    named = train(model, five, environment={"name": "fedprox_stragglers", "level": 0.9})
    assert named.values["params"]["0.weight"].equal(train(model, five, environment=same).values["params"]["0.weight"])
    plain = train(model, five, environment="plain")
    assert plain.values["params"]["0.weight"].equal(train(model, five).values["params"]["0.weight"])


def test_a_generator_of_clients_is_a_list_of_them() -> None:
    assert len(cs.Federation.from_clients(client() for _ in range(3))) == 3


def test_rounds_before_a_divergence_are_not_lost() -> None:
    clients = [(x.double(), y) for x, y in (client(), client())]
    steep = cs.fedavg(lr=1e200)
    with pytest.raises(cs.Diverged) as caught:
        cs.train(network().double(), clients, steep, rounds=9, progress=False, lane="serial", dtype="float64")
    kept = caught.value.result
    assert kept is not None and len(kept.history) >= 1
    assert all(bool(value.isfinite().all()) for value in kept.values["params"].values())


def test_floats_of_any_width_and_whole_numbers_of_any_width_are_read() -> None:
    (x, y), (other, labels), module = client(), client(), network()
    given = [(x.double(), y.int()), (other, labels.to(torch.uint8))]
    usual = cs.Federation.from_clients([(x, y), (other, labels)], test=(x, y))
    mixed = cs.Federation.from_clients(given, test=(x.double(), y.to(torch.int16)))
    results = [cs.train(module, federation, cs.fedavg(), **QUICK) for federation in (usual, mixed)]
    assert results[0].history[-1]["loss"] == results[1].history[-1]["loss"]
    for one, same in zip(*(result.model.parameters() for result in results), strict=True):
        assert torch.equal(one, same)
