"""Trees of named tensors, the format of models, messages and memories."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core.remote import RemoteTensor, each

Tree = dict[str, Any]
"""A nested dict whose leaves are tensors: `Tree = dict[str, Tensor | Tree]`."""

SEPARATOR = "/"


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to corresponding leaves; dicts are walked in the first tree's key order."""
    if not isinstance(tree, dict):
        return function(tree, *others)
    if others:
        return {key: map_leaves(function, value, *(o[key] for o in others)) for key, value in tree.items()}
    return {
        key: map_leaves(function, value) if isinstance(value, dict) else function(value) for key, value in tree.items()
    }


def leaves(tree: Any) -> Iterator[Tensor]:
    """Every tensor, depth first, in key order."""
    if not isinstance(tree, dict):
        yield tree
        return
    for value in tree.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:  # not by a call for each leaf: some rounds walk hundreds of them a dozen times
            yield value


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """`{"model/params/fc.weight": tensor}`: one level, paths joined by a slash."""
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        if not isinstance(key, str) or not key or SEPARATOR in key:
            raise ValueError(f"tree key {key!r} must be non-empty text without {SEPARATOR!r}")
        path = prefix + key
        if isinstance(value, dict):
            flat.update(flatten(value, path + SEPARATOR))
        else:
            flat[path] = value
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """The inverse of `flatten` (empty subtrees are not kept)."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split(SEPARATOR)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def shaped_like(tree: Tree, flat: dict[str, Any], prefix: str = "") -> Tree:
    """The leaves of a flat tree in the structure, empty subtrees included, of another with the same paths."""
    return {
        key: shaped_like(value, flat, f"{prefix}{key}{SEPARATOR}") if isinstance(value, dict) else flat[prefix + key]
        for key, value in tree.items()
    }


def stack(trees: Sequence[Any]) -> Any:
    """Trees of equal structure -> one tree with a new leading axis."""
    return map_leaves(lambda *values: torch.stack(values), trees[0], *trees[1:])


def concatenate(trees: Sequence[Any]) -> Any:
    """Stacked trees -> one stacked tree, along the leading axis."""
    if len(trees) == 1:
        return trees[0]
    return map_leaves(lambda *values: torch.cat(values), trees[0], *trees[1:])


def rows(tree: Any, index: Any) -> Any:
    """`leaf[index]` for every leaf: one row, a slice or a gather of rows."""
    return map_leaves(lambda leaf: leaf[index], tree)


def map_rows(function: Callable[..., Any], tree: Any, *others: Any, given: tuple[Any, ...] = ()) -> Any:
    """`function(leaf, *others, *given)` for every stacked leaf, computed where its rows are: see `remote.each`."""
    calls = list(leaves(map_leaves(lambda *call: call, tree, *others)))
    found = iter(each(function, *zip(*calls), given=given) if calls else ())
    return map_leaves(lambda _: next(found), tree)


def take(tree: Any, index: np.ndarray) -> Any:
    """Rows [n] of every stacked leaf; remote rows are not fetched."""

    def some(leaf: Tensor) -> Tensor:
        if isinstance(leaf, RemoteTensor):
            return leaf.take(index)
        return leaf[torch.from_numpy(index).to(leaf.device, non_blocking=True)]

    return map_leaves(some, tree)


def here(tree: Any) -> Any:
    """The tree with remote values fetched, except those that stay readable as long as the tree exists."""
    if not any(isinstance(leaf, RemoteTensor) for leaf in leaves(tree)):
        return tree

    def fetched(leaf: Tensor) -> Tensor:
        return leaf.here() if isinstance(leaf, RemoteTensor) and not leaf.source.lasting else leaf

    return map_leaves(fetched, tree)


def repeat(tree: Any, times: int) -> Any:
    """Each leaf copied along a new leading axis of length `times`."""
    return map_leaves(lambda leaf: leaf.unsqueeze(0).repeat(times, *(1,) * leaf.dim()), tree)


def where(condition: Tensor, yes: Any, no: Any) -> Any:
    """Row-wise choice between two stacked trees; `condition` is a scalar or one flag per row."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition.reshape(condition.shape + (1,) * (a.dim() - condition.dim())), a, b)

    return map_leaves(choose, yes, no)


def clone(tree: Any) -> Any:
    """A deep copy that shares no storage."""
    return map_leaves(lambda leaf: leaf.detach().clone(), tree)


def to(tree: Any, *args: Any, **kwargs: Any) -> Any:
    """`leaf.to(...)` for every leaf."""
    return map_leaves(lambda leaf: leaf.to(*args, **kwargs), tree)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Floating leaves in `dtype`; integer and boolean leaves unchanged."""
    return map_leaves(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


def nbytes(tree: Any) -> int:
    """Bytes of all tensors: the size of the tree as a message, without compression."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def all_finite(tree: Any) -> np.ndarray:
    """[m] flags: whether every floating value in row i of a stacked tree is finite; one wait for a device, mostly."""
    every = [leaf for leaf in leaves(tree) if leaf.is_floating_point()]
    known = [leaf.finite for leaf in every if isinstance(leaf, RemoteTensor) and leaf.finite is not None]
    if known:  # known without fetching the rows
        nearby = [leaf for leaf in every if not (isinstance(leaf, RemoteTensor) and leaf.finite is not None)]
        flags: np.ndarray = np.logical_and.reduce(known)
        return flags & all_finite(dict(enumerate(nearby))) if nearby else flags
    floating = [leaf.reshape(len(leaf), -1) for leaf in every]
    if not floating or is_finite(floating):
        return np.ones(len(next(leaves(tree))), dtype=bool)
    return torch.stack([leaf.isfinite().all(1) for leaf in floating]).all(0).cpu().numpy()


def is_finite(values: list[Tensor]) -> Tensor:
    """[] whether all values of some tensors are finite, by a few fused kernels for any number of tensors."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for leaf in values:
        if leaf.is_floating_point() and leaf.numel() and not _sums_up(leaf):
            by_dtype.setdefault(leaf.dtype, []).append(leaf)
    # the largest magnitude is NaN if any value is
    found = [torch.stack(torch._foreach_norm(some, math.inf)).isfinite().all() for some in by_dtype.values()]
    return found[0] if len(found) == 1 else torch.stack(found).all() if found else torch.ones((), dtype=torch.bool)


def _sums_up(leaf: Tensor) -> bool:
    """Whether the sum is finite, and therefore every value: on a CPU a hundred times faster than the maximum."""
    if leaf.device.type != "cpu":
        return False
    wide = torch.float32 if leaf.element_size() < 4 else leaf.dtype
    return math.isfinite(leaf.sum(dtype=wide).item())
