"""Which lane is fastest for this model, device and cohort: measured, not assumed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.settings import Count, Invalid, check
from consilience.core.tree import Tree
from consilience.engines.vectorised import obstacles
from consilience.engines.vectorised.lanes import Lane
from consilience.engines.vectorised.lanes.batched import Batched
from consilience.engines.vectorised.lanes.cuda import GraphBatched, GraphStreams
from consilience.engines.vectorised.lanes.serial import Serial, Threads
from consilience.engines.vectorised.program import Context, Program

TRIAL_SECONDS = 0.15  # per lane and repetition; at 0.06 what threads cost at their start counted for a third ...
SLOW_TRIAL_SECONDS = 0.06  # ... unless a step takes this long anyway
SLOW_STEP = 0.005  # seconds of one client's step on a processor: above this, overhead is a small part of it
SAMPLE = 8  # clients that a trial of batching takes on a processor
BATCHING_SECONDS = 1.5  # a trial of batching: PyTorch's transforms are imported, a step is recorded
MOST_GAIN = 3.4  # the largest speed-up by batching that was measured on a processor
WHOLE_SECONDS = 0.3  # a group that finishes in this time is timed as a whole
MARGIN = 1.1  # `serial` must be 10 % faster than `streams` to be chosen: it loses more to other load on the machine
NARROWING = 1.15  # a group that narrows takes so much longer than its widths explain: measured on two cores
LaneName = Literal["auto", "batched", "batched-matmul", "streams", "serial"]
Prepare = Callable[[np.ndarray, int | None], tuple[Tree, Context, Plan]]
"""(positions in the cohort, most steps) -> carry, context, plan of a sample group."""


COMPILE_SECONDS = 120  # a run that would take longer than this uncompiled is worth a compilation


@dataclass(frozen=True, kw_only=True)
class LaneChoice:
    """How groups run; "auto" and None are measured on the first round.

    "batched" is one vmapped step for all clients, "batched-matmul" the same with convolutions as matrix products,
    "streams" clients side by side, "serial" one after another.
    """

    lane: LaneName = "auto"
    clients_at_once: Count | None = None
    compile: bool | None = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def resolved(self) -> dict[str, Any]:
        """What is decided by now, under the names of the settings."""
        known: dict[str, Any] = {"clients_at_once": self.clients_at_once, "compile": self.compile}
        known = {key: value for key, value in known.items() if value is not None}
        return known if self.lane == "auto" else {"lane": self.lane, **known}


class Tuner:
    """Holds the lanes; measures once, then always uses the same one."""

    def __init__(self, device: torch.device, choice: LaneChoice, rounds_ahead: int | None) -> None:
        self.choice, self._device, self._rounds_ahead = choice, device, rounds_ahead
        self._lanes: dict[tuple[str, bool], Lane] = {}
        self._problems: dict[str, Exception] = {}  # of lanes that cannot run the model
        self._loops: set[str] = set()  # operations that the batched lane runs once for each client

    def groups(self, order: np.ndarray) -> Iterator[np.ndarray]:
        """The cohort, longest client first, in groups of nearly equal size that fit."""
        most = self.choice.clients_at_once or len(order)
        yield from np.array_split(order, -(-len(order) // most))

    def halve(self, clients: int) -> bool:
        """Make groups half as large after memory ran out; False if they hold a single client already."""
        now = min(self.choice.clients_at_once or clients, clients)
        if now <= 1:
            return False
        self.choice = replace(self.choice, clients_at_once=now // 2)
        self._lanes.clear()  # captured graphs hold memory
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Run a group in the chosen lane (before anything was measured: serially)."""
        name = "serial" if self.choice.lane == "auto" else self.choice.lane
        lane = self._lane(name, bool(self.choice.compile))
        return lane.fold(program.by_matmul() if name == "batched-matmul" else program, carry, context, plan, store)

    def choose_lane(self, program: Program, store: Rows, order: np.ndarray, prepare: Prepare) -> None:
        """Choose group size, lane and compilation on a sample of the cohort's own work."""
        if self.choice.clients_at_once is None:
            carry, _, plan = prepare(order[:1], 1)
            fits = clients_that_fit(program.task, carry, plan, store, self._device)
            self.choice = replace(self.choice, clients_at_once=fits)
        if self.choice.lane == "auto":
            self.choice = replace(self.choice, lane=self._fastest(program, store, order, prepare))
        if self.choice.compile is None:
            self.choice = replace(self.choice, compile=self._worth_compiling(program, store, order, prepare))

    def _fastest(self, program: Program, store: Rows, order: np.ndarray, prepare: Prepare) -> LaneName:
        names = self._candidates(program, order)
        if names == ["serial"]:
            return names[0]
        rates: dict[LaneName, float] = {}
        for name in names:
            if name == "batched" and self._device.type == "cpu":
                if self._slow_step(program, store, order, prepare):
                    continue  # all that batching can save is overhead
                if not self._pays(max(rates.values()), order, prepare):
                    continue
            rates[name] = self._rate(name, False, program, store, order, prepare)
        if not any(rates.values()) and "serial" not in rates:
            rates["serial"] = self._rate("serial", False, program, store, order, prepare)
        if not any(rates.values()):
            raise next(iter(self._problems.values()))
        if self._device.type == "cpu":
            rates = self._over_the_cohort(rates, program, store, next(self.groups(order)), prepare)
        if "streams" in rates and "serial" in rates:
            rates["serial"] /= MARGIN
        lane = max(rates, key=lambda name: rates[name])
        obstacles.report(lane, {name: obstacles.reason(p) for name, p in self._problems.items()}, self._loops)
        return lane

    def _over_the_cohort(
        self, rates: dict[LaneName, float], program: Program, store: Rows, group: np.ndarray, prepare: Prepare
    ) -> dict[LaneName, float]:
        """Rows per second over all steps of a group, from those over a few steps.

        Clients of unequal size finish one after the other: the gain of batching shrinks, and a core
        may be left without a client. A few equal steps do not show this.
        """
        steps = prepare(group, None)[2].steps
        found = dict(rates)
        if rates.get("streams"):
            found["streams"] *= balance(steps, torch.get_num_threads())
        if rates.get("batched"):
            found["batched"] = narrowing(rates["batched"], min(SAMPLE, len(steps)), rates.get("serial", 0.0), steps)
            rate = self._whole_rate("batched", found["batched"], program, store, group, prepare)
            found["batched"] = min(found["batched"], rate)
        return found

    def _pays(self, rate: float, order: np.ndarray, prepare: Prepare) -> bool:
        """Whether the whole run, at this rate, takes so long that batching could save more than trying it costs."""
        if self._rounds_ahead is None or not rate:
            return True
        rows = sum(int(prepare(group, None)[2].live.sum()) for group in self.groups(order))
        return rows * self._rounds_ahead / rate * (1 - 1 / MOST_GAIN) > BATCHING_SECONDS

    def _slow_step(self, program: Program, store: Rows, order: np.ndarray, prepare: Prepare) -> bool:
        """Whether one client's step, untraced, takes so long that the overhead around it does not matter."""
        try:
            return min(self._time("serial", False, program, store, order[:1], prepare, 1)[0] for _ in "ab") > SLOW_STEP
        except (RuntimeError, NotImplementedError, ValueError):
            return False

    def _lane(self, name: str, compile: bool) -> Lane:
        key = ("batched" if name.startswith("batched") else name, compile)
        if key not in self._lanes:
            self._lanes[key] = self._make(*key)
        return self._lanes[key]

    def _make(self, name: str, compile: bool) -> Lane:
        if name == "serial":
            return Serial()
        if self._device.type == "cuda":
            return GraphBatched(compile=compile) if name == "batched" else GraphStreams(compile=compile)
        return Batched() if name == "batched" else Threads(torch.get_num_threads())

    def _candidates(self, program: Program, order: np.ndarray) -> list[LaneName]:
        if len(order) == 1:
            return ["serial"] if self._device.type == "cpu" else ["streams"]
        if self._device.type == "cuda":  # serial is the same work as streams, launched kernel by kernel
            return ["batched", "streams", *(["batched-matmul"] if program.task.convolves else [])]  # type: ignore[list-item]
        return ["serial", "batched"] if torch.get_num_threads() == 1 else ["streams", "serial", "batched"]

    def _worth_compiling(self, program: Program, store: Rows, order: np.ndarray, prepare: Prepare) -> bool:
        if self._device.type != "cuda" or not self.choice.lane.startswith("batched") or not self._rounds_ahead:
            return False
        plain = self._rate(self.choice.lane, False, program, store, order, prepare)
        rows = sum(int(prepare(group, None)[2].live.sum()) for group in self.groups(order))
        if rows / plain * self._rounds_ahead < COMPILE_SECONDS:
            return False
        return self._rate(self.choice.lane, True, program, store, order, prepare) > plain

    def _rate(
        self, name: str, compile: bool, program: Program, store: Rows, order: np.ndarray, prepare: Prepare
    ) -> float:
        """Rows trained per second, or 0 if the lane cannot run this program."""
        group = next(self.groups(order))
        if self._device.type == "cpu":  # enough clients to keep the lane busy, and the caches as full as they will be
            group = group[:SAMPLE] if name == "batched" else group[: 2 * torch.get_num_threads()]

        def run(steps: int) -> tuple[float, int]:
            return self._time(name, compile, program, store, group, prepare, steps)

        try:
            which = program.by_matmul() if name == "batched-matmul" else program
            hot = which.one.hot
            try:
                which.one.hot = which.group.hot = 0  # trace what the sample needs
                with obstacles.noting_loops(self._loops):
                    run(1)
            finally:
                which.one.hot = which.group.hot = hot
            took, _ = run(1)  # the first replay is slower
            if took > TRIAL_SECONDS and self._device.type == "cpu" and name != "batched":
                group = group[: torch.get_num_threads()]  # a slow model: save time; the caches are full anyway
            enough = TRIAL_SECONDS if took < SLOW_STEP * len(group) else SLOW_TRIAL_SECONDS
            steps = int(np.clip(enough / took, 3, 200))
            repeats = 3 if took < TRIAL_SECONDS else 2
            return max(seen / took for took, seen in (run(steps) for _ in range(repeats)))  # the first fills the caches
        except Invalid:
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as problem:
            self._problems[name] = problem
            return 0.0

    def _whole_rate(
        self, name: str, rate: float, program: Program, store: Rows, group: np.ndarray, prepare: Prepare
    ) -> float:
        """Rows per second over all steps of a group, if that takes little time; else what is known."""
        _, _, plan = prepare(group, None)
        if int(plan.live.sum()) / rate > WHOLE_SECONDS:
            return rate
        steps = int(plan.steps.max(initial=0))
        passes = [self._time(name, False, program, store, group, prepare, steps) for _ in range(2)]
        return max(seen / took for took, seen in passes)

    def _time(
        self, name: str, compile: bool, program: Program, store: Rows, group: np.ndarray, prepare: Prepare, steps: int
    ) -> tuple[float, int]:
        """(seconds, rows) that some clients take for so many steps."""
        carry, context, plan = prepare(group, steps)
        self._wait()
        began = time.perf_counter()
        program = program.by_matmul() if name == "batched-matmul" else program
        self._lane(name, compile).fold(program, carry, context, plan, store)
        self._wait()
        return time.perf_counter() - began, int(plan.live.sum())

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def balance(steps: np.ndarray, cores: int) -> float:
    """The part of the time in which cores have a client, each taking the next one when it is done."""
    busy = np.zeros(cores, dtype=np.int64)
    for client in steps:
        busy[busy.argmin()] += client
    return float(steps.sum() / (cores * busy.max(initial=1)))


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
