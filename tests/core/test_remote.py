"""Tensors whose rows lie elsewhere: read like any other, fetched only as far as something reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.remote import RemoteTensor, each

VALUES = torch.arange(24, dtype=torch.float64).reshape(6, 4)


class Shelf:
    """A source that counts what is fetched from it, and the place where work on it is done."""

    def __init__(self, values: Tensor, lengths: list[float] | None = None, works: bool = True) -> None:
        self.values, self.fetched, self.worked = values, [], 0
        self.lengths = None if lengths is None else np.array(lengths)
        self.place = self if works else None
        self.lasting = False

    def fetch(self, rows: np.ndarray) -> Tensor:
        self.fetched.append(rows.tolist())
        return self.values[torch.from_numpy(rows)]

    def begin(self, function: Callable[..., Any], calls: Sequence[Any], given: Any) -> Callable[[], list[Any]]:
        self.worked += 1
        return lambda: [
            function(leaf.source.values[torch.from_numpy(leaf.rows)], *rest, *given) for leaf, *rest in calls
        ]

    def leaf(self) -> RemoteTensor:
        return RemoteTensor(
            self, np.arange(len(self.values)), self.values.shape[1:], self.values.dtype, torch.device("cpu")
        )


def total(stacked: Tensor, by: Tensor) -> Tensor:
    return (stacked * by).sum(0)


def test_what_is_known_is_not_fetched() -> None:
    shelf = Shelf(VALUES)
    leaf = shelf.leaf()
    assert (leaf.shape, leaf.dtype, len(leaf), leaf.dim(), leaf.numel()) == ((6, 4), torch.float64, 6, 2, 24)
    assert leaf.is_floating_point() and leaf.element_size() == 8 and tree.nbytes({"a": leaf}) == 192
    assert isinstance(leaf, Tensor) and "RemoteTensor" in repr(leaf)
    assert tuple(leaf.stride()) == (4, 1) and leaf.device == torch.device("cpu") and not leaf.requires_grad
    assert not shelf.fetched


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t + 1,
        lambda t: 2 * t,
        lambda t: torch.cat([t, t]),
        lambda t: t.reshape(6, -1).sum(1),
        lambda t: torch.einsum("mp,np->mn", t, t),
        lambda t: torch.func.vmap(lambda row: row.square().sum())(t),
        lambda t: t.to(torch.float32),
        lambda t: t.detach().cpu().contiguous(),
        lambda t: torch.from_numpy(t.numpy()),
        lambda t: torch.tensor(t.tolist()),
        lambda t: torch.zeros(6, 4, dtype=torch.float64).index_copy(0, torch.arange(6), t),
        lambda t: t[:, 1],
        lambda t: t[None],
        lambda t: t[t > 3],
    ],
)
def test_anything_else_reads_the_values(operation: Callable[[Tensor], Tensor]) -> None:
    shelf = Shelf(VALUES)
    found = operation(shelf.leaf())
    assert torch.equal(found, operation(VALUES)) and type(found) is Tensor
    assert shelf.fetched


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (2, [2]),
        (-1, [5]),
        (slice(1, 3), [1, 2]),
        (torch.tensor([4, 0]), [4, 0]),
        (torch.tensor([True, False, False, True, False, False]), [0, 3]),
        (np.array([5]), [5]),
    ],
)
def test_an_index_over_rows_fetches_those_rows_alone(index: Any, rows: list[int]) -> None:
    shelf = Shelf(VALUES)
    assert torch.equal(shelf.leaf()[index], VALUES[index])
    assert shelf.fetched == [rows]


def test_taking_rows_fetches_nothing() -> None:
    shelf = Shelf(VALUES)
    some = tree.take({"a": shelf.leaf(), "b": VALUES}, np.array([5, 2, 3]))
    again = tree.take(some, np.array([2, 0]))
    assert not shelf.fetched and again["a"].shape == (2, 4)
    assert torch.equal(tree.here(again)["a"], VALUES[[3, 5]]) and torch.equal(again["b"], VALUES[[3, 5]])
    assert shelf.fetched == [[3, 5]]


def test_work_is_done_where_the_rows_lie() -> None:
    shelf, idle = Shelf(VALUES), Shelf(VALUES, works=False)
    stacked = {"near": VALUES, "far": {"one": shelf.leaf(), "two": shelf.leaf().take(np.array([1, 4]))}, "none": {}}
    others = tree.map_leaves(lambda leaf: torch.tensor(float(len(leaf))), stacked)
    found = tree.map_rows(total, stacked, others)
    expected = tree.map_rows(
        total,
        tree.map_leaves(
            lambda leaf: leaf.source.values[torch.from_numpy(leaf.rows)] if isinstance(leaf, RemoteTensor) else leaf,
            stacked,
        ),
        others,
    )
    assert tree.flatten(found).keys() == tree.flatten(expected).keys() and found["none"] == {}
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(found), tree.leaves(expected)))
    assert not shelf.fetched and shelf.worked == 1  # one parcel for both
    assert torch.equal(each(total, [idle.leaf()], given=(torch.tensor(2.0),))[0], 2 * VALUES.sum(0))
    assert idle.fetched  # nobody works there


def test_screening_asks_for_lengths_and_not_for_values() -> None:
    far = Shelf(VALUES, lengths=[1.0, 2.0, np.nan, np.inf, 0.0, 3.0])
    near = VALUES.clone()
    near[4, 1] = torch.inf
    counter = RemoteTensor(Shelf(VALUES.long()), np.arange(6), (4,), torch.int64, torch.device("cpu"))
    flags = tree.all_finite({"far": far.leaf(), "near": near, "count": counter})
    assert flags.tolist() == [True, True, False, True, False, True]
    assert tree.all_finite({"far": far.leaf().take(np.array([0, 2]))}).tolist() == [True, False]
    assert not far.fetched
