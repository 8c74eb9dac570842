"""Which lane is fastest for this model, device and cohort: measured, not assumed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.tree import Tree
from consilience.engines.lanes import Lane
from consilience.engines.lanes.batched import Batched
from consilience.engines.lanes.serial import Serial, Threads
from consilience.engines.program import Context, Program

TRIAL_SECONDS = 0.3  # per lane
SLOW_STEP = 0.2  # seconds: above this, tracing saves nothing worth having
Prepare = Callable[[np.ndarray, int], tuple[Tree, Context, Plan]]
"""(positions in the cohort, most steps) -> carry, context, plan of a sample group."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How groups run; None and "auto" are measured on the first round."""

    lane: str = "auto"
    clients_at_once: int | None = None
    compile: bool = False

    def record(self) -> dict[str, Any]:
        """For the run's record."""
        return asdict(self)


class Tuner:
    """Owns the lanes; measures once, then always takes the same one."""

    def __init__(self, device: torch.device, choice: Choice) -> None:
        self.choice, self._device = choice, device
        self._lanes: dict[str, Lane] = {}

    def lane(self, name: str) -> Lane:
        """A lane by name, made on first use."""
        if name not in self._lanes:
            self._lanes[name] = self._make(name)
        return self._lanes[name]

    def _make(self, name: str) -> Lane:
        if name == "serial":
            return Serial()
        if self._device.type == "cuda":
            from consilience.engines.lanes import cuda

            return cuda.GraphBatched(compile=self.choice.compile) if name == "batched" else cuda.GraphStreams()
        return Batched() if name == "batched" else Threads(torch.get_num_threads())

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Run a group in the chosen lane (before anything was measured: serially)."""
        name = "serial" if self.choice.lane == "auto" else self.choice.lane
        return self.lane(name).fold(program, carry, context, plan, store)

    def groups(self, order: np.ndarray) -> Iterator[np.ndarray]:
        """The cohort, longest client first, in groups of nearly equal size that fit."""
        most = self.choice.clients_at_once or len(order)
        yield from np.array_split(order, -(-len(order) // most))

    def settle(self, program: Program, store: Rows, order: np.ndarray, prepare: Prepare) -> None:
        """Choose lane and group size on a sample of the cohort's own work."""
        if self.choice.clients_at_once is None:
            carry, _, plan = prepare(order[:1], 1)
            fits = clients_that_fit(program.task, carry, plan, store, self._device)
            self.choice = replace(self.choice, clients_at_once=fits)
        if self.choice.lane == "auto":
            self.choice = replace(self.choice, lane=self._fastest(program, store, order, prepare))

    def _fastest(self, program: Program, store: Rows, order: np.ndarray, prepare: Prepare) -> str:
        names = ["batched", "streams", "serial"]
        if self._device.type == "cpu" and torch.get_num_threads() == 1:
            names.remove("streams")
        if len(order) == 1:
            names = ["serial"]
        group = next(self.groups(order))
        samples = {"batched": group, "streams": group[: 2 * torch.get_num_threads()], "serial": group[:1]}
        if self._device.type == "cuda":
            samples["streams"] = group
        rates = {name: self._rate(name, program, store, samples[name], prepare) for name in names}
        return max(rates, key=lambda name: rates[name])

    def _rate(self, name: str, program: Program, store: Rows, group: np.ndarray, prepare: Prepare) -> float:
        """Rows trained per second, or 0 if the lane cannot run this program."""
        lane = self.lane(name)

        def run(steps: int) -> tuple[float, int]:
            carry, context, plan = prepare(group, steps)
            self._wait()
            began = time.perf_counter()
            lane.fold(program, carry, context, plan, store)
            self._wait()
            return time.perf_counter() - began, int(plan.live.sum())

        try:
            first, seen = run(1)
            if first > SLOW_STEP and self._device.type == "cpu":
                took, seen = run(1)
                return seen / took
            program.one.hot = program.group.hot = 0  # small steps: trace at once
            warm, _ = run(2)
            steps = int(np.clip(TRIAL_SECONDS / max(warm / 2, 1e-4), 2, 20))
            took, seen = run(steps)
            return seen / took
        except (RuntimeError, NotImplementedError, ValueError):
            return 0.0

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@torch.no_grad()
def clients_that_fit(task: Any, carry: Tree, plan: Plan, store: Rows, device: torch.device) -> int:
    """How many clients' carries, gradients and activations fit into a third of the free memory."""
    sizes: list[int] = []
    one = tree.rows(carry, 0)
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: sizes.append(_bytes(out)))
        for module in task._replica(False).modules()
        if not any(True for _ in module.children())
    ]
    try:
        if "model" in one and len(plan.live):
            task.apply(one["model"], plan.single(0, 0, store).x, train=False)
    finally:
        for hook in hooks:
            hook.remove()
    each = 4 * tree.nbytes(one) + 3 * sum(sizes) + 1
    return int(np.clip(_free(device) / 3 // each, 1, 4096))


def _bytes(output: Any) -> int:
    return output.numel() * output.element_size() if isinstance(output, torch.Tensor) else 0


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30
