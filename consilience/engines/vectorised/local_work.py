"""Local work to be split into groups: of the clients of one run, or of several runs together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import rng
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.tree import Tree
from consilience.engines.vectorised.program import Context, Program


class LocalWork(NamedTuple):
    """The work of m clients; a group is an array of positions 0 .. m-1."""

    program: Program
    store: Rows
    order: np.ndarray  # [m] places, longest client first
    sizes: np.ndarray  # [m] rows each holds
    keys: Tensor  # [m] the channel's
    context: Callable[[np.ndarray], Context]  # of a group
    draw: Callable[[np.ndarray, int | None], Plan]  # the plan of a group, for a limited number of steps
    drawn: dict[bytes, Plan]  # on a processor: the first whole plan that a trial needed, by its group

    def prepare(self, group: np.ndarray, most: int | None = None) -> tuple[Tree, Context, Plan]:
        """The carry, context and plan of a group, for a limited number of steps: for a trial."""
        context = self.context(group)
        carry = self.program.begin(self.keys[on_device(group, self.keys.device)], context)
        for known, whole in self.drawn.items():
            if known.startswith(group.tobytes()):
                return carry, context, whole.head(len(group), most)
        plan = self.draw(group, most)
        if most is None and not self.drawn and plan.rows.device.type == "cpu":
            self.drawn[group.tobytes()] = plan
        return carry, context, plan


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device, without waiting for the work that is queued there."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def channel_keys(ids: np.ndarray, device: torch.device, *, round: int, seed: int) -> Tensor:
    """[m] the keys of these clients' halves of the channel."""
    return on_device(rng.fold(rng.key(seed, "channel", round), ids), device)
