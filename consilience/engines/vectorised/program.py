"""A client rule bound to its task: functions of one client, and of a stacked group of clients."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from consilience.core.plans import Batch
from consilience.core.protocols import Channel, ClientRule
from consilience.core.task import Task
from consilience.core.tree import Tree, map_leaves, rows
from consilience.engines.compiler.in_place import InPlace, copy_all
from consilience.engines.compiler.layouts import lay_out_gradients
from consilience.engines.compiler.trace import Flat, Untraceable, trace
from consilience.engines.vectorised.traced import Traced, flattened, shapes

HOT = 48  # a step shape seen this often is worth tracing: a trace costs as much as some fifty untraced steps


class Context(NamedTuple):
    """What stays the same over a client's steps."""

    shared: Tree
    personal: Tree  # stacked [k, ...] for a group
    memory: Tree  # stacked [k, ...] for a group: {"client": the rule's, "channel": the channel's}, where there is any

    def of(self, client: int) -> Context:
        """One client's share of a group's context."""
        return Context(self.shared, rows(self.personal, client), rows(self.memory, client))

    def head(self, clients: int) -> Context:
        """The context of the first clients of a group."""
        part = slice(0, clients)
        return Context(self.shared, rows(self.personal, part), rows(self.memory, part))

    @property
    def message(self) -> Tree:
        """The broadcast as one client sees it."""
        return {**self.shared, **self.personal}

    @property
    def kept(self) -> Tree:
        """The memory of the client's rule."""
        return self.memory.get("client", {})


def memories(client: Tree, channel: Tree) -> Tree:
    """A client's memory of its rule and of its channel half, without empty parts."""
    return {name: kept for name, kept in (("client", client), ("channel", channel)) if kept}


def owned(carry: Tree) -> Tree:
    """The carry in memory of its own, for lanes that overwrite it: before, it may be a view of the broadcast."""
    return map_leaves(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), carry)


CONTEXT_DIMS = Context(None, 0, 0)  # type: ignore[arg-type]


class Program:
    """The functions a lane needs to run a rule: begin, steps, end."""

    def __init__(
        self,
        rule: ClientRule,
        channel: Channel,
        task: Task,
        dtype: torch.dtype,
        device: torch.device,
        bf16: bool,
    ) -> None:
        self.rule, self.channel, self.task = rule, channel, task
        self.dtype, self.device, self._bf16 = dtype, device, bf16
        self.one = Steps(self.step, grouped=False)
        self.group = Steps(self.step, grouped=True)
        self._matmul: Program | None = None
        self.begin = Traced(self._begin)  # (keys, context) -> stacked carries [k, ...] before the first step
        self.end = Traced(self._end)  # (carry, keys, context) -> stacked (replies as sent, memories)

    def by_matmul(self) -> Program:
        """The same program with convolutions as matrix products."""
        if self._matmul is None:
            task = self.task.to(self.device, self.dtype, matmul=True)
            self._matmul = Program(self.rule, self.channel, task, self.dtype, self.device, self._bf16)
        return self._matmul

    def _begin(self, keys: Tensor, context: Context) -> Tree:
        run = vmap(lambda _, c: self.rule.begin(self.task, c.message, c.kept), in_dims=(0, CONTEXT_DIMS))
        return run(keys, context)  # what clients share is an expanded view: see `owned`

    def step(self, carry: Tree, batch: Batch, context: Context) -> Tree:
        """One client's carry after one batch."""
        if self.rule.work.trains:
            batch = self.task.training_batch(batch)
        if not self._bf16:
            return self.rule.step(self.task, carry, batch, context.message, context.kept)
        # the cache of cast weights would outlive the transform level they were cast in
        with torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False):
            return self.rule.step(self.task, carry, batch, context.message, context.kept)

    def _end(self, carry: Tree, keys: Tensor, context: Context) -> tuple[Tree, Tree]:
        def finish(carry: Tree, key: Tensor, c: Context) -> tuple[Tree, Tree]:
            reply, kept = self.rule.end(self.task, carry, c.message, c.kept)
            sent, pending = self.channel.encode(reply, c.message, c.memory.get("channel", {}), key)
            return sent, memories(kept, pending)

        return vmap(finish, in_dims=(0, 0, CONTEXT_DIMS), randomness="different")(carry, keys, context)


class Steps:
    """A step over flat lists of tensors; shapes that recur are traced once and replayed without Python overhead.

    Tracing records the tensor operations of the vmapped, differentiated step (the same kernels in the same order, so
    the same bits), and skips the transform layers, which cost more than the arithmetic of a small model.
    """

    def __init__(self, step: Callable[[Tree, Batch, Context], Tree], *, grouped: bool) -> None:
        self._step, self.grouped = step, grouped
        self.hot = HOT
        self.met: Counter[Any] = Counter()
        self.traced: dict[Any, InPlace] = {}
        self.untraceable: str | None = None  # why, once it was tried

    @property
    def unlocked(self) -> bool:
        """Whether steps were traced, and all run outside Python's lock."""
        return bool(self.traced) and all(step._script is not None for step in self.traced.values())

    def function(
        self, carry_spec: Any, context_spec: Any, batch_spec: Any, masked: bool, weighted: bool
    ) -> Callable[..., Flat]:
        """(carry leaves, batch leaves, context leaves) -> carry leaves."""
        step: Callable[..., Tree] = self._step
        if self.grouped:
            batch_dims = Batch(0, 0, 0 if masked else None, 0, 0, 0 if weighted else None)  # type: ignore[arg-type]
            step = vmap(step, in_dims=(0, batch_dims, CONTEXT_DIMS), randomness="different")

        def flat_step(carry: Flat, batch: Flat, context: Flat) -> Flat:
            after = step(
                pytree.tree_unflatten(carry, carry_spec),
                pytree.tree_unflatten(batch, batch_spec),
                pytree.tree_unflatten(context, context_spec),
            )
            leaves, spec = pytree.tree_flatten(after)
            if spec != carry_spec:
                raise TypeError(f"step() changed the carry's structure from {carry_spec} to {spec}")
            return leaves

        return flat_step


class BoundSteps:
    """`Steps` for one group or client: the context is fixed, the carry is updated in place from batch to batch.

    It owns the carry: leaves that need no other layout are overwritten in place. One of several threads has pictures
    channels last.
    """

    def __init__(self, steps: Steps, carry: Tree, context: Context, *, threaded: bool = False) -> None:
        self._steps, self._threaded = steps, threaded
        self._given, self._context = list[Any](), list[Any]()
        structure = (flattened(carry, self._given), flattened(context, self._context))
        self._trees = carry, context
        # .data: rows of one tensor share a count of changes, and other threads change other rows meanwhile
        self._carry: Flat = [_channels_last(leaf.data) if threaded else leaf.data for leaf in self._given]
        # threads run a step in PyTorch's interpreter, which elsewhere would apply optimisations that round differently
        self._signature = (threaded, shapes(self._carry), shapes(self._context), structure)
        self._known: dict[Any, InPlace] = {}  # by batch shape, so that a step need not hash the whole signature

    def put_back(self) -> None:
        """Write the carry to where it was taken from: in a thread its pictures lie in memory of their own."""
        for given, leaf in zip(self._given, self._carry):
            if given.data_ptr() != leaf.data_ptr():
                given.copy_(leaf)

    def _flatten(self, batch: Batch) -> Flat:
        features = [batch.x] if isinstance(batch.x, Tensor) else pytree.tree_leaves(batch.x)
        return [*(map(_channels_last, features) if self._threaded else features), *batch[1:]]

    def __call__(self, batch: Batch, *, may_trace: bool = True) -> None:
        """One step."""
        leaves = self._flatten(batch)
        shape = tuple(None if leaf is None else leaf.shape for leaf in leaves)
        step = self._known.get(shape)
        if step is None:
            signature = (self._signature, shapes(leaves))
            step = self._steps.traced.get(signature)
            if step is None:
                self._steps.met[signature] += may_trace
                if may_trace and self._steps.met[signature] > self._steps.hot:
                    step = self._trace(signature, batch, leaves)
                if step is None:
                    copy_all(self._carry, self._function(batch)(self._carry, leaves, self._context))
                    return
            self._known[shape] = step
        step(self._carry, leaves, self._context)

    def trace(self, batch: Batch, worth: int) -> None:
        """Trace this batch's shape for threads, which cannot, if it was seen often, with `worth` more to come."""
        leaves = self._flatten(batch)
        signature = (self._signature, shapes(leaves))
        self._steps.met[signature] += worth
        if signature not in self._steps.traced and self._steps.met[signature] > self._steps.hot:
            self._trace(signature, batch, leaves)

    def _function(self, batch: Batch) -> Callable[..., Flat]:
        _, spec = pytree.tree_flatten(batch)
        masked, weighted = batch.mask is not None, batch.weight is not None
        carry, context = (pytree.tree_structure(tree) for tree in self._trees)
        return self._steps.function(carry, context, spec, masked, weighted)

    def _trace(self, signature: Any, batch: Batch, leaves: Flat) -> InPlace | None:
        """The traced step; None where what it does depends on values, so that it cannot be."""
        if self._steps.untraceable is not None:
            return None
        try:
            traced = trace(self._function(batch), self._carry, leaves, self._context)
        except Untraceable as reason:
            self._steps.untraceable = str(reason)
            warnings.warn(
                f"a client's step cannot be traced, since {reason}: it runs as it is, slower for a small model",
                stacklevel=2,
            )
            return None
        lay_out_gradients(traced)
        step = InPlace(traced, len(self._carry))
        if self._threaded:
            step.leave_lock(self._carry, leaves, self._context)
        self._steps.traced[signature] = step
        return step


def _channels_last(leaf: Tensor) -> Tensor:
    """Pictures channels last, which a processor computes faster; other leaves unchanged."""
    pictures = leaf.dim() == 4 and leaf.is_floating_point()
    return leaf.contiguous(memory_format=torch.channels_last) if pictures else leaf
