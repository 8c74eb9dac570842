"""The terms of a secure sum that both sides agree on, and the vector form of a reply before masking."""

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
from consilience.privacy.noise_shares import NoiseShares
from consilience.wire.template import Template

MODULUS = 1 << 32  # what masks are drawn from: Flower's largest
FEWEST = 3  # nodes: in a sum of two, each knows the other's part
EXPERIMENTAL = (
    "EXPERIMENTAL: secure sums hide single replies from a server that follows the protocol. One that hands out keys of "
    "its own in place of the clients' could take the masks off, and nobody outside has reviewed the code"
)
UNTESTED = (
    "models are not tested: clients would report results on their own rows without noise. Give the server test rows "
    "(test() in federation.py), or agree to such reports with deploy.clear_tests = true"
)

Levels = Annotated[int, Range(least=256, most=1 << 30)]
Share = Annotated[float, Range(least=0.5, below=1)]
Neighbours = Annotated[int, Range(least=4, most=1 << 16)]


@dataclass(frozen=True, kw_only=True)
class SecureTerms:
    """How replies are weighted, clipped and rounded to whole numbers, and how many nodes are needed to unmask a sum.

    threshold: more than this share of the nodes. With half of them or fewer, a server that tells some that a client is
    gone and others that it is online could remove both of its masks. neighbours: with how many others, at random, each
    node shares its keys and masks; left out, with all. noise: what each client adds, for a sum that is private.
    clear_tests: whether clients report, without masks or noise, how a model does on their test and validation rows.
    """

    weights: Literal["examples", "uniform"] = "examples"
    clip: Positive = 8.0
    levels: Levels = 1 << 22
    threshold: Share = 0.5
    neighbours: Neighbours | None = None
    noise: NoiseShares | None = None
    clear_tests: bool = True

    def __post_init__(self) -> None:
        check(self)
        if self.neighbours is not None and self.neighbours % 2:
            raise Invalid(f"SecureTerms.neighbours = {self.neighbours} is odd: as many lie on either side of each node")
        if self.noise is not None and (self.neighbours is not None or self.weights != "uniform"):
            raise Invalid("a private sum is one of all nodes, in which each counts the same: leave neighbours out")

    @property
    def step(self) -> float:
        """The distance of two levels: the largest rounding error of a contribution."""
        return 2 * self.clip / self.levels

    def shares(self, nodes: int) -> int:
        """How many of `nodes` nodes hold a share of a node's keys, itself included."""
        return nodes if self.neighbours is None else min(nodes, self.neighbours + 1)

    def needed(self, nodes: int) -> int:
        """How many of those that hold shares of a node's keys, itself included, must stay to the end.

        With neighbours, one more than half of them and itself at least: nodes lie on a ring, and only if all on one
        side of a node leave can the ring fall apart, after which the server would see two sums.
        """
        shares = self.shares(nodes)
        return max(math.floor(self.threshold * shares) + 1, shares // 2 + 2 if shares < nodes else 0)

    def exposure(self, nodes: int, colluding: int) -> float:
        """At most this probability: some node has `needed` shares of its keys with others that help the server."""
        around, needed = self.shares(nodes) - 1, self.needed(nodes)
        ways = sum(
            math.comb(colluding, k) * math.comb(nodes - 1 - colluding, around - k) for k in range(needed, around + 1)
        )
        return min(1.0, (nodes - colluding) * ways / math.comb(nodes - 1, around))

    def weight(self, examples: int) -> int:
        """The weight of a reply."""
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
