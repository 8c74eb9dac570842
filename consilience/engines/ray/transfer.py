"""Trees between Ray's processes: NumPy arrays, which the object store gives without a copy."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from consilience.core import tree
from consilience.core.remote import RemoteTensor
from consilience.core.tree import Tree
from consilience.engines.vectorised.tuning import LaneChoice

_BFLOAT16 = np.dtype([("bfloat16", "<i2")])  # NumPy has no such type: its bits, under its name


def packed(value: Any) -> Any:
    """A tree of tensors as a tree of arrays; other values are unchanged."""
    return tree.map_leaves(lambda leaf: _array(leaf) if isinstance(leaf, Tensor) else leaf, value)


def unpacked(value: Any, device: torch.device) -> Any:
    """A tree of arrays as a tree of tensors, which share the arrays' memory on a processor: read only."""
    return tree.map_leaves(lambda leaf: _tensor(leaf).to(device) if isinstance(leaf, np.ndarray) else leaf, value)


def _array(leaf: Tensor) -> np.ndarray:
    leaf = (leaf.here() if isinstance(leaf, RemoteTensor) else leaf).detach().cpu().contiguous()
    if leaf.dtype == torch.bfloat16:
        return leaf.view(torch.int16).numpy().view(_BFLOAT16)
    return leaf.numpy()


def _tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the memory is read-only
        if array.dtype == _BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def without_frozen(module: nn.Module) -> tuple[nn.Module, Tree]:
    """(the module with empty tensors in place of frozen parameters, these parameters as arrays by name)."""
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    empty = {id(p): nn.Parameter(p.detach().new_empty(0), requires_grad=False) for p in frozen.values()}
    return copy.deepcopy(module, empty), packed(frozen)


def with_frozen(module: nn.Module, frozen: Tree) -> nn.Module:
    """The module with its frozen parameters, which share the arrays' memory."""
    parameters = dict(module.named_parameters())
    for name, value in unpacked(frozen, torch.device("cpu")).items():
        parameters[name].data = value
    return module


class RemoteLeaf(NamedTuple):
    """A tensor of the replies that was left in the object store."""

    path: str
    shard: int  # in which of the worker's objects
    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype
    lengths: np.ndarray  # [m] of each row; NaN where a value is not finite


class WorkerReplies(NamedTuple):
    """The replies of one worker's clients to an exchange, and the lane in which they worked."""

    reply: Tree  # arrays stacked [m, ...], and `RemoteLeaf` in place of those that stay in the object store
    choice: LaneChoice


def balanced_owners(weights: np.ndarray, among: int) -> np.ndarray:
    """[n] the owner of each item: heaviest first, each to the owner with least weight, then fewest items, then lowest.

    The outcome depends on the numbers alone.
    """
    load, count = np.zeros(among), np.zeros(among, dtype=np.int64)
    owner = np.zeros(len(weights), dtype=np.int64)
    for number in np.lexsort((np.arange(len(weights)), -weights)):
        least = np.lexsort((np.arange(among), count, load))[0]
        owner[number] = least
        load[least] += weights[number]
        count[least] += 1
    return owner
