"""Measures which lane is fastest for this model, device and cohort."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.settings import Invalid
from consilience.core.stored_rows import stored_bytes
from consilience.core.tree import Tree
from consilience.engines.vectorised import obstacles
from consilience.engines.vectorised.estimates import Sizes, balance, narrowing, sizes_of, threads_suffice
from consilience.engines.vectorised.gpu_trials import Trials
from consilience.engines.vectorised.lane_choice import LaneChoice, LaneName
from consilience.engines.vectorised.lanes import Lane
from consilience.engines.vectorised.lanes.cpu import Batched, Serial, Threads
from consilience.engines.vectorised.lanes.cuda import GraphBatched, GraphStreams
from consilience.engines.vectorised.program import Context, Program
from consilience.stores.staging import Stager

TRIAL_SECONDS = 0.15  # per lane and repetition; at 0.06 what threads cost at their start counted for a third ...
SLOW_TRIAL_SECONDS = 0.06  # ... unless a step takes this long anyway
SLOW_STEP = 0.005  # seconds of one client's step on a processor: above this, overhead is a small part of it
SLOW_UNLOCKED_STEP = 0.0003  # the same for a step outside Python's lock, whose overhead is 0.1 ms
GLANCE_STEPS, GLANCE_SECONDS = 8, 0.02  # of each client of the sample, at most
HOPELESS = 2.0  # a lane that is slower than the best one by this factor at its second step is measured no further
SAMPLE = 8  # clients that a trial of batching takes on a processor
BATCHING_SECONDS = 1.0  # a trial of batching: what PyTorch's transforms need is imported, a step is recorded
MOST_GAIN = 3.4  # the largest speed-up by batching that was measured on a processor
WHOLE_SECONDS = 0.3  # a group that finishes in this time is timed as a whole
MARGIN = 1.1  # `serial` must be 10 % faster than `streams` to be chosen: it loses more to other load on the machine
MOST_COLUMNS = 2**29  # bytes of a client's step: above, its convolutions fill a GPU, and their columns its memory
Prepare = Callable[[np.ndarray, int | None], tuple[Tree, Context, Plan]]
"""(positions in the cohort, most steps) -> carry, context, plan of a sample group."""


class Tuner:
    """Holds the lanes; measures once, then always uses the same one."""

    def __init__(
        self, device: torch.device, choice: LaneChoice, rounds_ahead: int | None, stager: Stager | None = None
    ) -> None:
        self._stager = stager or Stager(device)
        self.choice, self._device, self._rounds_ahead = choice, device, rounds_ahead
        self._lanes: dict[Any, Lane] = {}
        self._problems: dict[str, Exception] = {}  # of lanes that cannot run the model
        self._sizes = Sizes(0, 0, 0)
        self._loops: set[str] = set()  # operations that the batched lane runs once for each client

    def groups(self, order: np.ndarray) -> list[np.ndarray]:
        """The cohort, longest client first, in groups of nearly equal size that fit."""
        most = self.choice.clients_at_once or len(order)
        return np.array_split(order, -(-len(order) // most))

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

    def choose_lane(
        self, program: Program, store: Rows, order: np.ndarray, sizes: np.ndarray, prepare: Prepare
    ) -> None:
        """Choose group size, lane and compilation on a sample of the cohort's own work; sizes: [m] rows of clients."""
        if self.choice.clients_at_once is not None and self.choice.lane != "auto" and self.choice.compile is not None:
            return
        given = self.choice.clients_at_once
        if given is None or self._device.type == "cuda":
            carry, _, plan = prepare(order[:1], 1)
            self._sizes = sizes_of(program.task, carry, *self._stager.stage(plan, store))
            self._sizes = self._sizes._replace(rows=stored_bytes(store.x) * int(sizes.max()))
        if given is None:
            self.choice = replace(self.choice, clients_at_once=self._sizes.fitting(self._device))
        if self._device.type == "cuda":
            products = program.task.convolves and self._sizes.columns < MOST_COLUMNS

            def rate(choice: LaneChoice) -> float:
                self.choice = choice
                return self._rate(choice.lane, bool(choice.compile), program, store, order, prepare)

            def seconds(rate: float) -> float:
                rows = sum(int(prepare(group, None)[2].live.sum()) for group in self.groups(order))
                return rows / rate * (self._rounds_ahead or 0)

            trials = Trials(self.choice, rate, self._keep_only, seconds)
            self.choice = trials.best(len(order), products=products, grows=given is None)
            self._report(self.choice.lane)
            return
        if self.choice.lane == "auto":
            self.choice = replace(self.choice, lane=self._fastest(program, store, order, prepare))
        self.choice = replace(self.choice, compile=bool(self.choice.compile))

    def _keep_only(self, choice: LaneChoice) -> None:
        """Free what other lanes hold on the device."""
        kept = (choice.lane, bool(choice.compile), choice.clients_at_once)
        others = [key for key in self._lanes if key != kept]
        for key in others:
            del self._lanes[key]
        if others:
            gc.collect()
            torch.cuda.empty_cache()

    def _fastest(self, program: Program, store: Rows, order: np.ndarray, prepare: Prepare) -> LaneName:
        """On a processor."""
        names = self._candidates(order)
        if len(names) == 1:
            return names[0]
        carry, _, plan = prepare(self.groups(order)[0], None)  # first, since plans of samples are parts of this one
        each = tree.nbytes(carry) // len(plan.steps)
        del carry
        known = self._glance(program, store, order, prepare) if "streams" in names else 0.0
        if known:
            names = self._rivals(known, each, plan, order, prepare)
        if names == ["streams"]:
            return names[0]
        rates: dict[LaneName, float] = {}
        began, worked = time.perf_counter(), time.process_time()
        for name in names:
            if name == "batched" and not known:
                if self._slow_step(rates["serial"], order, prepare):
                    continue  # all that batching can save is overhead
                waiting = (time.perf_counter() - began) / (time.process_time() - worked)  # above 1: for other processes
                if not self._pays(max(rates.values()) * max(waiting, 1.0), order, prepare):
                    continue
            best = max(rates.values(), default=0.0)
            rates[name] = self._rate(name, False, program, store, order, prepare, best)
        if not any(rates.values()):
            raise next(iter(self._problems.values()))
        rates = self._over_the_cohort(rates, program, store, self.groups(order)[0], prepare)
        if "streams" in rates and "serial" in rates:
            rates["serial"] /= MARGIN
        lane = max(rates, key=lambda name: rates[name])
        self._report(lane)
        return lane

    def _report(self, lane: str) -> None:
        stopped = {name: obstacles.reason(p) for name, p in self._problems.items() if name != lane}
        obstacles.report(lane, stopped, self._loops)

    def _glance(self, program: Program, store: Rows, order: np.ndarray, prepare: Prepare) -> float:
        """Seconds of CPU time for a row in `streams`, from a few steps; 0 if they do not run outside Python's lock.

        CPU time depends less on other processes than the clock does.
        """
        group, lane = self._sample("streams", order), self._lane("streams", False)
        assert isinstance(lane, Threads)

        def measure() -> float:
            before = lane.worked
            self._traced(program, lambda: self._time("streams", False, program, store, group, prepare, 1))
            if not program.one.unlocked:
                return 0.0
            after = lane.worked
            steps = int(np.clip(GLANCE_SECONDS * len(group) / max(after - before, 1e-6), 1, GLANCE_STEPS))
            _, rows = self._time("streams", False, program, store, group, prepare, steps)  # the first replay is slower
            return (lane.worked - after) / rows

        return self._attempt("streams", measure)

    def _rivals(self, row: float, carry: int, plan: Plan, order: np.ndarray, prepare: Prepare) -> list[LaneName]:
        """`streams`, which takes so many seconds of CPU time for a row, and the lanes that may be faster.

        carry: bytes of a client's; plan: the first group's.
        """
        cores, found = torch.get_num_threads(), list[LaneName](["streams"])
        if not threads_suffice(plan, carry, cores):
            found.append("serial")
        step = row * float(plan.live.sum() / plan.steps.sum())
        if step < SLOW_UNLOCKED_STEP and self._pays(cores * balance(plan.steps, cores) / row, order, prepare):
            found.append("batched")
        return found

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
            alone = rates.get("serial", rates.get("streams", 0.0) / torch.get_num_threads())
            found["batched"] = narrowing(rates["batched"], min(SAMPLE, len(steps)), alone, steps)
            rate = self._whole_rate("batched", found["batched"], program, store, group, prepare)
            found["batched"] = min(found["batched"], rate)
        return found

    def _pays(self, rate: float, order: np.ndarray, prepare: Prepare) -> bool:
        """Whether the run is long enough, at this rate, for batching to save more time than its trial costs."""
        if self._rounds_ahead is None or not rate:
            return True
        rows = sum(int(prepare(group, None)[2].live.sum()) for group in self.groups(order))
        return rows * self._rounds_ahead / rate * (1 - 1 / MOST_GAIN) > BATCHING_SECONDS

    def _slow_step(self, rate: float, order: np.ndarray, prepare: Prepare) -> bool:
        """Whether a client's step takes so long, at this rate of clients one by one, that overhead does not matter."""
        return rate > 0 and int(prepare(order[:1], 1)[2].live.sum()) / rate > SLOW_STEP

    def _lane(self, name: str, compile: bool) -> Lane:
        key: Any = (name, compile, self.choice.clients_at_once) if self._device.type == "cuda" else name
        if key not in self._lanes:
            self._lanes[key] = self._make("batched" if name.startswith("batched") else name, compile)
        return self._lanes[key]

    def _make(self, name: str, compile: bool) -> Lane:
        if name == "serial":
            return Serial()
        if self._device.type == "cuda":
            return GraphBatched(compile=compile) if name == "batched" else GraphStreams(compile=compile)
        return Batched() if name == "batched" else Threads(torch.get_num_threads())

    def _candidates(self, order: np.ndarray) -> list[LaneName]:
        if len(order) == 1:
            return ["serial"]
        return ["serial", "batched"] if torch.get_num_threads() == 1 else ["streams", "serial", "batched"]

    def _rate(
        self,
        name: str,
        compile: bool,
        program: Program,
        store: Rows,
        order: np.ndarray,
        prepare: Prepare,
        best: float = 0.0,
    ) -> float:
        """Rows trained per second, or 0 if the lane cannot run this program; roughly, if `best` is out of reach."""
        group = self._sample(name, order)
        first = group[:1] if name == "serial" else group  # one client is enough to trace a step

        def run(steps: int) -> tuple[float, int]:
            return self._time(name, compile, program, store, group, prepare, steps)

        def measure() -> float:
            nonlocal group
            which = program.by_matmul() if name == "batched-matmul" else program
            self._traced(which, lambda: self._time(name, compile, program, store, first, prepare, 1))
            took, seen = run(1)  # the first replay is slower
            if seen / took * HOPELESS < best:
                return seen / took
            if took > TRIAL_SECONDS and self._device.type == "cpu" and name != "batched":
                group = group[: torch.get_num_threads()]  # a slow model: save time; the caches are full anyway
            enough = TRIAL_SECONDS if took < SLOW_STEP * len(group) else SLOW_TRIAL_SECONDS
            steps = int(np.clip(enough / took, 3, 200))
            repeats = 3 if took < TRIAL_SECONDS else 2
            return max(seen / took for took, seen in (run(steps) for _ in range(repeats)))  # the first fills the caches

        return self._attempt(name, measure)

    def _sample(self, name: str, order: np.ndarray) -> np.ndarray:
        """The clients of a trial: on a processor, enough to keep it busy and its caches as full as they will be."""
        group = self.groups(order)[0]
        if self._device.type != "cpu":
            return group
        return group[:SAMPLE] if name == "batched" else group[: 2 * torch.get_num_threads()]

    def _traced(self, program: Program, run: Callable[[], Any]) -> Any:
        """Run something that traces every step it makes."""
        hot = program.one.hot
        try:
            program.one.hot = program.group.hot = 0
            with obstacles.noting_loops(self._loops):
                return run()
        finally:
            program.one.hot = program.group.hot = hot

    def _attempt(self, name: str, measure: Callable[[], float]) -> float:
        """What is measured in a lane, or 0 if it cannot run the program."""
        try:
            return measure()
        except Invalid:
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as problem:
            obstacles.forget_values(problem)
            self._problems[name] = problem
            return 0.0

    def _whole_rate(
        self, name: str, rate: float, program: Program, store: Rows, group: np.ndarray, prepare: Prepare
    ) -> float:
        """Rows per second over all steps of a group, if that takes little time; else the known estimate."""
        _, _, plan = prepare(group, None)
        if int(plan.live.sum()) / rate > WHOLE_SECONDS:
            return rate
        steps = int(plan.steps.max(initial=0))
        passes = [self._time(name, False, program, store, group, prepare, steps) for _ in range(2)]
        return max(seen / took for took, seen in passes)

    def _time(
        self, name: str, compile: bool, program: Program, store: Rows, group: np.ndarray, prepare: Prepare, steps: int
    ) -> tuple[float, int]:
        """(seconds, rows) of some clients for this many steps."""
        carry, context, plan = prepare(group, steps)
        plan, store = self._stager.stage(plan, store)
        self._wait()
        began = time.perf_counter()
        program = program.by_matmul() if name == "batched-matmul" else program
        self._lane(name, compile).fold(program, carry, context, plan, store)
        self._wait()
        return time.perf_counter() - began, int(plan.live.sum())

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
