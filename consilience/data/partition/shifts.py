"""Feature shifts of one client: rotated pictures, noise, a missing modality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.settings import Checked, Invalid, NonNegative
from consilience.models.modalities import PRESENT, modality_names


@dataclass(frozen=True, kw_only=True)
class Rotation(Checked):
    """Every picture `[n, channels, height, width]` turned counter-clockwise by `angle` degrees."""

    angle: float

    def fits(self, leaf: Tensor) -> bool:
        """Whether the tensor holds pictures."""
        return leaf.dim() == 4

    def __call__(self, x: Tensor, rng: np.random.Generator) -> Tensor:
        quarters = self.angle / 90
        if quarters == round(quarters):
            return self._quarter_turns(x, round(quarters) % 4)
        if not x.is_floating_point():
            raise Invalid(f"angle = {self.angle:g} needs pictures in floating point, not {x.dtype}: steps of 90 do not")
        height, width = x.shape[-2:]
        c, s = math.cos(math.radians(self.angle)), math.sin(math.radians(self.angle))
        # Output to input, in coordinates from -1 to 1 along both sides: hence the ratios of the sides.
        theta = torch.tensor([[c, -s * height / width, 0.0], [s * width / height, c, 0.0]], dtype=x.dtype)
        grid = torch.nn.functional.affine_grid(theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        # The border is repeated outwards: zero need not be the background of normalised pictures.
        return torch.nn.functional.grid_sample(x, grid, padding_mode="border", align_corners=False)

    def _quarter_turns(self, x: Tensor, quarters: int) -> Tensor:
        if quarters % 2 and x.shape[-1] != x.shape[-2]:
            raise Invalid(
                f"angle = {self.angle:g} turns pictures of {x.shape[-2]} x {x.shape[-1]} into another shape: "
                f"pad them square, or use steps of 180"
            )
        return torch.rot90(x, quarters, dims=(-2, -1))


@dataclass(frozen=True, kw_only=True)
class Noise(Checked):
    """Gaussian noise of standard deviation `sigma` on every floating feature."""

    sigma: NonNegative

    def fits(self, leaf: Tensor) -> bool:
        """Whether noise can be added to the tensor."""
        return leaf.is_floating_point()

    def __call__(self, x: Tensor, rng: np.random.Generator) -> Tensor:
        noise = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32))
        return x + self.sigma * noise.to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Missing(Checked):
    """A modality that the client lacks: its values become 0, and so does its column of the mask "present"."""

    modality: str

    def __call__(self, x: Any) -> Any:
        """{name: [n, ...]} with "present" [n, modalities]; a row that would have no modality left is refused."""
        names = modality_names(x) if isinstance(x, Mapping) else ()
        if self.modality not in names:
            known = f"the modalities are {', '.join(names)}" if names else "the rows have one part only"
            raise Invalid(f"missing_modality.modality = {self.modality!r} is not in the data: {known}")
        if PRESENT not in x:
            raise Invalid(
                f"missing_modality needs rows that say which modalities they have (x[{PRESENT!r}]), and these do not: "
                f"load them with the data set multimodal, or crisismmd with mask = true"
            )
        present = x[PRESENT].clone()
        present[:, names.index(self.modality)] = 0
        bare = torch.nonzero(present.sum(1) == 0).flatten().tolist()
        if bare:
            raise Invalid(
                f"without {self.modality!r} a client would have {len(bare)} rows with no modality at all: leave "
                f"{self.modality!r} to it, or drop these rows from the file"
            )
        return {**x, self.modality: torch.zeros_like(x[self.modality]), PRESENT: present}


Shift = Rotation | Noise | Missing


def apply(shift: Shift, x: Any, rng: np.random.Generator) -> Any:
    """Apply `shift` to every tensor of a tree that it fits; a tree without such a tensor is an error."""
    if isinstance(shift, Missing):
        return shift(x)
    leaves = list(tree.leaves(x))
    if not any(shift.fits(leaf) for leaf in leaves):
        wanted = "pictures [n, channels, height, width]" if isinstance(shift, Rotation) else "floating-point features"
        shapes = ", ".join(f"{leaf.dtype} {list(leaf.shape)}" for leaf in leaves)
        raise Invalid(f"{shift!r} needs {wanted}, but the data are {shapes}")
    return tree.map_leaves(lambda leaf: shift(leaf, rng) if shift.fits(leaf) else leaf, x)
