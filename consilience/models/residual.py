"""ResNet-18, -34 and -50 (He et al. 2016), layout and names as torchvision's, `fc` called `head`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core.settings import Count, OnlyWith
from consilience.models.arguments import Shape, factory, picture_shape
from consilience.models.layers import Norm, Stem, initialise_convolutions, normalisation, stem_layers

MakeNorm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int, norm: MakeNorm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm(width)
        self.downsample = _shortcut(before, width * self.expansion, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride, as torchvision has it) and 1 x 1 convolutions and a shortcut."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int, norm: MakeNorm) -> None:
        super().__init__()
        after = width * self.expansion
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.bn3 = norm(after)
        self.downsample = _shortcut(before, after, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


Block = type[BasicBlock] | type[Bottleneck]


class ResidualNetwork(nn.Module):
    """Stem, four stages of residual blocks (each doubling the channels), mean over space, linear head."""

    def __init__(
        self,
        block: Block,
        depths: tuple[int, int, int, int],
        channels: int,
        classes: int,
        stem: Stem,
        norm: MakeNorm,
        width: int,
    ) -> None:
        super().__init__()
        self.conv1, self.maxpool = stem_layers(stem, channels, width)
        self.bn1 = norm(width)
        after = width * block.expansion
        self.layer1 = _stage(block, width, width, depths[0], 1, norm)
        self.layer2 = _stage(block, after, 2 * width, depths[1], 2, norm)
        self.layer3 = _stage(block, 2 * after, 4 * width, depths[2], 2, norm)
        self.layer4 = _stage(block, 4 * after, 8 * width, depths[3], 2, norm)
        self.head = nn.Linear(8 * after, classes)
        initialise_convolutions(self, "fan_out")

    def features(self, x: Tensor) -> Tensor:
        """[n, channels, height, width] -> [n, 8 * width * expansion]"""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean((-2, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@factory
def resnet18(
    *,
    inputs: Shape,
    classes: Count,
    stem: Stem = "imagenet",
    norm: Norm = "batch",
    groups: Annotated[Count, OnlyWith("norm", ("group",))] = 32,
    width: Count = 64,
) -> nn.Module:
    """ResNet-18; stem="cifar" for small pictures, norm="group" where clients' batch statistics differ."""
    channels, _, _ = picture_shape("resnet18", inputs)
    return ResidualNetwork(BasicBlock, (2, 2, 2, 2), channels, classes, stem, normalisation(norm, groups), width)


@factory
def resnet34(
    *,
    inputs: Shape,
    classes: Count,
    stem: Stem = "imagenet",
    norm: Norm = "batch",
    groups: Annotated[Count, OnlyWith("norm", ("group",))] = 32,
    width: Count = 64,
) -> nn.Module:
    """ResNet-34; options as for resnet18."""
    channels, _, _ = picture_shape("resnet34", inputs)
    return ResidualNetwork(BasicBlock, (3, 4, 6, 3), channels, classes, stem, normalisation(norm, groups), width)


@factory
def resnet50(
    *,
    inputs: Shape,
    classes: Count,
    stem: Stem = "imagenet",
    norm: Norm = "batch",
    groups: Annotated[Count, OnlyWith("norm", ("group",))] = 32,
    width: Count = 64,
) -> nn.Module:
    """ResNet-50 (bottleneck blocks); options as for resnet18."""
    channels, _, _ = picture_shape("resnet50", inputs)
    return ResidualNetwork(Bottleneck, (3, 4, 6, 3), channels, classes, stem, normalisation(norm, groups), width)


def _stage(block: Block, before: int, width: int, depth: int, stride: int, norm: MakeNorm) -> nn.Sequential:
    first = block(before, width, stride, norm)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1, norm) for _ in range(depth - 1)))


def _shortcut(before: int, after: int, stride: int, norm: MakeNorm) -> nn.Module:
    if stride == 1 and before == after:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))


class PaddedBlock(nn.Module):
    """Two 3 x 3 convolutions; a shrinking shortcut takes every second pixel and pads channels (option A)."""

    def __init__(self, before: int, after: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stride = 1 if before == after else 2
        self.missing = (after - before) // 2  # channels of zeros on either side
        self.conv1 = nn.Conv2d(before, after, 3, self.stride, padding=1, bias=False)
        self.bn1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = norm(after)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.stride == 2:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.missing, self.missing))
        return F.relu(y + x)


class SmallResidualNetwork(nn.Module):
    """3 x 3 stem, three stages of three blocks with 16, 32 and 64 channels, mean over space, linear head."""

    def __init__(self, *, channels: int, classes: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = norm(16)
        self.layer1 = nn.Sequential(*(PaddedBlock(16, 16, norm) for _ in range(3)))
        self.layer2 = nn.Sequential(PaddedBlock(16, 32, norm), *(PaddedBlock(32, 32, norm) for _ in range(2)))
        self.layer3 = nn.Sequential(PaddedBlock(32, 64, norm), *(PaddedBlock(64, 64, norm) for _ in range(2)))
        self.head = nn.Linear(64, classes)
        initialise_convolutions(self, "fan_out")

    def features(self, x: Tensor) -> Tensor:
        """[n, channels, height, width] -> [n, 64]"""
        x = F.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x))).mean((-2, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@factory
def resnet20(
    *, inputs: Shape, classes: Count, norm: Norm = "batch", groups: Annotated[Count, OnlyWith("norm", ("group",))] = 8
) -> nn.Module:
    """The CIFAR ResNet-20 (269,722 parameters with 3 channels and 10 classes)."""
    channels, _, _ = picture_shape("resnet20", inputs)
    return SmallResidualNetwork(channels=channels, classes=classes, norm=normalisation(norm, groups))
