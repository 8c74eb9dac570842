"""Random picture augmentation in training, drawn from the step's key: the same in every lane and on every device."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core import rng
from consilience.core.settings import Invalid

LAYER = 2**40  # a stream of its own, different from those of dropout layers
GREY = (0.299, 0.587, 0.114)


class Augment(nn.Module):
    """Flips, recolours and rotates pictures [n, 3, height, width] with values in [0, 1]; the identity in evaluation.

    Each row draws for itself: mirrored with probability `flip`; brightness, contrast and saturation each times a
    factor in 1 +- `jitter`; turned by an angle within +- `rotation` degrees, the corners black.
    """

    key: Tensor | None
    keyed = True  # `Task` fills `key` in every training step

    def __init__(self, *, flip: float = 0.5, jitter: float = 0.2, rotation: float = 15.0) -> None:
        super().__init__()
        self.flip, self.jitter, self.rotation = flip, jitter, rotation
        self.register_buffer("key", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.key is None:
            raise Invalid("a model that varies pictures was trained without a key: pass Task.apply(..., key=batch.key)")
        rows = rng.fold(rng.fold(self.key, LAYER), torch.arange(len(x), device=x.device))
        draws = rng.uniforms(rows, 5).to(x.dtype)  # [n, 5] in [0, 1)
        mirrored, light, contrast, colour, turn = draws.unbind(1)
        if self.flip:
            x = torch.where(_per_row(mirrored < self.flip), x.flip(-1), x)
        if self.jitter:
            x = _recoloured(x, *(_per_row(1 + self.jitter * (2 * draw - 1)) for draw in (light, contrast, colour)))
        if self.rotation:
            x = _turned(x, math.radians(self.rotation) * (2 * turn - 1))
        return x

    def extra_repr(self) -> str:
        return f"flip={self.flip}, jitter={self.jitter}, rotation={self.rotation}"


def _per_row(values: Tensor) -> Tensor:
    return values.reshape(-1, 1, 1, 1)


def _recoloured(x: Tensor, light: Tensor, contrast: Tensor, colour: Tensor) -> Tensor:
    """Brightness, contrast around the mean grey, saturation around each pixel's grey; kept within [0, 1]."""
    x = (x * light).clamp(0, 1)
    middle = _grey(x).mean((1, 2, 3), keepdim=True)
    x = (middle + contrast * (x - middle)).clamp(0, 1)
    grey = _grey(x)
    return (grey + colour * (x - grey)).clamp(0, 1)


def _grey(x: Tensor) -> Tensor:
    """[n, channels, h, w] -> [n, 1, h, w]"""
    if x.shape[1] != len(GREY):
        return x.mean(1, keepdim=True)
    return sum((share * x[:, k : k + 1] for k, share in enumerate(GREY)), torch.zeros_like(x[:, :1]))


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    """Turned about the centre by each row's angle, bilinear."""
    height, width = x.shape[-2:]
    down = torch.linspace(-1 + 1 / height, 1 - 1 / height, height, dtype=x.dtype, device=x.device)[:, None] * height
    right = torch.linspace(-1 + 1 / width, 1 - 1 / width, width, dtype=x.dtype, device=x.device) * width
    cos, sin = (part(angle).reshape(-1, 1, 1) for part in (torch.cos, torch.sin))
    # in pixels, so that the turn is rigid whatever the shape of the picture; then back to grid_sample's [-1, 1]
    where = torch.stack([(cos * right - sin * down) / width, (sin * right + cos * down) / height], -1)  # [n, h, w, 2]
    return F.grid_sample(x, where, mode="bilinear", padding_mode="zeros", align_corners=False)
