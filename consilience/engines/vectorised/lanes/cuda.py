"""CUDA lanes: a step is captured once as a graph that reads its rows at a counter on the device, then replayed.

Nothing returns to the host inside a group: the plan is on the device, the graph advances the counter, and the host
only queues replays. Two graphs per shape: one for steps in which every slot of every client is live, one with masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from consilience.core import progress, tree
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.tree import Tree
from consilience.engines.compiler.in_place import copy_all
from consilience.engines.compiler.trace import Flat
from consilience.engines.vectorised.lanes.captured import Captured, CarryLayout, SharedCapture, room_for
from consilience.engines.vectorised.program import Context, Program, owned
from consilience.engines.vectorised.traced import flattened

SHORTEST_TAIL = 4  # steps: below this, finished clients stay in the graph and the rest does not move to a narrower one
CHUNKS = (16, 4, 1)  # steps in one graph: between two graphs the device waits for some microseconds
STREAM_CHUNKS = (4, 1)  # other streams work in those microseconds
NARROWEST = 8  # clients: below this, a narrower graph saves nothing


class GraphBatched:
    """All clients of a group in one captured, vmapped step; when half are done the rest moves to a narrower graph."""

    def __init__(self, *, compile: bool) -> None:
        self._compile, self._pool = compile, torch.cuda.graph_pool_handle()
        self._captured: dict[Any, Captured] = {}

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Every client's steps, all clients together."""
        width, steps = len(plan.steps), int(plan.steps.max(initial=0))
        if not steps:
            progress.add(width)
            return owned(carry)
        captured = self._for(program, carry, context, plan, store)
        copy_all(captured.shared, pytree.tree_leaves(context.shared))
        copy_all(captured.carry, pytree.tree_leaves(carry))
        captured.load(context, plan)
        full = (plan.live == plan.width).all(1)
        going = (plan.live > 0).sum(1)
        half = width // 2
        narrow = np.flatnonzero(going <= half)  # from the first of these on, half of the width is enough
        done = int(narrow[0]) if width >= NARROWEST and len(narrow) and steps - narrow[0] >= SHORTEST_TAIL else steps
        for masked, times in chunks(~full[:done], CHUNKS):
            captured.replay(masked=masked, times=times)
        carry = captured.unload()
        if done == steps:
            progress.add(width)
            return carry
        progress.add(width - half)  # the others are counted below
        head = self.fold(program, tree.rows(carry, slice(0, half)), context.head(half), plan.tail(done, half), store)
        return tree.concatenate([head, tree.rows(carry, slice(half, width))])

    def _for(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Captured:
        key = (id(program), form_of(carry, context), len(plan.steps), plan.width, room_for(plan), store.y.data_ptr())
        if key not in self._captured:
            layout = CarryLayout(pytree.tree_leaves(carry))
            self._captured[key] = Captured(
                program.group,
                program,
                carry,
                layout,
                context,
                plan,
                store,
                SharedCapture(context),
                pool=self._pool,
                compile=self._compile,
            )
        return self._captured[key]


class GraphStreams:
    """Clients side by side, each replaying a captured step of its own model on one of a few streams."""

    def __init__(self, streams: int = 12, *, compile: bool = False) -> None:
        self._compile = compile
        self._streams = [torch.cuda.Stream() for _ in range(streams)]
        self._pools = [torch.cuda.graph_pool_handle() for _ in range(streams)]
        self._captured: dict[Any, Captured] = {}
        self._common: dict[Any, SharedCapture] = {}
        self._forms: dict[Any, int] = {}  # those met, numbered

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Every client's steps; clients go to the stream with least work so far, longest first."""
        slots, (leaves, spec) = min(len(self._streams), len(plan.steps)), pytree.tree_flatten(carry)
        form = self._forms.setdefault(form_of(carry, context), len(self._forms))
        captured = [self._for(slot, form, program, carry, context, plan, store) for slot in range(slots)]
        copy_all(captured[0].shared, pytree.tree_leaves(context.shared))  # all of them read it
        layout = captured[0].layout
        blocks = layout.blocks(leaves[0].device, len(plan.steps))
        layout.fill(blocks, leaves)
        main = torch.cuda.current_stream()
        for stream in self._streams[:slots]:
            stream.wait_stream(main)
        queues = [self._client_steps(captured[s], self._streams[s], queue, blocks, context, plan)
                  for s, queue in enumerate(_balanced(plan.steps, slots))]  # fmt: skip
        try:
            while queues:  # one step of every stream in turn keeps them all busy
                queues = [queue for queue in queues if next(queue, None) is not None]
        finally:  # memory runs out in the middle: what streams still write to must not be used anew before
            for stream in self._streams[:slots]:
                main.wait_stream(stream)
        progress.add(len(plan.steps))
        return pytree.tree_unflatten(layout.windows(blocks), spec)

    def _client_steps(
        self,
        captured: Captured,
        stream: torch.cuda.Stream,
        queue: list[int],
        blocks: Flat,
        context: Context,
        plan: Plan,
    ) -> Any:
        for client in queue:
            with torch.cuda.stream(stream):
                for static, block in zip(captured.blocks, blocks):
                    static.copy_(block[client])
                captured.load(context.of(client), plan.of(client))
            short = plan.live[: plan.steps[client], client] != plan.width
            for masked, times in chunks(short, STREAM_CHUNKS):
                with torch.cuda.stream(stream):
                    captured.replay(masked=masked, times=times)
                yield True
            with torch.cuda.stream(stream):
                for static, block in zip(captured.blocks, blocks):
                    block[client].copy_(static)

    def _for(
        self, slot: int, form: int, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows
    ) -> Captured:
        key = (slot, form, id(program), plan.width, room_for(plan), store.y.data_ptr())
        if key not in self._captured:
            one = tree.rows(carry, 0)
            common = self._common.setdefault(key[1:], SharedCapture(context))
            layout = CarryLayout(pytree.tree_leaves(one), channels_last=True)
            first = (one, layout, context.of(0), plan.of(0))
            how: dict[str, Any] = {"pool": self._pools[slot], "compile": self._compile, "channels_last": True}
            self._captured[key] = Captured(program.one, program, *first, store, common, **how)
        return self._captured[key]


def form_of(carry: Tree, context: Context) -> Any:
    """The names, shapes and types of a client's carry and context: a message may differ from round to round."""
    own, shared = list[Any](), list[Any]()
    names = flattened((carry, context.personal, context.memory), own), flattened(context.shared, shared)
    return names, tuple((leaf.shape[1:], leaf.dtype) for leaf in own), tuple((one.shape, one.dtype) for one in shared)


def chunks(masked: np.ndarray, sizes: tuple[int, ...]) -> Iterator[tuple[bool, int]]:
    """(masked, how many) for runs of steps, greedily in few pieces of the given sizes; masked ones alone."""
    at = 0
    while at < len(masked):
        ahead = masked[at:]
        free = len(ahead) if not ahead.any() else int(ahead.argmax())  # steps before the next masked one
        times = next((size for size in sizes if size <= free), 1)
        yield bool(masked[at]), times
        at += times


def _balanced(steps: np.ndarray, slots: int) -> list[list[int]]:
    """Clients for each slot: longest first, each to the slot with least work so far."""
    queues: list[list[int]] = [[] for _ in range(slots)]
    load = np.zeros(slots, dtype=np.int64)
    for client in np.argsort(-steps, kind="stable"):
        slot = int(load.argmin())
        queues[slot].append(int(client))
        load[slot] += steps[client]
    return queues
