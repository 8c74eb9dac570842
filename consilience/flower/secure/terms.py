"""What both sides of a secure sum agree on, and the one vector that a reply becomes before it is masked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.settings import Invalid, Positive, Range, check
from consilience.core.tree import Tree
from consilience.wire.template import Template

MODULUS = 1 << 32  # what masks are drawn from: Flower's largest
FEWEST = 3  # nodes: in a sum of two, each knows the other's part
EXPERIMENTAL = (
    "EXPERIMENTAL: secure sums. Flower draws its masks from a generator with a seed of 32 bits (flwr issue 7522), "
    "which a determined server can search: until that is fixed, they do not hide replies from an attacker"
)

Levels = Annotated[int, Range(least=256, most=1 << 30)]
Share = Annotated[float, Range(least=0.5, below=1)]


@dataclass(frozen=True, kw_only=True)
class SecureTerms:
    """How replies are weighed, clipped and rounded to whole numbers, and how many nodes it takes to unmask a sum.

    threshold: more than this share of the nodes. With half of them or fewer, a server that tells some that a client is
    gone and others that it is there could take off both of its masks.
    """

    weights: Literal["examples", "uniform"] = "examples"
    clip: Positive = 8.0
    levels: Levels = 1 << 22
    threshold: Share = 0.5

    def __post_init__(self) -> None:
        check(self)

    @property
    def step(self) -> float:
        """Between two levels: no contribution is off by more."""
        return 2 * self.clip / self.levels

    def needed(self, nodes: int) -> int:
        """How many of so many nodes must stay to the end."""
        return math.floor(self.threshold * nodes) + 1

    def weight(self, examples: int) -> int:
        """How much a reply counts."""
        return int(examples) if self.weights == "examples" else 1


@dataclass(frozen=True)
class VectorLayout:
    """Where the floating values of a reply lie in the vector: one tensor after another, by path; counters stay out."""

    template: Template

    def __post_init__(self) -> None:
        for path in self.counters:
            shape = self.template.leaves[path].shape
            if math.prod(shape) != 1:
                raise Invalid(
                    f"{path} holds whole numbers or flags, shape {shape}: they cannot be summed, and only single "
                    "counters are sent in clear. deploy.secure_aggregation = true is not for this model"
                )

    @property
    def floating(self) -> list[str]:
        """The paths whose values are in the vector."""
        return sorted(path for path, leaf in self.template.leaves.items() if leaf.dtype.is_floating_point)

    @property
    def counters(self) -> list[str]:
        """The paths of single whole numbers and flags."""
        return sorted(path for path, leaf in self.template.leaves.items() if not leaf.dtype.is_floating_point)

    @property
    def length(self) -> int:
        """Values in the vector."""
        return sum(math.prod(self.template.leaves[path].shape) for path in self.floating)

    def vector(self, reply: Tree, received: Tree) -> np.ndarray:
        """[P] float64: the reply minus what was received, where the same tensor was; else its values."""
        flat, anchors = tree.flatten(reply), self._anchors(received)
        parts = []
        for path in self.floating:
            value = flat[path].detach().to("cpu", torch.float64)
            parts.append((value - anchors[path] if path in anchors else value).reshape(-1))
        return torch.cat(parts).numpy() if parts else np.empty(0)

    def replies(self, mean: np.ndarray, received: Tree, counters: Sequence[Mapping[str, int]]) -> Tree:
        """Stacked [m, ...]: the mean in place of every reply, so that any weights return it; counters are per client.

        Floating leaves are one row in memory, expanded.
        """
        anchors, flat, place = self._anchors(received), {}, 0
        for path in self.floating:
            shape, dtype = self.template.leaves[path]
            value = torch.from_numpy(mean[place : place + math.prod(shape)]).reshape(shape)
            place += math.prod(shape)
            flat[path] = (value + anchors[path] if path in anchors else value).to(dtype)
        for path in self.counters:
            flat[path] = _whole(counters[0][path], *self.template.leaves[path])
        one = self.template.check(tree.unflatten(flat))
        stacked = tree.map_leaves(lambda leaf: leaf.expand(len(counters), *leaf.shape), one)
        for path in self.counters:
            *parents, last = path.split(tree.SEPARATOR)
            node = stacked
            for parent in parents:
                node = node[parent]
            node[last] = torch.stack([_whole(each[path], *self.template.leaves[path]) for each in counters])
        return stacked

    def _anchors(self, received: Tree) -> dict[str, Tensor]:
        """What was received of the tensors that replies hold, in float64."""
        return {
            path: leaf.detach().to("cpu", torch.float64)
            for path, leaf in tree.flatten(received).items()
            if path in self.template.leaves and self.template.leaves[path].shape == tuple(leaf.shape)
        }


def _whole(value: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.tensor(value).to(dtype).reshape(shape)
