"""ResNet-20 for 32 x 32 pictures (He et al. 2016, section 4.2): 0.27 M parameters, shortcuts without any."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core.settings import Count
from consilience.models.arguments import Shape, factory, picture_shape
from consilience.models.layers import Norm, initialise_convolutions, normalisation


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
def resnet20(*, inputs: Shape, classes: Count, norm: Norm = "batch", groups: Count = 8) -> nn.Module:
    """The CIFAR ResNet-20 (269,722 parameters with 3 channels and 10 classes)."""
    channels, _, _ = picture_shape("resnet20", inputs)
    return SmallResidualNetwork(channels=channels, classes=classes, norm=normalisation(norm, groups))
