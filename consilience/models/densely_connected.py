"""DenseNet-121 (Huang et al. 2017), names as torchvision's less `features.`, `classifier` called `head`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core.settings import Count, OnlyWith
from consilience.models.arguments import Shape, factory, picture_shape
from consilience.models.layers import Norm, Stem, initialise_convolutions, normalisation, stem_layers

MakeNorm = Callable[[int], nn.Module]
BOTTLENECK = 4  # bottleneck width of a layer, in multiples of the growth rate


class DenseLayer(nn.Module):
    """norm, ReLU, 1 x 1, norm, ReLU, 3 x 3: `growth` new channels."""

    def __init__(self, before: int, growth: int, norm: MakeNorm) -> None:
        super().__init__()
        self.norm1 = norm(before)
        self.conv1 = nn.Conv2d(before, BOTTLENECK * growth, 1, bias=False)
        self.norm2 = norm(BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(x)))


class DenseBlock(nn.Module):
    """Each layer reads the block's input and the outputs of all layers before it."""

    def __init__(self, before: int, depth: int, growth: int, norm: MakeNorm) -> None:
        super().__init__()
        for i in range(depth):
            self.add_module(f"denselayer{i + 1}", DenseLayer(before + i * growth, growth, norm))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.cat((x, layer(x)), 1)  # [n, before + i * growth, height, width]
        return x


class Transition(nn.Module):
    """Half the channels, half the resolution."""

    def __init__(self, before: int, norm: MakeNorm) -> None:
        super().__init__()
        self.norm = norm(before)
        self.conv = nn.Conv2d(before, before // 2, 1, bias=False)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(F.relu(self.norm(x))))


class DenselyConnectedNetwork(nn.Module):
    """Stem, dense blocks with transitions between them, norm, mean over space, linear head."""

    def __init__(
        self, depths: tuple[int, ...], *, channels: int, classes: int, stem: Stem, norm: MakeNorm, growth: int
    ) -> None:
        super().__init__()
        width = 2 * growth
        self.conv0, self.pool0 = stem_layers(stem, channels, width)
        self.norm0 = norm(width)
        stages: list[str] = []
        for i, depth in enumerate(depths, start=1):
            if i > 1:
                self.add_module(f"transition{i - 1}", Transition(width, norm))
                stages.append(f"transition{i - 1}")
                width //= 2
            self.add_module(f"denseblock{i}", DenseBlock(width, depth, growth, norm))
            stages.append(f"denseblock{i}")
            width += depth * growth
        self.stages = tuple(stages)
        self.norm5 = norm(width)
        self.head = nn.Linear(width, classes)
        initialise_convolutions(self, "fan_in")
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        """[n, channels, height, width] -> [n, channels of the last block]"""
        x = self.pool0(F.relu(self.norm0(self.conv0(x))))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return F.relu(self.norm5(x)).mean((-2, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@factory
def densenet121(
    *,
    inputs: Shape,
    classes: Count,
    stem: Stem = "imagenet",
    norm: Norm = "batch",
    groups: Annotated[Count, OnlyWith("norm", ("group",))] = 32,
    growth: Count = 32,
) -> nn.Module:
    """DenseNet-121; stem="cifar" for small pictures, norm="group" where batch statistics differ."""
    # Three transitions halve the picture: the stem, which quarters it (rounding up), must leave 8 pixels.
    least, hint = (29, ' with stem="imagenet": take stem="cifar"') if stem == "imagenet" else (8, "")
    channels, _, _ = picture_shape("densenet121", inputs, least, hint)
    return DenselyConnectedNetwork(
        (6, 12, 24, 16),
        channels=channels,
        classes=classes,
        stem=stem,
        norm=normalisation(norm, groups),
        growth=growth,
    )
