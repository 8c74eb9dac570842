"""CUDA lanes: a step is captured once as a graph that reads its rows at a counter on the device, then replayed.

Nothing returns to the host inside a group: the plan lies on the device, the graph advances the counter, and the host
only queues replays. Two graphs per shape: one for steps in which every slot of every client is live, one with masks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.plans import Batch, Plan
from consilience.core.tree import Tree
from consilience.engines.in_place import Flat, InPlace, copy_all
from consilience.engines.program import Context, Program, Steps, trace

SHORTEST_TAIL = 4  # steps: below this, finished clients ride along rather than the rest moving to a narrower graph
ALIGN = 64  # values: kernels want the start of a tensor on a boundary
NARROWEST = 8  # clients: below this, a narrower graph saves nothing


Traces = dict[bool, InPlace]  # by whether the step is masked


class GraphBatched:
    """All clients of a group in one captured, vmapped step; when half are done the rest moves to a narrower graph."""

    def __init__(self, *, compile: bool) -> None:
        self._compile = compile
        self._captured: dict[Any, Captured] = {}

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Every client's steps, all clients together."""
        width, steps = len(plan.steps), int(plan.steps.max(initial=0))
        if not steps:
            return carry
        captured = self._for(program, carry, context, plan, store)
        captured.load(carry, context, plan)
        full = (plan.live == plan.width).all(1)
        going = (plan.live > 0).sum(1)
        done = 0
        while done < steps:
            if width >= NARROWEST and going[done] <= width // 2 and steps - done >= SHORTEST_TAIL:
                break
            captured.replay(masked=not full[done])
            done += 1
        carry = captured.unload()
        if done == steps:
            return carry
        half = width // 2
        head = self.fold(program, tree.rows(carry, slice(0, half)), context.head(half), plan.tail(done, half), store)
        return tree.concatenate([head, tree.rows(carry, slice(half, width))])

    def _for(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Captured:
        key = (id(program), len(plan.steps), plan.width, _room(plan))
        if key not in self._captured:
            self._captured[key] = Captured(
                program.group, program, carry, context, plan, store, {}, compile=self._compile
            )
        return self._captured[key]


class GraphStreams:
    """Clients side by side, each replaying a captured step of its own model on one of a few streams."""

    def __init__(self, streams: int = 6) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(streams)]
        self._captured: dict[Any, Captured] = {}
        self._traces: dict[Any, Traces] = {}

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Every client's steps; clients go to the stream with least work so far, longest first."""
        slots = min(len(self._streams), len(plan.steps))
        captured = [self._for(slot, program, carry, context, plan, store) for slot in range(slots)]
        main = torch.cuda.current_stream()
        for stream in self._streams[:slots]:
            stream.wait_stream(main)
        results: dict[int, Tree] = {}
        queues = [self._client_steps(captured[s], self._streams[s], queue, carry, context, plan, results)
                  for s, queue in enumerate(_balanced(plan.steps, slots))]  # fmt: skip
        while queues:  # one step of every stream in turn keeps them all fed
            queues = [queue for queue in queues if next(queue, None) is not None]
        for stream in self._streams[:slots]:
            main.wait_stream(stream)
        return tree.stack([results[client] for client in range(len(plan.steps))])

    def _client_steps(
        self,
        captured: Captured,
        stream: torch.cuda.Stream,
        queue: list[int],
        carry: Tree,
        context: Context,
        plan: Plan,
        results: dict[int, Tree],
    ) -> Any:
        for client in queue:
            with torch.cuda.stream(stream):
                captured.load(tree.rows(carry, client), context.of(client), plan.of(client))
            for live in plan.live[: plan.steps[client], client]:
                with torch.cuda.stream(stream):
                    captured.replay(masked=live != plan.width)
                yield True
            with torch.cuda.stream(stream):
                results[client] = captured.unload()

    def _for(self, slot: int, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Captured:
        key = (slot, id(program), plan.width, _room(plan))
        if key not in self._captured:
            first = (tree.rows(carry, 0), context.of(0), plan.of(0))
            traces = self._traces.setdefault(key[1:], {})
            self._captured[key] = Captured(program.one, program, *first, store, traces, channels_last=True)
        return self._captured[key]


class Captured:
    """Static storage for a group (or one client) and the graphs that advance it by one step."""

    def __init__(
        self,
        steps: Steps,
        program: Program,
        carry: Tree,
        context: Context,
        plan: Plan,
        store: Rows,
        traces: Traces,  # shared by captures of equal shape
        *,
        compile: bool = False,
        channels_last: bool = False,
    ) -> None:
        self._steps, self._program, self._traces = steps, program, traces
        self._compile, self._channels_last = compile, channels_last
        leaves, self._carry_spec = pytree.tree_flatten(carry)
        self._blocks: list[Tensor] = []
        self._carry: Flat = self._lay_out(leaves)
        leaves, self._context_spec = pytree.tree_flatten(context)
        self._context: Flat = [leaf.clone() for leaf in leaves]
        room, shape, device = _room(plan), plan.rows.shape, plan.rows.device
        self._plan: Flat = [
            torch.zeros((), dtype=torch.int64, device=device),  # the counter
            torch.zeros(room, *shape[1:], dtype=torch.int64, device=device),
            torch.zeros(room, *plan.live.shape[1:], dtype=torch.int64, device=device),
            torch.zeros(room, *plan.keys.shape[1:], dtype=torch.int64, device=device),
            torch.zeros(room, *plan.first.shape[1:], dtype=torch.bool, device=device),
        ]
        self._data, self._data_spec = pytree.tree_flatten((store.x, store.y))
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # cuBLAS keeps one workspace per stream: graphs that may run side by side are captured on streams of their own
        self._stream = torch.cuda.Stream()

    def load(self, carry: Tree, context: Context, plan: Plan) -> None:
        """Copy a group's start into the static storage."""
        copy_all(self._carry, pytree.tree_leaves(carry))
        copy_all(self._context, pytree.tree_leaves(context))
        self._plan[0].zero_()
        live = torch.from_numpy(np.ascontiguousarray(plan.live)).to(self._plan[0].device, non_blocking=True)
        for static, fresh in zip(self._plan[1:], (plan.rows, live, plan.keys, plan.first)):
            static[: len(fresh)].copy_(fresh)

    def replay(self, *, masked: bool) -> None:
        """Queue one step."""
        if masked not in self._graphs:
            self._graphs[masked] = self._capture(masked)
        self._graphs[masked].replay()

    def unload(self) -> Tree:
        """A copy of the carry, out of the static storage."""
        blocks = [block.clone() for block in self._blocks]
        leaves = [self._window(blocks[at], start, leaf) for (at, start), leaf in zip(self._places, self._carry)]
        return pytree.tree_unflatten(leaves, self._carry_spec)

    def _capture(self, masked: bool) -> torch.cuda.CUDAGraph:
        arguments = (self._carry, self._context, self._plan, self._data)
        if masked not in self._traces:
            traced = trace(self._advance(masked), *arguments)
            leaves = len(self._carry)
            self._traces[masked] = InPlace(traced, leaves, keeps_old=masked, compile=self._compile)
        step = self._traces[masked]
        before = [leaf.clone() for leaf in self._carry]
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            self._try(step, arguments)
            for _ in range(2):  # libraries pick kernels and workspaces before the capture
                step(*arguments)
            copy_all(self._carry, before)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step(*arguments)
            self._plan[0].add_(1)
        return graph

    def _try(self, step: InPlace, arguments: tuple[Flat, ...]) -> None:
        try:
            step(*arguments)
        except Exception as problem:
            if not self._compile:
                raise
            warnings.warn(f"the step cannot be compiled and runs uncompiled: {problem}", stacklevel=2)
            step.give_up_compiling()
            step(*arguments)

    def _advance(self, masked: bool) -> Callable[..., Flat]:
        def advance(carry: Flat, context: Flat, plan: Flat, data: Flat) -> Flat:
            at = plan[0].reshape(1)
            rows, live, keys, first = (part.index_select(0, at).squeeze(0) for part in plan[1:])
            x, y = pytree.tree_unflatten(data, self._data_spec)
            x = tree.map_leaves(lambda leaf: self._format(leaf[rows]), x)
            mask = None
            if masked:
                slots = torch.arange(rows.shape[-1], device=rows.device)
                mask = (slots < live.unsqueeze(-1)).to(self._program.dtype)
            leaves, spec = pytree.tree_flatten(Batch(x=x, y=y[rows], mask=mask, key=keys, first=first))
            step = self._steps.function(self._carry_spec, self._context_spec, spec, masked)
            after = step(carry, leaves, context)
            return [_where(live > 0, new, old) for new, old in zip(after, carry)] if masked else after

        return advance

    def _lay_out(self, leaves: Flat) -> Flat:
        """Static leaves as windows of one block per dtype, so that all of them can be copied out at once."""
        self._places: list[tuple[int, int]] = []
        dtypes = list(dict.fromkeys(leaf.dtype for leaf in leaves))
        ends = dict.fromkeys(dtypes, 0)
        for leaf in leaves:
            self._places.append((dtypes.index(leaf.dtype), ends[leaf.dtype]))
            ends[leaf.dtype] += -(-leaf.numel() // ALIGN) * ALIGN
        device = leaves[0].device
        self._blocks = [torch.zeros(ends[dtype], dtype=dtype, device=device) for dtype in dtypes]
        return [
            self._window(self._blocks[at], start, self._format(leaf)) for (at, start), leaf in zip(self._places, leaves)
        ]

    @staticmethod
    def _window(block: Tensor, start: int, like: Tensor) -> Tensor:
        return torch.as_strided(block, like.shape, like.stride(), start)

    def _format(self, leaf: Tensor) -> Tensor:
        channels = self._channels_last and leaf.dim() == 4 and leaf.is_floating_point()
        return leaf.contiguous(memory_format=torch.channels_last) if channels else leaf.contiguous()


def _where(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(condition.reshape(condition.shape + (1,) * (yes.dim() - condition.dim())), yes, no)


def _room(plan: Plan) -> int:
    """Steps to reserve: the next power of two, so that rounds of similar length share a capture."""
    return 1 << max(0, len(plan.live) - 1).bit_length()


def _balanced(steps: np.ndarray, slots: int) -> list[list[int]]:
    """Clients for each slot: longest first, each to the slot with least work so far."""
    queues: list[list[int]] = [[] for _ in range(slots)]
    load = np.zeros(slots, dtype=np.int64)
    for client in np.argsort(-steps, kind="stable"):
        slot = int(load.argmin())
        queues[slot].append(int(client))
        load[slot] += steps[client]
    return queues
