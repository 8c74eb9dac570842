"""Rows without labels that a server has: from a file, from Python, or noise."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from consilience.core import rng
from consilience.core.settings import Checked, Count, Invalid, Positive, check
from consilience.core.tree import Tree


@runtime_checkable
class PublicRows(Protocol):
    """Where a server has rows from."""

    def public_rows(self, params: Tree, seed: int) -> Tensor:
        """[n, ...] inputs for a model with these parameters, the same in every round."""
        ...


@dataclass(frozen=True, kw_only=True)
class FileRows:
    """The array [n, ...] in an .npy file, prepared as the clients' inputs are (same shape, same scale)."""

    path: str

    def __post_init__(self) -> None:
        check(self)
        if Path(self.path).suffix != ".npy" or not os.path.isfile(self.path):
            raise Invalid(f"FileRows.path = {self.path!r} is not an .npy file that exists: write one with numpy.save")

    def public_rows(self, params: Tree, seed: int) -> Tensor:
        """What the file holds."""
        try:
            found = np.load(self.path, allow_pickle=False)
        except (ValueError, OSError) as problem:
            raise Invalid(f"FileRows.path = {self.path!r} is not a plain .npy array: {problem}") from problem
        return _usable(torch.from_numpy(np.ascontiguousarray(found)), params)


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenRows:
    """A tensor [n, ...] from Python."""

    x: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.x, Tensor):
            raise Invalid(f"GivenRows.x = {self.x!r} must be a tensor of rows")

    def public_rows(self, params: Tree, seed: int) -> Tensor:
        """The tensor."""
        return _usable(self.x, params)


@dataclass(frozen=True, kw_only=True)
class NoiseRows(Checked):
    """Gaussian noise, for trying things out; rows of other than dense models need `shape`, such as [1, 28, 28]."""

    count: Count = 1000
    shape: tuple[Count, ...] | None = None
    scale: Positive = 1.0

    def public_rows(self, params: Tree, seed: int) -> Tensor:
        """Drawn from the run's seed."""
        first = next(iter(params.values()))
        if self.shape is None and first.dim() != 2:
            raise Invalid("NoiseRows.shape is missing: say what one row looks like, such as shape = [1, 28, 28]")
        shape = self.shape or (first.shape[1],)
        key = torch.tensor(rng.key(seed, "public rows"), device=first.device)
        return _usable(self.scale * rng.normals(key, self.count * math.prod(shape)).reshape(self.count, *shape), params)


def _usable(x: Tensor, params: Tree) -> Tensor:
    """Beside the model, in its floating type."""
    if not len(x) or x.dim() < 2:
        raise Invalid(f"public rows must be [n, ...] with at least one row, not of shape {list(x.shape)}")
    first = next(iter(params.values()))
    if not x.is_floating_point():  # token numbers
        return x.to(first.device)
    if not bool(x.isfinite().all()):
        raise Invalid("public rows hold NaN or infinite values: clean them first")
    return x.to(first.device, first.dtype)
