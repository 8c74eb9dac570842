"""Euclidean norms of the rows of stacked trees: a fast version, and an exact one that cannot overflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.remote import RemoteTensor, each
from consilience.core.tree import Tree

BLOCK = 2**24  # values copied to float64 at a time
TINY = 1e-300
MOST_ELSE = 4  # a block of memory is measured whole if it is at most this many times as large as its leaves


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
            name, _, rest = path.partition(tree.SEPARATOR)
            if name == "model":
                kind, inside, _ = rest.partition(tree.SEPARATOR)
                name = f"{name}{inside}{kind}" if inside else name
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


class NormTest:
    """A test of the norms of groups of tensors, which the device computes in a few fused operations.

    A norm is not finite if a square is not; narrow types are squared in float32. Tensors that several groups hold are
    measured once. `values`, on the device, may be fetched together with other values.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], accepts: Callable[[np.ndarray], bool]) -> None:
        kinds: dict[torch.dtype, dict[int, Tensor]] = {}
        for leaf in (leaf for group in groups for leaf in group):
            kinds.setdefault(leaf.dtype, {})[id(leaf)] = leaf
        norms = [
            torch.stack(torch._foreach_norm(list(some.values()), 2, dtype=torch.float32 if kind.itemsize < 4 else kind))
            for kind, some in kinds.items()
        ]
        self.values = torch.cat([norm.double() for norm in norms]).detach()  # [n]
        place = {name: at for at, name in enumerate(name for some in kinds.values() for name in some)}
        self._places = [[place[id(leaf)] for leaf in group] for group in groups]
        self._accepts = accepts  # of the groups' norms
        self.lengths = np.empty(0)  # [g] the groups' norms, once they are known

    def passes(self, values: np.ndarray | None = None) -> bool:
        """The outcome; the host waits for the device unless the values are given as fetched."""
        squares = np.square(self.values.cpu().numpy() if values is None else values)
        self.lengths = np.sqrt([sum(squares[at] for at in places) for places in self._places])
        return self._accepts(self.lengths)


def sources(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The blocks of memory that the leaves are views of, where they hold little else; otherwise the leaves.

    The norm of a block bounds those of its leaves: a GPU measures one block faster than a hundred tensors.
    """
    blocks = [leaf._base for leaf in leaves]
    held: dict[int, int] = {}
    for leaf, block in zip(leaves, blocks):
        held[id(block)] = held.get(id(block), 0) + leaf.numel()
    found = {}
    for leaf, block in zip(leaves, blocks):
        source = leaf
        if block is not None and block.dtype == leaf.dtype and block.numel() <= MOST_ELSE * held[id(block)]:
            expanded = any(size > 1 and stride == 0 for size, stride in zip(leaf.shape, leaf.stride()))
            source = leaf if expanded else block
        found[id(source)] = source
    return list(found.values())


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
