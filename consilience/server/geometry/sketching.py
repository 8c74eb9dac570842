"""A short random projection of every client's update, for cohorts too large to compare parameter by parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.core import rng
from consilience.core.remote import each
from consilience.core.tree import Tree

BLOCK = 64  # clients at a time: float64 copies of thousands of models would not fit


def sketch(stacked: Tree, anchor: Tree, directions: int, key: int) -> Tensor:
    """[m, directions] sums of the updates w_i - anchor: each parameter goes, with a random sign, into one random sum.

    A Johnson-Lindenstrauss projection with one non-zero per column (the count sketch of Charikar et al. 2002), so it
    costs O(m P) whatever its length k. For vectors x, y, over the draw of signs and places, <Sx, Sy> has mean <x, y>
    and variance at most (|x|^2 |y|^2 + <x, y>^2) / k. So |Sx|^2 / |x|^2 has mean 1 and deviation at most sqrt(2 / k),
    and by Chebyshev lies outside 1 +- e with probability at most 2 / (k e^2): at k = 4096 a distance between two
    clients is off by 1.1 % (one deviation). The draw is a function of `key` alone; equal models stay equal.
    """
    first = next(iter(stacked.values()))
    sums = torch.zeros(len(first), directions, dtype=torch.float64, device=first.device)
    names = [(place, name) for place, name in enumerate(stacked) if stacked[name].numel()]
    columns = [stacked[name] for _, name in names], [anchor[name] for _, name in names], [place for place, _ in names]
    for part in each(_dealt, *columns, given=(directions, key)):
        sums += part
    return sums


def _dealt(value: Tensor, anchor: Tensor, place: int, directions: int, key: int) -> Tensor:
    """[m, directions] what one tensor, the `place`-th, adds to the sums."""
    count = value[0].numel()
    hashes = rng.bits(torch.tensor(rng.key(key, "sketch", place), device=value.device), count)
    # a shuffle dealt out in turn, from a random sum on: a fixed order of addition, and no two parameters share a
    # sum with a probability above 1 / k (independent places would be added by atomics, in any order, on a GPU)
    order, turn = hashes.argsort(stable=True), rng.key(key, "sketch turn", place) % directions
    signs = (1.0 - 2.0 * (hashes & 1))[order]
    sums = []
    for start in range(0, len(value), BLOCK):
        some = value[start : start + BLOCK].reshape(-1, count)[:, order].to(torch.float64)
        update = (some - anchor.reshape(-1)[order].to(torch.float64)) * signs
        dealt = torch.nn.functional.pad(update, (0, -count % directions)).reshape(len(some), -1, directions)
        sums.append(dealt.sum(1).roll(turn, 1))
    return torch.cat(sums)
