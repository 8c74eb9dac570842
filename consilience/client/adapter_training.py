"""Local training of low-rank adapters: which factors are trained, at which rank, and with which merged products."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from consilience.client.local_training import LocalTraining
from consilience.client.wrapped import Wrapped
from consilience.core.capabilities import ChecksTask, PreparesTask, Reasons, capability
from consilience.core.plans import Batch
from consilience.core.protocols import ClientRule
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.layers import adapters
from consilience.layers.adapters import LORA, Factors, Pair

RANK = "rank"  # message key: how many rows of A and columns of B this client trains; the others are 0


@dataclass(frozen=True, kw_only=True)
class AdapterTraining(Wrapped):
    """Local training of a model with adapters W + scaling B A, found by their parameter names (`factors`).

    freeze_a: A is constant, so that only B is trained and sent.
    merges: products that the server has merged into the layers are constant during a round: they are received with the
    model and never sent back.
    If the message holds a `rank` r, the client trains only the first r rows of A and columns of B. The others are 0 in
    everything it receives and stay 0: where both factors are 0, neither has a gradient.
    """

    training: ClientRule = field(default_factory=LocalTraining)
    factors: Factors = LORA
    freeze_a: bool = False
    merges: bool = False
    replaces: ClassVar[Reasons] = {
        ChecksTask: "asks for adapters first, then for what training needs",
        PreparesTask: "changes the model after training has changed it",
    }

    def check_against(self, task: Task) -> None:
        """Refuse a model without adapters (the error says how to add them), and what training refuses."""
        names = [name for name, _ in task.module.named_parameters()] if self.freeze_a else []
        if not (self.freeze_a and adapters.pairs_in(names, self.factors)):
            adapters.pairs_of(task.start()["params"], self.factors)
        inner = capability(self.training, ChecksTask)
        if inner is not None:
            inner.check_against(task)

    def prepare(self, task: Task) -> Task:
        """The task with every A frozen, or with buffers for merged products; otherwise as training prepares it."""
        inner = capability(self.training, PreparesTask)
        task = task if inner is None else inner.prepare(task)
        if self.merges:
            return adapters.mergeable(task, self.factors)
        return adapters.freeze_a(task, self.factors) if self.freeze_a else task

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """As in training, from the trained part of the model."""
        self._refuse_unprepared(task, message["model"])
        return self.training.begin(*self._as_trained(task, message), memory)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """As in training."""
        task, message = self._as_trained(task, message)
        return self.training.step(task, carry, batch, message, memory)

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """As in training; the reply excludes merged products."""
        task, message = self._as_trained(task, message)
        return self.training.end(task, carry, message, memory)

    def _as_trained(self, task: Task, message: Tree) -> tuple[Task, Tree]:
        """(task, message) for the wrapped rule: merged products as constants, factors truncated to the rank."""
        model = message["model"]
        pairs = adapters.pairs_in(model["params"], self.factors)
        if self.merges:
            merged = {pair.merged: model["buffers"][pair.merged] for pair in pairs}
            buffers = {name: value for name, value in model["buffers"].items() if name not in merged}
            task, message = task.given(merged), {**message, "model": {**model, "buffers": buffers}}
        if RANK in message:
            message = adapters.within_rank(message, pairs, message[RANK])
        return task, message

    def _refuse_unprepared(self, task: Task, model: Tree) -> None:
        """Refuse a model that was not prepared for this rule."""
        pairs: tuple[Pair, ...] = adapters.pairs_in(model["params"], self.factors)
        if self.freeze_a:
            constant = adapters.pairs_in([name for name, _ in task.module.named_parameters()], self.factors)
            ready = bool(constant) and not pairs
        else:
            pairs = adapters.pairs_of(model["params"], self.factors)
            ready = not self.merges or all(pair.merged in model["buffers"] for pair in pairs)
        if not ready:
            raise Invalid(
                "this algorithm trains another form of the model: give the engine algorithm.prepared(task), as "
                "cs.train and configs do"
            )
