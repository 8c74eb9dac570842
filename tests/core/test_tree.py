"""Trees of named tensors."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core import tree

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool])
SHAPES = st.lists(st.integers(0, 3), max_size=3)


def made(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(dtype)


LEAVES = st.builds(made, SHAPES, DTYPES)
TREES = st.dictionaries(
    NAMES, st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3)), max_size=4
)


@given(TREES)
def test_flatten_and_unflatten_are_inverse(value: tree.Tree) -> None:
    assert tiny.same(tree.unflatten(tree.flatten(value)), value)


@given(TREES)
def test_clone_shares_nothing(value: tree.Tree) -> None:
    copied = tree.clone(value)
    assert tiny.same(copied, value)
    for leaf in tree.leaves(copied):
        leaf.zero_()
    for name, leaf in tree.flatten(value).items():
        assert torch.equal(leaf, made(list(leaf.shape), leaf.dtype)), name


@given(TREES, st.integers(1, 4))
def test_stacks_come_apart_again(value: tree.Tree, times: int) -> None:
    repeated = tree.repeat(value, times)
    assert tiny.same(repeated, tree.stack([value] * times))
    for row in range(times):
        assert tiny.same(tree.rows(repeated, row), value)
    halves = [tree.rows(repeated, slice(0, 1)), tree.rows(repeated, slice(1, None))]
    assert tiny.same(tree.concatenate(halves), repeated)
    assert tree.nbytes(repeated) == times * tree.nbytes(value)


def test_flatten_joins_paths_and_keeps_order() -> None:
    a, b, c = (torch.tensor(float(n)) for n in range(3))
    value = {"model": {"params": {"fc.weight": a}, "buffers": {}}, "loss": b, "n": {"m": c}}
    assert list(tree.flatten(value)) == ["model/params/fc.weight", "loss", "n/m"]
    assert [float(leaf) for leaf in tree.leaves(value)] == [0, 1, 2]


@pytest.mark.parametrize("key", ["", "a/b", 3, None])
def test_keys_that_cannot_be_paths_are_refused(key: object) -> None:
    with pytest.raises(ValueError, match=r"tree key .* must be non-empty text without '/'"):
        tree.flatten({key: torch.zeros(1)})  # type: ignore[dict-item]


def test_a_missing_key_is_an_error_that_names_it() -> None:
    with pytest.raises(KeyError, match="b"):
        tree.map_leaves(torch.add, {"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": torch.zeros(1)})


def test_where_chooses_rows() -> None:
    yes = {"w": torch.ones(3, 2), "n": torch.tensor([1, 2, 3])}
    no = {"w": torch.zeros(3, 2), "n": torch.tensor([7, 8, 9])}
    got = tree.where(torch.tensor([True, False, True]), yes, no)
    assert got["w"].tolist() == [[1, 1], [0, 0], [1, 1]] and got["n"].tolist() == [1, 8, 3]
    assert tiny.same(tree.where(torch.tensor(False), yes, no), no)


def test_where_does_not_leak_nan_from_the_other_side() -> None:
    got = tree.where(torch.tensor([True, False]), {"w": torch.ones(2)}, {"w": torch.full((2,), torch.nan)})
    assert got["w"][0] == 1 and got["w"][1].isnan()


def test_cast_floating_leaves_counters_alone() -> None:
    value = {"w": torch.ones(2), "n": torch.tensor(3), "flag": torch.tensor(True)}
    cast = tree.cast_floating(value, torch.float64)
    assert [leaf.dtype for leaf in tree.leaves(cast)] == [torch.float64, torch.int64, torch.bool]
    assert [leaf.dtype for leaf in tree.leaves(tree.to(value, torch.float64))] == [torch.float64] * 3


def test_nbytes_counts_every_dtype() -> None:
    value = {
        "a": torch.zeros(3, 2),
        "b": {"c": torch.zeros(5, dtype=torch.bfloat16), "d": torch.zeros((), dtype=torch.int64)},
    }
    assert tree.nbytes(value) == 24 + 10 + 8
    assert tree.nbytes({}) == 0


def test_all_finite_flags_rows() -> None:
    w = torch.zeros(4, 2, 2)
    w[1, 0, 1], w[3, 1, 1] = torch.nan, -torch.inf
    stacked = {"w": w, "scale": torch.tensor([1.0, 1.0, torch.inf, 1.0]), "n": torch.tensor([1, 2, 3, 4])}
    assert tree.all_finite(stacked).tolist() == [True, False, False, False]


def test_all_finite_of_half_precision_and_empty_tensors() -> None:
    half = torch.tensor([[1.0], [torch.inf]], dtype=torch.bfloat16)
    assert tree.all_finite({"h": half, "nothing": torch.zeros(2, 0)}).tolist() == [True, False]


def test_all_finite_without_floating_leaves() -> None:
    assert tree.all_finite({"visits": torch.tensor([3, 4])}).tolist() == [True, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_values_are_finite_even_if_their_sum_is_not(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    large = torch.full((4, 3), most, dtype=dtype)
    assert tree.is_finite([large, -large, torch.zeros(0, dtype=dtype)])
    assert tree.all_finite({"a": large, "n": torch.zeros(4, dtype=torch.int64)}).tolist() == [True] * 4
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoilt = torch.zeros(4, 3, dtype=dtype)
        spoilt[2, 1] = bad
        assert not tree.is_finite([large, spoilt])
        assert tree.all_finite({"a": spoilt, "b": large}).tolist() == [True, True, False, True]
    both = torch.tensor([float("inf"), float("-inf")], dtype=dtype)
    assert not tree.is_finite([both])
