"""A step captured as CUDA graphs over static storage."""

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
from consilience.engines.compiler.biases import add_biases_in_products
from consilience.engines.compiler.constant_casts import cast_constants_once
from consilience.engines.compiler.convolution_gradients import fix_gradient_layouts, write_channels_last
from consilience.engines.compiler.in_place import InPlace, copy_all
from consilience.engines.compiler.rectified_convolutions import join_rectifiers
from consilience.engines.compiler.small_embeddings import multiply_small_embeddings
from consilience.engines.compiler.thin_convolutions import multiply_thin_gradients
from consilience.engines.compiler.trace import Flat, trace
from consilience.engines.vectorised.program import Context, Program, Steps

ALIGN = 64  # values: kernels want the start of a tensor on a boundary
MUCH = 2**30  # bytes reserved but not in use, above which memory is released


class SharedCapture:
    """What captures of equal shape share: traced steps, and storage for the part of the context that is the same."""

    def __init__(self, context: Context) -> None:
        self.traces: dict[bool, InPlace] = {}  # by whether the step is masked
        self.shared: Flat = [leaf.clone() for leaf in pytree.tree_leaves(context.shared)]


class CarryLayout:
    """Where a carry's leaves lie in one block of memory per dtype, so that all of them are copied at once."""

    def __init__(self, leaves: Flat, *, channels_last: bool = False) -> None:
        self._dtypes = list(dict.fromkeys(leaf.dtype for leaf in leaves))
        self._ends = [0] * len(self._dtypes)
        self._places: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []  # block, start, shape, strides
        for leaf in leaves:
            at = self._dtypes.index(leaf.dtype)
            self._places.append((at, self._ends[at], tuple(leaf.shape), formatted(leaf, channels_last).stride()))
            self._ends[at] += -(-leaf.numel() // ALIGN) * ALIGN

    def blocks(self, device: torch.device, *several: int) -> Flat:
        """Memory for one carry, or for several."""
        return [torch.zeros(*several, end, dtype=dtype, device=device) for dtype, end in zip(self._dtypes, self._ends)]

    def fill(self, blocks: Flat, leaves: Flat) -> None:
        """Copy the leaves of several carries, stacked, to the blocks; what all carries share is gathered once."""
        if any(leaf.stride(0) for leaf in leaves):
            copy_all(self.windows(blocks), leaves)
            return
        one = self.blocks(blocks[0].device)
        copy_all(self.windows(one), [leaf[0] for leaf in leaves])
        for block, row in zip(blocks, one):
            block.copy_(row)

    def windows(self, blocks: Flat) -> Flat:
        """The leaves in their places; of several carries, stacked."""
        several = blocks[0].shape[:-1]
        return [
            torch.as_strided(blocks[at], (*several, *shape), (*blocks[at].stride()[:-1], *strides), start)
            for at, start, shape, strides in self._places
        ]


def formatted(leaf: Tensor, channels_last: bool) -> Tensor:
    """The leaf as contiguous memory, images in channels-last format if requested."""
    pictures = channels_last and leaf.dim() == 4 and leaf.is_floating_point()
    return leaf.contiguous(memory_format=torch.channels_last if pictures else torch.contiguous_format)


class Captured:
    """Static storage for a group (or one client) and the graphs that advance it by one step."""

    def __init__(
        self,
        steps: Steps,
        program: Program,
        carry: Tree,
        layout: CarryLayout,
        context: Context,
        plan: Plan,
        store: Rows,
        common: SharedCapture,
        *,
        pool: Any,
        compile: bool = False,
        channels_last: bool = False,
    ) -> None:
        self._steps, self._program, self._traces = steps, program, common.traces
        self._compile, self._channels_last = compile, channels_last
        leaves, self._carry_spec = pytree.tree_flatten(carry)
        self.layout, self.blocks = layout, layout.blocks(leaves[0].device)
        self.carry: Flat = layout.windows(self.blocks)
        copy_all(self.carry, leaves)
        self.shared = common.shared
        _, self._context_spec = pytree.tree_flatten(context)
        self._own: Flat = [leaf.clone() for leaf in pytree.tree_leaves((context.personal, context.memory))]
        room, shape, device = room_for(plan), plan.rows.shape, plan.rows.device
        self._plan: Flat = [
            torch.zeros((), dtype=torch.int64, device=device),  # the counter
            torch.zeros(room, *shape[1:], dtype=torch.int64, device=device),
            torch.zeros(room, *plan.live.shape[1:], dtype=torch.int64, device=device),
            torch.zeros(room, *plan.keys.shape[1:], dtype=torch.int64, device=device),
            torch.zeros(room, *plan.first.shape[1:], dtype=torch.bool, device=device),
        ]
        self._features = store.features
        self._data, self._data_spec = pytree.tree_flatten((store.x, store.y, store.weight))
        self._graphs: dict[tuple[bool, int], torch.cuda.CUDAGraph] = {}
        self._tried: set[bool] = set()  # which steps, by whether they are masked, ran before a capture
        self._pool = pool  # graphs that never run side by side use the same memory
        # cuBLAS keeps one workspace per stream: graphs that may run side by side are captured on streams of their own
        self._stream = torch.cuda.Stream()

    def load(self, context: Context, plan: Plan) -> None:
        """Copy what is this group's own, and its plan, into the static storage."""
        copy_all(self._own, pytree.tree_leaves((context.personal, context.memory)))
        self._plan[0].zero_()
        live = torch.from_numpy(np.ascontiguousarray(plan.live)).to(self._plan[0].device, non_blocking=True)
        for static, fresh in zip(self._plan[1:], (plan.rows, live, plan.keys, plan.first)):
            static[: len(fresh)].copy_(fresh)

    def replay(self, *, masked: bool, times: int) -> None:
        """Queue this many steps."""
        if (masked, times) not in self._graphs:
            self._graphs[masked, times] = self._capture(masked, times)
        self._graphs[masked, times].replay()

    def unload(self) -> Tree:
        """A copy of the carry, out of the static storage."""
        return pytree.tree_unflatten(self.layout.windows([block.clone() for block in self.blocks]), self._carry_spec)

    def _capture(self, masked: bool, times: int) -> torch.cuda.CUDAGraph:
        arguments = (self.carry, [*self.shared, *self._own], self._plan, self._data)
        if masked not in self._traces:
            keeps_old = masked and self._steps.grouped
            traced, leaves = trace(self._advance(masked, keeps_old), *arguments), len(self.carry)
            if torch.backends.cudnn.deterministic:
                multiply_thin_gradients(traced)
                multiply_small_embeddings(traced)
            join_rectifiers(traced)
            add_biases_in_products(traced)
            cast_constants_once(traced)
            if self._compile and self._channels_last:
                write_channels_last(traced)
                fix_gradient_layouts(traced)
            options = {"products": True, "fused": not self._compile, "compile": self._compile}
            self._traces[masked] = InPlace(traced, leaves, keeps_old=keeps_old, **options)
        step = self._traces[masked]
        if masked not in self._tried:
            self._try_before_capture(step, arguments)
            self._tried.add(masked)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            for _ in range(times):
                step(*arguments)
                self._plan[0].add_(1)
        return graph

    def _try_before_capture(self, step: InPlace, arguments: tuple[Flat, ...]) -> None:
        """Run a step some times, so that libraries pick kernels and workspaces; the carry stays as it was.

        Memory that tracing used on another stream is given back first, for streams do not share it: a large model's
        activations would be reserved twice. A second capture of the same step needs no trial, whose activations would
        lie beside those of the first capture.
        """
        before = [block.clone() for block in self.blocks]
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > MUCH:
            torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            self._try(step, arguments)
            for _ in range(2):
                step(*arguments)
            copy_all(self.blocks, before)
        torch.cuda.synchronize()

    def _try(self, step: InPlace, arguments: tuple[Flat, ...]) -> None:
        try:
            step(*arguments)
            return
        except torch.OutOfMemoryError:
            raise  # smaller groups may fit
        except Exception as problem:
            if not self._compile:
                raise
            warnings.warn(f"the step cannot be compiled and runs uncompiled: {problem}", stacklevel=2)
        step.give_up_compiling()  # now that the exception no longer keeps the failed step's memory
        step(*arguments)

    def _advance(self, masked: bool, keeps_old: bool) -> Callable[..., Flat]:
        """The step at the counter; in a group, a client without rows left keeps its carry."""

        def advance(carry: Flat, context: Flat, plan: Flat, data: Flat) -> Flat:
            at = plan[0].reshape(1)
            rows, live, keys, first = (part.index_select(0, at).squeeze(0) for part in plan[1:])
            x, y, weight = pytree.tree_unflatten(data, self._data_spec)
            x = self._features(tree.map_leaves(lambda leaf: leaf[rows], x))
            x = tree.map_leaves(lambda leaf: formatted(leaf, self._channels_last), x)
            mask = None
            if masked:
                slots = torch.arange(rows.shape[-1], device=rows.device)
                mask = (slots < live.unsqueeze(-1)).to(self._program.dtype)
            weight = None if weight is None else weight[rows]
            batch = Batch(x=x, y=y[rows], mask=mask, key=keys, first=first, weight=weight)
            leaves, spec = pytree.tree_flatten(batch)
            step = self._steps.function(self._carry_spec, self._context_spec, spec, masked, weight is not None)
            after = step(carry, leaves, context)
            return [_where(live > 0, new, old) for new, old in zip(after, carry)] if keeps_old else after

        return advance


def _where(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(condition.reshape(condition.shape + (1,) * (yes.dim() - condition.dim())), yes, no)


def room_for(plan: Plan) -> int:
    """Steps to reserve: the next power of two, so that rounds of similar length share a capture."""
    return 1 << max(0, len(plan.live) - 1).bit_length()
