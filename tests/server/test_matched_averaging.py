"""FedMA: permutations made by hand are undone, functions are kept, and what cannot be matched is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

from consilience import models
from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedma import fedma
from consilience.client.chain_training import check_chain
from consilience.client.personal_layers import Head
from consilience.core import tree
from consilience.core.exchange import Cohort
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.server.rules.matched_averaging import MatchedAveraging, match
from consilience.task.task import Task


def cohort_of(replies: list[Tree], rows: list[float]) -> Cohort:
    return Cohort(
        reply={"model": tree.stack(replies)},
        ids=np.arange(len(replies)),
        examples=torch.tensor(rows, dtype=torch.float64),
        steps=np.ones(len(replies), np.int64),
        round=0,
    )


def merged(replies: list[Tree], reference: Tree, rows: list[float] | None = None) -> tuple[Tree, Any]:
    server = MatchedAveraging()
    state, notes = server.update(server.init(reference, len(replies)), cohort_of(replies, rows or [1.0] * len(replies)))
    return server.model(state), notes


def dense(seed: int, sizes: tuple[int, ...] = (5, 7, 6, 3)) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    params = {}
    for place, (before, after) in enumerate(pairwise(sizes)):
        params[f"{place}.weight"] = torch.randn(after, before, generator=draw, dtype=torch.float64)
        params[f"{place}.bias"] = torch.randn(after, generator=draw, dtype=torch.float64)
    return {"params": params, "buffers": {}}


def shuffled(model: Tree, seed: int) -> Tree:
    """Hidden units of a dense network in another order, written out."""
    params, draw = dict(model["params"]), np.random.default_rng(seed)
    for place in (0, 1):
        order = torch.from_numpy(draw.permutation(len(params[f"{place}.bias"])))
        params[f"{place}.weight"], params[f"{place}.bias"] = (
            params[f"{place}.weight"][order],
            params[f"{place}.bias"][order],
        )
        params[f"{place + 1}.weight"] = params[f"{place + 1}.weight"][:, order]
    return {"params": params, "buffers": {}}


def test_two_units_in_the_other_order_by_hand() -> None:
    one: Tree = {
        "params": {"a.weight": torch.tensor([[1.0], [5.0]]), "b.weight": torch.tensor([[10.0, 20.0]])},
        "buffers": {},
    }
    two: Tree = {
        "params": {"a.weight": torch.tensor([[5.5], [1.5]]), "b.weight": torch.tensor([[22.0, 12.0]])},
        "buffers": {},
    }
    found, notes = merged([one, two], one)
    assert found["params"]["a.weight"].tolist() == [[1.25], [5.25]] and found["params"]["b.weight"].tolist() == [
        [11.0, 21.0]
    ]
    assert notes["moved_units"].tolist() == [0, 2]


@pytest.mark.parametrize("reference", ["same", "unrelated"])
def test_permuted_copies_of_one_network_average_to_it_exactly(reference: str) -> None:
    model = dense(0)
    copies = [shuffled(model, seed) for seed in (1, 2, 3, 4)]
    found, notes = merged(copies, model if reference == "same" else dense(9))
    if reference == "same":
        assert tiny.same(found, model)  # quarters of equal numbers add up without rounding
        assert (notes["moved_units"] > 0).all()
    else:  # some order of its units: matching it to the network itself is the identity
        assert tiny.same(tree.rows(match(tree.stack([found]), torch.ones(1).double(), model)[0], 0), model)
    plain = tree.map_leaves(lambda leaf: leaf.mean(0), tree.stack(copies))
    assert tiny.gap(plain, model) > 0.1  # which the plain mean does not undo


def test_noise_on_permuted_copies_is_averaged_unit_by_unit() -> None:
    model, draw = dense(0), torch.Generator().manual_seed(1)
    noise = [
        tree.map_leaves(lambda leaf: 0.01 * torch.randn(leaf.shape, generator=draw).double(), model) for _ in range(3)
    ]
    noisy = [tree.map_leaves(torch.add, model, one) for one in noise]
    rows = [1.0, 2.0, 5.0]
    expected = tree.map_leaves(
        lambda leaf: torch.einsum("m,m...->...", torch.tensor(rows).double() / 8, leaf), tree.stack(noisy)
    )
    found, _ = merged([shuffled(one, seed) for seed, one in enumerate(noisy)], model, rows)
    assert tiny.gap(found, expected) < 1e-14


def convnet() -> nn.Module:
    return tiny.seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 5, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(5 * 9, 8),
            nn.Tanh(),
            nn.Linear(8, 3),
        )
    )


def values(model: nn.Module) -> Tree:
    """Of a network with statistics that are not those of the start."""
    draw = torch.Generator().manual_seed(3)
    task = Task(model.double())
    start = task.start()
    random = lambda leaf: torch.rand(leaf.shape, generator=draw).double() if leaf.is_floating_point() else leaf  # noqa: E731
    return {"params": tree.map_leaves(random, start["params"]), "buffers": tree.map_leaves(random, start["buffers"])}


def test_convolutions_batch_norm_and_flattened_pictures_follow_their_units() -> None:
    """Channels are shuffled by hand, pixels of a flattened channel together; the function stays, and is found again."""
    task, model = Task(convnet().double()), values(convnet())
    params, buffers, draw = dict(model["params"]), dict(model["buffers"]), np.random.default_rng(0)
    first, second, third = (torch.from_numpy(draw.permutation(n)) for n in (4, 5, 8))
    params["0.weight"] = params["0.weight"][first]
    for name in ("weight", "bias"):
        params[f"1.{name}"] = params[f"1.{name}"][first]
    for name in ("running_mean", "running_var"):
        buffers[f"1.{name}"] = buffers[f"1.{name}"][first]
    params["3.weight"], params["3.bias"] = params["3.weight"][:, first][second], params["3.bias"][second]
    pixels = (second[:, None] * 9 + torch.arange(9)).flatten()
    params["7.weight"], params["7.bias"] = params["7.weight"][:, pixels][third], params["7.bias"][third]
    params["9.weight"] = params["9.weight"][:, third]
    other: Tree = {"params": params, "buffers": buffers}
    x = torch.randn(6, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(task.apply(other, x, train=False)[0], task.apply(model, x, train=False)[0])
    found, notes = merged([model, other], model)
    assert tiny.same(found, model) and int(notes["moved_units"][1]) > 8


def test_matching_keeps_every_clients_function() -> None:
    task = Task(convnet().double())
    draw = torch.Generator().manual_seed(1)
    noise = lambda leaf: leaf + torch.randn(leaf.shape, generator=draw).double() if leaf.is_floating_point() else leaf  # noqa: E731
    replies = [tree.map_leaves(noise, values(convnet())) for _ in range(3)]
    for one in replies:
        one["buffers"]["1.running_var"] = one["buffers"]["1.running_var"].abs() + 0.1
    matched, moved = match(tree.stack(replies), torch.full((3,), 1 / 3).double(), values(convnet()))
    x = torch.randn(6, 1, 6, 6, generator=draw, dtype=torch.float64)
    for place, one in enumerate(replies):
        torch.testing.assert_close(
            task.apply(tree.rows(matched, place), x, train=False)[0], task.apply(one, x, train=False)[0]
        )
    assert (moved > 0).all()


def test_matching_comes_nearer_than_the_given_order() -> None:
    replies, reference = tree.stack([dense(seed) for seed in range(4)]), dense(7)
    weights = torch.full((4,), 0.25, dtype=torch.float64)

    def spread(stacked: Tree) -> float:
        return sum(float((leaf - leaf.mean(0)).square().sum()) for leaf in stacked["params"].values())

    assert spread(match(replies, weights, reference)[0]) < 0.9 * spread(replies)


def test_from_one_start_it_is_fedavg_and_says_that_no_unit_moved() -> None:
    local: Any = {"lr": 0.05, "batch_size": 4}
    ours = list(run(fedma(**local), tiny.engine(tiny.convnet), rounds=2, seed=1))
    theirs = list(run(fedavg(**local), tiny.engine(tiny.convnet), rounds=2, seed=1))
    assert ours[-1].notes["moved_units"].tolist() == [0] * 5
    assert tiny.same(ours[-1].model, theirs[-1].model)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(x + self.one(x))


class Reordered(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.two(x))


def test_networks_that_are_no_chain_are_refused() -> None:
    names = frozenset(name for name, _ in Residual().named_parameters())
    with pytest.raises(Invalid, match="needs a chain of layers, but Residual has a branch at add"):
        check_chain(Residual(), names)
    with pytest.raises(Invalid, match="used once, in order"):
        check_chain(Reordered(), names)
    with pytest.raises(Invalid, match="but Sequential has LayerNorm 1: use a model such as mlp or cnn"):
        check_chain(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), frozenset())
    with pytest.raises(Invalid, match="has a branch"):
        list(run(fedma(), tiny.engine(lambda: models.build("resnet20", (1, 6, 6), 3, seed=0)), rounds=1))
    with pytest.raises(Invalid, match=r"b.weight takes 7 inputs, which cannot come from the 2 units of a.weight"):
        MatchedAveraging().init(
            {"params": {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(1, 7)}, "buffers": {}}, 2
        )
    with pytest.raises(Invalid, match="personal_layers is incompatible with fedma"):
        fedma(personal_layers=Head())
    for name in ("mlp", "cnn", "logistic"):
        module = models.build(name, (1, 28, 28), 10, seed=0)
        check_chain(module, frozenset(key for key, _ in module.named_parameters()))
