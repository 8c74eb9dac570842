"""Unbiased quantisation of updates to b bits per value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from consilience.channel.update import carrying, closed, each_floating, leaf_key, opened
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.rng import uniforms
from consilience.core.settings import Checked, Range
from consilience.core.tree import Tree

GROUP = 8


def packed(codes: Tensor, bits: int) -> Tensor:
    """[..., n] codes in 0 .. 2^bits - 1, bits <= 8 -> [..., bits * ceil(n / 8)] uint8, padded with 0."""
    count = codes.shape[-1]
    groups = -(-count // GROUP)
    filled = torch.nn.functional.pad(codes.to(torch.int64), (0, groups * GROUP - count))
    places = bits * torch.arange(GROUP, device=codes.device)
    # the fields do not overlap, so their sum is their bitwise or; eight bits reach the sign, which the mask ignores
    words = (filled.reshape(*codes.shape[:-1], groups, GROUP) << places).sum(-1)
    octets = 8 * torch.arange(bits, device=codes.device)
    return ((words.unsqueeze(-1) >> octets) & 0xFF).to(torch.uint8).flatten(-2)


def unpacked(octets: Tensor, bits: int) -> Tensor:
    """The inverse: [..., bits * g] uint8 -> [..., 8 g] int64 codes; codes beyond the original n are 0."""
    groups = octets.shape[-1] // bits
    places = 8 * torch.arange(bits, device=octets.device)
    words = (octets.to(torch.int64).reshape(*octets.shape[:-1], groups, bits) << places).sum(-1)
    fields = bits * torch.arange(GROUP, device=octets.device)
    return ((words.unsqueeze(-1) >> fields) & (2**bits - 1)).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class Quantise(Checked):
    """Stochastic rounding to evenly spaced levels between -s and s, s the largest value of the tensor.

    A value is rounded up or down to a neighbouring level with the probabilities that keep its mean (QSGD, Alistarh et
    al. 2017). There are 2^bits - 1 levels, so that 0 is one of them; with one bit the two levels are -s and s. A tensor
    of n values costs bits * ceil(n / 8) bytes and one number.
    """

    bits: Annotated[int, Range(least=1, most=8)] = 8
    form = "codes"  # integers, which no later channel can read

    @property
    def _steps(self) -> int:
        """Intervals between the lowest and the highest level."""
        return 2**self.bits - 2 if self.bits > 1 else 1

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """{"codes", "scale"} in place of every tensor of values."""

        def quantise(leaf: Tensor, number: int) -> Tree:
            if not leaf.numel():
                return {"codes": leaf.flatten().to(torch.uint8), "scale": leaf.new_zeros(())}
            scale = leaf.abs().amax()
            wide = leaf.flatten().to(torch.float64)  # float32 cannot resolve a probability of 1 in 10,000 here
            where = (wide / torch.where(scale > 0, scale, 1).to(torch.float64) + 1) * (self._steps / 2)  # 0 .. steps
            levels = (where + uniforms(leaf_key(key, number), leaf.numel())).floor().clamp(0, self._steps)
            return {"codes": packed(levels.nan_to_num(0).to(torch.int64), self.bits), "scale": scale}

        return carrying(reply, each_floating(quantise, opened(reply, message, self))), memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Models from updates."""
        if not len(cohort):
            return cohort
        return closed(cohort, received, self._values(cohort.reply["model"]["params"]))

    def _values(self, payload: Any) -> Any:
        """Flat values of the levels, including the zeros that padded the last group of codes."""
        if not isinstance(payload, dict):
            return payload
        if set(payload) != {"codes", "scale"} or isinstance(payload["codes"], dict):
            return {name: self._values(part) for name, part in payload.items()}
        levels = unpacked(payload["codes"], self.bits).to(torch.float64) * (2 / self._steps) - 1  # [m, 8 g]
        scale = payload["scale"]  # [m]
        return (levels * scale.unsqueeze(-1).to(torch.float64)).to(scale.dtype)
