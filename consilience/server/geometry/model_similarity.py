"""Similarity of whole models: a metric on each layer's weight matrix, then a mean over the layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from consilience.core.settings import Invalid, NonNegative, OnlyWith, Positive, Probability, check
from consilience.core.tree import Tree
from consilience.server.geometry.similarity import Eigenvalues, Metric, between


@runtime_checkable
class ModelSimilarity(Protocol):
    """Computes pairwise similarities of m models."""

    def compare(self, models: Tree, ancestor: Tree) -> Tensor:
        """[m, m] float64, larger for more alike, of parameters stacked [m, ...]; all started from `ancestor`."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """A similarity that declares whether its values are bounded."""

    @property
    def bounded(self) -> bool:
        """Whether every value between two models lies in [-1, 1]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Layerwise:
    """The mean over weight matrices of a metric; `layers` weights them: equally, by size, or by given numbers.

    With `cross` > 0 that share of the value is the mean over pairs of different layers with matrices of equal height.
    `bandwidth` and `offdiag` are for `cka_rbf`, `negative_eigenvalues` of residual kernels for `cka_deconfounded`.
    """

    metric: Metric = "cka_linear"
    layers: Literal["uniform", "by_size"] | tuple[NonNegative, ...] = "uniform"
    cross: Probability = 0.0
    bandwidth: Annotated[Positive, OnlyWith("metric", ("cka_rbf",))] = 0.5
    offdiag: Annotated[bool, OnlyWith("metric", ("cka_rbf",))] = False
    negative_eigenvalues: Annotated[Eigenvalues, OnlyWith("metric", ("cka_deconfounded",))] = "remove"

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.layers, tuple) and not sum(self.layers) > 0:
            raise Invalid(f"Layerwise.layers = {self.layers!r} gives no layer any weight: make one of them positive")
        if self.cross and self.metric == "cka_deconfounded":
            raise Invalid(
                "Layerwise.cross is incompatible with cka_deconfounded: two different layers have no ancestor in common"
            )

    @property
    def bounded(self) -> bool:
        """All metrics but HSIC and OSAD are normalised."""
        return self.metric not in ("hsic", "osad")

    def compare(self, models: Tree, ancestor: Tree) -> Tensor:
        """[m, m] over the layers."""
        stacks = matrices(models)
        origins = matrices({name: value.unsqueeze(0) for name, value in ancestor.items()})
        weights = self._weights(stacks)
        own = [self._between([stack], origins[name][0])[0, 0] for name, stack in stacks.items()]
        value = sum(weight * one for weight, one in zip(weights, own))
        if not self.cross:
            return torch.as_tensor(value)
        return (1 - self.cross) * value + self.cross * self._across(stacks)

    def _between(self, stacks: list[Tensor], origin: Tensor | None = None) -> Tensor:
        confounder = origin if self.metric == "cka_deconfounded" else None
        return between(
            self.metric,
            stacks,
            confounder=confounder,
            bandwidth=self.bandwidth,
            offdiag=self.offdiag,
            negative_eigenvalues=self.negative_eigenvalues,
        )

    def _weights(self, stacks: dict[str, Tensor]) -> list[float]:
        """One weight per layer, summing to one."""
        if self.layers == "uniform":
            given = [1.0] * len(stacks)
        elif self.layers == "by_size":
            given = [float(stack[0].numel()) for stack in stacks.values()]
        else:
            given = [float(weight) for weight in self.layers]
        if len(given) != len(stacks):
            raise Invalid(
                f"Layerwise.layers has {len(given)} weights for {len(stacks)} weight matrices: give one for each of "
                f"{', '.join(stacks)}"
            )
        return [weight / sum(given) for weight in given]

    def _across(self, stacks: dict[str, Tensor]) -> Tensor:
        """[m, m] mean over pairs of different layers, both ways round."""
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for stack in stacks.values():
            height = tuple(stack.shape[1:]) if self.metric == "osad" else (stack.shape[1],)
            groups.setdefault(height, []).append(stack)
        found: list[Tensor] = []
        for group in groups.values():
            if len(group) > 1:
                value = self._between(group)  # [s, s, m, m]
                found += [(value[a, b] + value[b, a]) / 2 for a, b in combinations(range(len(group)), 2)]
        if not found:
            what = "shape" if self.metric == "osad" else "longer side"
            raise Invalid(
                f"Layerwise.cross = {self.cross}, but no two weight matrices have the same {what}: set it to 0"
            )
        return torch.stack(found).mean(0)


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """Several similarities: their mean weighted by `weights` (equal if empty), or the lowest of them.

    Metrics have different units, so each is first scaled to [0, 1] over the given pairs: by its `range` or its `rank`
    (ties share the lowest); `none` leaves it unchanged.
    """

    parts: tuple[ModelSimilarity, ...]
    weights: Annotated[tuple[NonNegative, ...], OnlyWith("take", ("mean",))] = ()
    take: Literal["mean", "lowest"] = "mean"
    normalise: Literal["range", "rank", "none"] = "range"

    def __post_init__(self) -> None:
        check(self)
        if not self.parts:
            raise Invalid("Mixed.parts is empty: name at least one similarity")
        if self.weights and (len(self.weights) != len(self.parts) or not sum(self.weights) > 0):
            raise Invalid(f"Mixed.weights = {self.weights!r} must be {len(self.parts)} numbers, not all zero")

    @property
    def bounded(self) -> bool:
        """On [0, 1] if normalised, else if all parts are."""
        return self.normalise != "none" or all(isinstance(p, Bounded) and p.bounded for p in self.parts)

    def compare(self, models: Tree, ancestor: Tree) -> Tensor:
        """[m, m] over the parts."""
        values = torch.stack([self._scaled(part.compare(models, ancestor)) for part in self.parts])
        if self.take == "lowest":
            return values.amin(0)
        weights = torch.tensor(self.weights or (1.0,) * len(self.parts), dtype=torch.float64, device=values.device)
        return torch.einsum("s,sij->ij", weights / weights.sum(), values)

    def _scaled(self, value: Tensor) -> Tensor:
        pairs = torch.triu_indices(len(value), len(value), 1, device=value.device)
        if self.normalise == "none" or pairs.shape[1] == 0:
            return value
        among = value[pairs[0], pairs[1]]
        if self.normalise == "rank":
            ordered = among.sort().values
            rank = torch.searchsorted(ordered, value.contiguous()).to(torch.float64)
            return (rank / max(1, len(among) - 1)).clamp(max=1)
        low, high = among.amin(), among.amax()
        return torch.where(high > low, (value - low) / torch.where(high > low, high - low, 1), 0.0)


def matrices(stacked: Tree) -> dict[str, Tensor]:
    """Weights [m, out, ...] as tall matrices [m, n, p], n >= p; vectors and scalars are left out."""
    found = {}
    for name, value in stacked.items():
        if value.dim() >= 3 and value.numel():  # the first axis counts models
            matrix = value.reshape(len(value), value.shape[1], -1).to(torch.float64)
            # Paper: which side are "examples" is not said. Here: the longer one, because with rows = outputs of a wide
            # layer unrelated models look alike (linear CKA 0.89, CCA 1.00).
            found[name] = matrix if matrix.shape[1] >= matrix.shape[2] else matrix.mT
    if not found:
        raise Invalid("the model has no weight matrix (only vectors), so its layers cannot be compared")
    return found
