"""Cost estimates of lanes, from sizes and a few measured steps."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.tree import Tree

KEPT_BUSY = 0.8  # one client after another, on all cores, was at most 0.85 times as fast as clients side by side ...
CACHED = 16 * 2**20  # ... whose carries have fewer bytes than this together; ResNet-18 with 2 x 43 MiB: 1.3 times
NARROWING = 1.15  # factor by which a narrowing group takes longer than its widths explain: measured on two cores


def balance(steps: np.ndarray, cores: int) -> float:
    """The part of the time in which cores have a client, each taking the next one when it is done."""
    busy = np.zeros(cores, dtype=np.int64)
    for client in steps:
        busy[busy.argmin()] += client
    return float(steps.sum() / (cores * busy.max(initial=1)))


def threads_suffice(plan: Plan, carry: int, cores: int) -> bool:
    """Whether clients side by side, each on one core, are sure to be faster than one after another on all cores.

    A core may be left without a client, and short batches are padded; the carries of several clients may not fit into
    the cache where one does.
    """
    live = float(plan.live.sum() / max(plan.steps.sum() * plan.width, 1))
    return cores * carry <= CACHED and balance(plan.steps, cores) * live >= KEPT_BUSY


def narrowing(rate: float, clients: int, alone: float, steps: np.ndarray) -> float:
    """A group's rate when those that are done leave it, from the rates of some clients at once and of one alone.

    A step's time is taken to grow by the same amount with every client, and every change of width to cost something.
    """
    at_once = clients / rate  # seconds for a row of each
    one = min(1 / alone, at_once) if alone else at_once / clients
    more = (at_once - one) / max(clients - 1, 1)
    widths = np.bincount(steps)[::-1].cumsum()[::-1][1:]  # clients at the first step, at the second ...
    extra = NARROWING if steps.min() < steps.max() else 1.0
    return float(steps.sum() / (one + (widths - 1) * more).sum() / extra)


class Sizes(NamedTuple):
    """Bytes of one client's step."""

    carry: int
    activations: int
    columns: int  # that convolutions written as matrix products add
    rows: int = 0  # of the largest client, where they are read as they are needed

    def fitting(self, device: torch.device) -> int:
        """How many clients' carries, gradients and activations fit into a third of the free memory."""
        each = 4 * self.carry + 3 * self.activations + 2 * self.rows + 1
        return int(np.clip(_free(device) / 3 // each, 1, 4096))


@torch.no_grad()
def sizes_of(task: Any, carry: Tree, plan: Plan, store: Rows) -> Sizes:
    """The memory of one step of the first client."""
    activations, columns, one = list[int](), list[int](), tree.rows(carry, 0)

    def note(layer: nn.Module, _: Any, out: Any) -> None:
        activations.append(_bytes(out))
        if isinstance(layer, nn.Conv2d) and layer.kernel_size != layer.stride:
            columns.append(_bytes(out) // layer.out_channels * layer.weight[0].numel())

    modules = (module for module in task._replica(False).modules() if not any(True for _ in module.children()))
    hooks = [module.register_forward_hook(note) for module in modules]
    try:
        if "model" in one and len(plan.live):
            task.apply(one["model"], plan.single(0, 0, store).x, train=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Sizes(tree.nbytes(one), sum(activations), sum(columns))


def _bytes(output: Any) -> int:
    return output.numel() * output.element_size() if isinstance(output, torch.Tensor) else 0


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30
