"""Euclidean norms of the rows of stacked trees: a fast version, and an exact one that cannot overflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.remote import RemoteTensor, each
from consilience.core.tree import Tree

BLOCK = 2**24  # values copied to float64 at a time
TINY = 1e-300


def quick(leaf: Tensor) -> Tensor:
    """[m] the norm of each row in its own type, float32 at least: not finite if a value or a square is not."""
    wide = torch.float32 if leaf.element_size() < 4 else leaf.dtype
    return torch.linalg.vector_norm(leaf.detach().reshape(len(leaf), -1), dim=1, dtype=wide)


def exact(leaf: Tensor, start: Tensor) -> Tensor:
    """[m] the norm of each row minus `start` (shared, or one per row), for any finite values."""
    own = start.dim() == leaf.dim()
    rows = max(1, BLOCK // max(1, leaf[0].numel()))
    found = []
    for first in range(0, len(leaf), rows):
        base = start[first : first + rows] if own else start
        # halves: the difference of two finite numbers can be infinite, that of their halves cannot
        half = leaf[first : first + rows].double() / 2 - base.double() / 2
        half = half.reshape(len(half), -1)
        largest = half.abs().amax(1).clamp(min=TINY)
        found.append(2 * (largest * torch.linalg.vector_norm(half / largest.unsqueeze(1), dim=1)))
    return torch.cat(found)


def by_scale(reply: Tree) -> dict[str, dict[str, Tensor]]:
    """Path -> floating leaves, grouped by scale: the model's parameters, its buffers, and each other entry."""
    found: dict[str, dict[str, Tensor]] = {}
    for path, leaf in tree.flatten(reply).items():
        if leaf.is_floating_point() and leaf.numel():
            parts = path.split(tree.SEPARATOR)
            name = tree.SEPARATOR.join(parts[:2] if parts[0] == "model" and len(parts) > 2 else parts[:1])
            found.setdefault(name, {})[path] = leaf
    return found


def quick_lengths(leaves: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """[m] `quick` of every leaf, by path, fetched in one transfer; remote rows are not fetched."""
    near = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, RemoteTensor)}
    far = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, RemoteTensor)}
    known = {path: leaf.lengths for path, leaf in far.items() if leaf.lengths is not None}
    unknown = {path: leaf for path, leaf in far.items() if path not in known}
    found = {path: quick(leaf) for path, leaf in near.items()}
    found |= dict(zip(unknown, each(quick, list(unknown.values()))))
    if not found:
        return known
    fetched = torch.cat(list(found.values())).cpu().double().numpy()
    ends = np.cumsum([len(part) for part in found.values()])
    return {**known, **dict(zip(found, np.split(fetched, ends[:-1])))}


def exact_lengths(leaves: Sequence[Tensor], starts: Sequence[Tensor] | None = None) -> np.ndarray:
    """[m] the norm of each row over all leaves, minus `starts` if given: infinite beyond float64."""
    starts = [torch.zeros((), dtype=torch.float64, device=leaf.device) for leaf in leaves] if starts is None else starts
    return together([part.cpu().numpy() for part in each(exact, leaves, starts)])


def together(parts: Sequence[np.ndarray]) -> np.ndarray:
    """[m] the norm over several leaves from the norms of each, without overflow."""
    stacked = np.stack(list(parts))  # [L, m]
    largest = stacked.max(0)
    with np.errstate(invalid="ignore", over="ignore"):
        length = largest * np.sqrt(np.square(stacked / np.maximum(largest, TINY)).sum(0))
    return np.where(np.isfinite(stacked).all(0), length, np.where(np.isnan(stacked).any(0), np.nan, np.inf))
