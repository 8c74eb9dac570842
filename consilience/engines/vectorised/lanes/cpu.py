"""The lanes of a CPU: one client after another, one per core, or all clients of a group in one vmapped step."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from consilience.core import progress, tree
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.tree import Tree
from consilience.engines.vectorised.program import BoundSteps, Context, Program, owned


class Serial:
    """A plain training loop: batches are cut to their live rows, nothing is padded."""

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Every client's steps, client by client."""
        carry = owned(carry)
        for client in range(len(plan.steps)):
            _one(program, carry, context, plan, store, client)
            progress.add()
        return carry


class Threads:
    """One client per core at a time, pictures laid out channels last: the CPU's counterpart of parallel streams.

    worked: seconds of CPU time that clients took; unlike the clock, it hardly depends on other processes.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self.worked = workers, 0.0
        self._pool: ThreadPoolExecutor | None = None
        self._ready = threading.local()

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Every client's steps, as many clients at once as there are workers."""
        carry = owned(carry)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="clients")

        def work(client: int) -> float:
            began = time.thread_time()
            self._prepare(program)
            with torch.no_grad():
                _one(program, carry, context, plan, store, client, threaded=True)
            return time.thread_time() - began

        def trace() -> None:
            self._prepare(program)
            with torch.no_grad():
                _trace_common_shapes(program, carry, context, plan, store)

        # tracing patches torch for the whole process: it happens here, before the clients start; and in a worker, whose
        # operations use one thread, since on a busy machine several threads mostly wait for each other
        self._pool.submit(trace).result()
        for took in self._pool.map(work, range(len(plan.steps))):  # iterating raises a client's error
            self.worked += took
            progress.add()
        return carry

    def _prepare(self, program: Program) -> None:
        """Set PyTorch's switches for this worker, and give it its own copy of the module."""
        if not hasattr(self._ready, "done"):
            torch.set_num_threads(1)  # per thread: the cores are taken by other clients
            torch._C._set_graph_executor_optimize(False)  # per thread: it would round a dense layer differently
            self._ready.done = True
        program.task.ready()


class Batched:
    """Clients come longest first, so that the finished ones are cut off at the end."""

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Every client's steps, all clients together."""
        carry = owned(carry)
        active = len(plan.steps)
        steps = BoundSteps(program.group, carry, context)
        for step in range(int(plan.steps.max(initial=0))):
            going = plan.active(step)
            if going < active:  # the others' rows are unchanged
                steps = BoundSteps(program.group, tree.rows(carry, slice(0, going)), context.head(going))
                active = going
            steps(plan.group(step, active, store, program.dtype))
        progress.add(len(plan.steps))
        return carry


def _one(
    program: Program, carry: Tree, context: Context, plan: Plan, store: Rows, client: int, *, threaded: bool = False
) -> None:
    steps = BoundSteps(program.one, tree.rows(carry, client), context.of(client), threaded=threaded)
    for batch in plan.batches(client, store, program.dtype, cut=not threaded):
        steps(batch, may_trace=not threaded)
    if threaded:
        steps.put_back()


def _trace_common_shapes(program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> None:
    full = plan.live == plan.width
    for kind in (full, ~full & (plan.live > 0)):
        if kind.any():
            step, client = (int(i[0]) for i in kind.nonzero())
            steps = BoundSteps(program.one, tree.rows(carry, client), context.of(client), threaded=True)
            steps.trace(plan.padded(step, client, store, program.dtype), worth=int(kind.sum()))
