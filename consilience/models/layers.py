"""Layers that several models share: normalisation by name, dropout that is absent at rate 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import nn

Norm = Literal["batch", "group"]
Stem = Literal["imagenet", "cifar"]


def normalisation(norm: Norm, groups: int) -> Callable[[int], nn.Module]:
    """`channels -> layer`; group norm takes `groups` groups, or as many below as fit the channels evenly.

    A group keeps two channels or more: one would be instance norm, which sets 1 x 1 feature maps to zero.
    """
    if norm == "batch":
        return nn.BatchNorm2d

    def group_norm(channels: int) -> nn.Module:
        most = min(groups, max(channels // 2, 1))
        return nn.GroupNorm(next(g for g in range(most, 0, -1) if channels % g == 0), channels)

    return group_norm


def stem_layers(stem: Stem, channels: int, width: int) -> tuple[nn.Conv2d, nn.Module]:
    """(convolution, pooling); "cifar": small pictures keep their resolution up to the first stage."""
    if stem == "imagenet":
        return nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False), nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.Identity()


def dropout(rate: float) -> nn.Module:
    """A dropout layer, or nothing at rate 0, so that engines see no random layer where there is none."""
    return nn.Dropout(rate) if rate > 0 else nn.Identity()


def initialise_convolutions(model: nn.Module, mode: Literal["fan_in", "fan_out"]) -> None:
    """He et al. 2015: normal weights with variance 2 / fan."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
