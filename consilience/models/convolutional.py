"""The small convolutional network of the usual benchmarks: two convolutions, two dense layers."""

from __future__ import annotations

from itertools import count
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core.settings import Count, Decay, Invalid
from consilience.models.arguments import Shape, factory, picture_shape
from consilience.models.layers import dropout as dropout_layer

Padding = Literal["valid", "same"]
Pooling = Literal["last", "each"]


class ConvolutionalNetwork(nn.Module):
    """conv, conv, max-pool, dense, linear head; dropout before the head, at half its rate after pooling."""

    def __init__(
        self,
        *,
        inputs: tuple[int, int, int],
        classes: int,
        channels: tuple[int, int],
        kernel: int,
        hidden: int,
        padding: Padding,
        pooling: Pooling,
        dropout: float,
    ) -> None:
        super().__init__()
        first, second = channels
        border = kernel // 2 if padding == "same" else 0
        height, width = (_side_after(side, kernel, padding, pooling) for side in inputs[1:])
        self.conv1 = nn.Conv2d(inputs[0], first, kernel, padding=border)
        self.pool1 = nn.MaxPool2d(2) if pooling == "each" else nn.Identity()
        self.conv2 = nn.Conv2d(first, second, kernel, padding=border)
        self.pool2 = nn.MaxPool2d(2)
        self.dropout1 = dropout_layer(dropout / 2)
        self.dense = nn.Linear(second * height * width, hidden)
        self.dropout2 = dropout_layer(dropout)
        self.head = nn.Linear(hidden, classes)

    def features(self, x: Tensor) -> Tensor:
        """[n, channels, height, width] -> [n, hidden]"""
        x = self.pool1(F.relu(self.conv1(x)))
        x = self.pool2(F.relu(self.conv2(x)))
        x = self.dropout1(x).flatten(1)  # [n, second channels * height * width]
        return self.dropout2(F.relu(self.dense(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@factory
def cnn(
    *,
    inputs: Shape,
    classes: Count,
    channels: tuple[Count, Count] = (32, 64),
    kernel: Count = 3,
    hidden: Count = 128,
    padding: Padding = "valid",
    pooling: Pooling = "last",
    dropout: Decay = 0.0,
) -> nn.Module:
    """Two convolutions, max-pool, two dense layers (1,199,882 parameters on 28 x 28 x 1 with 10 classes).

    `dropout` acts before the head and at half its rate after pooling: 0.5 gives the usual 0.25 / 0.5.
    McMahan et al. 2017: kernel=5, hidden=512, padding="same", pooling="each" (1,663,370 parameters).
    """
    if padding == "same" and kernel % 2 == 0:
        raise Invalid(f"cnn.kernel = {kernel} cannot be centred: padding='same' needs an odd kernel")
    least = next(side for side in count(1) if _side_after(side, kernel, padding, pooling) >= 1)
    hint = f" with kernel={kernel}: take a smaller kernel or padding='same'" if padding == "valid" else ""
    shape = picture_shape("cnn", inputs, least, hint)
    return ConvolutionalNetwork(
        inputs=shape,
        classes=classes,
        channels=channels,
        kernel=kernel,
        hidden=hidden,
        padding=padding,
        pooling=pooling,
        dropout=dropout,
    )


def _side_after(side: int, kernel: int, padding: Padding, pooling: Pooling) -> int:
    """Height or width behind both convolutions and the pooling; below 1 when the picture is too small."""
    lost = kernel - 1 if padding == "valid" else 0
    after_first = (side - lost) // (2 if pooling == "each" else 1)
    return (after_first - lost) // 2
