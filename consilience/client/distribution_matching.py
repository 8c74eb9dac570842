"""FedDM's client: a few synthetic rows per class whose model outputs match those of the client's rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from consilience.client.condensed_rows import Start, first_rows, membership, no_rows_yet, outputs_and_features
from consilience.client.solver_wrappers import refuse_accumulation
from consilience.client.solvers import Adam, Solver
from consilience.core import rng
from consilience.core.plans import Batch, Work
from consilience.core.settings import Count, Invalid, NonNegative, check
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.task.gradients import gradient


@dataclass(frozen=True, kw_only=True)
class DistributionMatching:
    """min over s of sum_c |mean f(x_c; w') - mean f(s_c; w')|^2, by steps with a new w' near the received w each.

    f is the model's output and, where the module has `features(x)`, its features. w' = w + r u, u a random direction,
    r uniform in [0, radius]. The reply holds the synthetic rows [C, n, ...] and the share of every class; no model.
    """

    per_class: Count = 10
    shape: tuple[Count, ...] | None = None  # of a row; None: the input size of the model's first dense layer
    start: Start = "noise"  # "rows" and "means" start from real rows: more accurate, but the reply resembles them
    radius: NonNegative = 5.0
    solver: Solver = field(default_factory=lambda: Adam(lr=0.05))
    work: Work = field(default_factory=lambda: Work(epochs=50, batch_size=256))

    def __post_init__(self) -> None:
        check(self)
        refuse_accumulation(self.solver)

    def check_against(self, task: Task) -> None:
        """Refuse a task without class numbers."""
        if not task.kind.class_per_row:
            raise Invalid(f"distribution matching needs class numbers, one for each row: {task.kind.name} has none")

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """Zero rows, which the first step initialises."""
        self.check_against(task)
        return no_rows_yet(message["model"]["params"], self.per_class, self.shape, self.solver)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """One gradient step of the synthetic rows towards the class means of a batch."""
        x = torch.where(carry["steps"] > 0, carry["x"], first_rows(carry["x"], batch, self.start))
        model = {**message["model"], "params": self._nearby(message["model"]["params"], batch.key)}
        member = membership(batch, len(x), x.dtype)  # [B, C]
        count = member.sum(0)  # [C]
        seen = outputs_and_features(task, model, batch.x)  # [B, d]
        wanted = (member.T @ seen) / count.clamp(min=1).unsqueeze(1)  # [C, d]

        def apart(rows: Tree) -> tuple[Tensor, Tensor]:
            seen = outputs_and_features(task, model, rows["x"].flatten(0, 1))
            found = seen.reshape(len(x), self.per_class, -1).mean(1)  # [C, d]
            loss = ((found - wanted).square().sum(1) * (count > 0)).sum()
            return loss, loss.detach()

        grads, loss = gradient(apart, {"x": x})
        after, solver = self.solver.step({"x": x}, grads, carry["solver"], message["round"])
        return {
            "x": after["x"],
            "solver": solver,
            "labels": carry["labels"] + count,
            "loss": carry["loss"] + loss,
            "steps": carry["steps"] + 1,
        }

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The synthetic rows, the class shares, and the mean distance over the steps."""
        labels = carry["labels"] / carry["labels"].sum().clamp(min=1)
        return {"x": carry["x"], "labels": labels, "loss": carry["loss"] / carry["steps"].clamp(min=1)}, memory

    def _nearby(self, params: Tree, key: Tensor) -> Tree:
        """A random model within the radius."""
        if not self.radius:
            return params
        numbers = [leaf.numel() for leaf in params.values()]
        direction = rng.normals(rng.fold(key, 2**33 + 1), sum(numbers))
        length = self.radius * rng.uniforms(rng.fold(key, 2**33 + 2), 1)
        moves = (direction * (length / direction.square().sum().sqrt())).split(numbers)
        return {n: leaf + move.reshape(leaf.shape).to(leaf.dtype) for (n, leaf), move in zip(params.items(), moves)}
