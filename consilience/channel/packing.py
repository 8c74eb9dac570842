"""Whole numbers of b bits in bytes: eight of them fill exactly b bytes."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 8


def packed(codes: Tensor, bits: int) -> Tensor:
    """[..., n] codes in 0 .. 2^bits - 1, bits <= 8 -> [..., bits * ceil(n / 8)] uint8, the last group filled with 0."""
    count = codes.shape[-1]
    groups = -(-count // GROUP)
    filled = torch.nn.functional.pad(codes.to(torch.int64), (0, groups * GROUP - count))
    places = bits * torch.arange(GROUP, device=codes.device)
    # the fields do not overlap, so that their sum is their union; eight bits reach the sign, which the mask ignores
    words = (filled.reshape(*codes.shape[:-1], groups, GROUP) << places).sum(-1)
    octets = 8 * torch.arange(bits, device=codes.device)
    return ((words.unsqueeze(-1) >> octets) & 0xFF).to(torch.uint8).flatten(-2)


def unpacked(octets: Tensor, bits: int) -> Tensor:
    """The inverse: [..., bits * g] uint8 -> [..., 8 g] int64 codes; what lies beyond the original n is 0."""
    groups = octets.shape[-1] // bits
    places = 8 * torch.arange(bits, device=octets.device)
    words = (octets.to(torch.int64).reshape(*octets.shape[:-1], groups, bits) << places).sum(-1)
    fields = bits * torch.arange(GROUP, device=octets.device)
    return ((words.unsqueeze(-1) >> fields) & (2**bits - 1)).flatten(-2)
