"""Models with an output for every entry of a row: tokens of a sequence, pixels of a picture."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core.settings import Count, Decay, Invalid
from consilience.models.arguments import Shape, factory, picture_shape, require_sequence
from consilience.models.layers import dropout as dropout_layer


class _Block(nn.Module):
    """Self-attention and a dense layer, each behind a layer norm and with a residual; plain products, for vmap."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """x [n, T, d]; hidden [n or 1, T, T]: True where a place must not be looked at."""
        n, length, width = x.shape
        parts = self.attention(self.norm1(x)).reshape(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [n, heads, T, d / heads]
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        weights = scores.masked_fill(hidden.unsqueeze(1), -1e4).softmax(-1)
        seen = (weights @ value).transpose(1, 2).reshape(n, length, width)
        x = x + self.dropout(self.mixed(seen))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm2(x)))))


class TokenTransformer(nn.Module):
    """Token numbers -> embedding + places -> blocks -> a linear head at every place; token 0 is padding."""

    def __init__(
        self,
        *,
        length: int,
        vocabulary: int,
        classes: int,
        width: int,
        layers: int,
        heads: int,
        causal: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """[n, T] whole numbers -> [n, T, width]"""
        x = x.long()
        states = self.embedding(x) + self.places
        hidden = (x == 0).unsqueeze(1).expand(-1, x.shape[1], -1)
        if self.causal:
            places = torch.arange(x.shape[1], device=x.device)
            hidden = hidden | (places.unsqueeze(0) > places.unsqueeze(1))
        for block in self.blocks:
            states = block(states, hidden)
        return self.norm(states)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@factory
def token_transformer(
    *,
    inputs: Shape,
    classes: Count,
    vocabulary: Count,
    width: Count = 32,
    layers: Count = 2,
    heads: Count = 2,
    causal: bool = True,
    dropout: Decay = 0.0,
) -> nn.Module:
    """A small transformer with an output for every token: [n, T] -> [n, T, classes].

    `causal`: a place sees those before it alone, which the kind next_token needs; use false for masks and labels.
    `vocabulary` counts the tokens including 0, the padding.
    """
    require_sequence("token_transformer", inputs)
    if width % heads:
        raise Invalid(f"token_transformer.width = {width} cannot be cut into heads = {heads}: take a multiple")
    return TokenTransformer(
        length=inputs[0],
        vocabulary=vocabulary,
        classes=classes,
        width=width,
        layers=layers,
        heads=heads,
        causal=causal,
        dropout=dropout,
    )


class SmallUNet(nn.Module):
    """Two sizes of pictures: convolve, halve, convolve, double, put both together, and a 1 x 1 convolution as head."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.fine = _convolutions(channels, width)
        self.coarse = _convolutions(width, 2 * width)
        self.joined = _convolutions(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def features(self, x: Tensor) -> Tensor:
        """[n, channels, H, W] -> [n, width, H, W]"""
        fine = self.fine(x)
        coarse = self.coarse(F.max_pool2d(fine, 2)).repeat_interleave(2, -2).repeat_interleave(2, -1)
        return self.joined(torch.cat([fine, coarse], 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@factory
def small_unet(*, inputs: Shape, classes: Count, width: Count = 8) -> nn.Module:
    """A small U-Net (Ronneberger et al. 2015) of two sizes, with group norm: [n, c, H, W] -> [n, classes, H, W]."""
    channels, height, across = picture_shape("small_unet", inputs, 4)
    if height % 2 or across % 2:
        raise Invalid(f"small_unet.inputs = {inputs!r}: height and width must be even, since pictures are halved")
    return SmallUNet(channels, classes, width)


def _convolutions(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(1, after), nn.ReLU())
