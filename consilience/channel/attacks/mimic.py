"""Mimic (Karimireddy et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consilience.channel.attacks.malicious import require_some, split, starts, with_model
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.settings import Fraction, Whole, check
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class Mimic:
    """Malicious clients all send a copy of one honest client's model: harmless only if clients are IID.

    `victim` is the honest client to copy, where it takes part; otherwise the first honest one does.
    """

    clients: tuple[Whole, ...] = ()
    fraction: Fraction | None = None
    victim: Whole | None = None

    def __post_init__(self) -> None:
        check(self)
        require_some("Mimic", self.clients, self.fraction)

    def init(self, start: Tree) -> Tree:
        """Nothing is remembered."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The reply itself."""
        return reply, memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Replace malicious models, buffers included."""
        malicious, honest = split(cohort, self.clients, self.fraction)
        if not len(malicious) or not len(honest):
            return cohort
        starts(cohort, received)  # refuses replies without a model
        there = np.flatnonzero(cohort.ids[honest.cpu().numpy()] == (-1 if self.victim is None else self.victim))
        source = honest[int(there[0]) if len(there) else 0]

        def copy(stacked: Tensor) -> Tensor:
            return stacked.index_copy(0, malicious, torch.stack([stacked[source]] * len(malicious)))

        return with_model(cohort, map_leaves(copy, cohort.reply["model"]))
