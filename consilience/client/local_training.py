"""The usual client: minimise the task's loss plus terms by a few passes of a local solver."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import grad

from consilience.client.memory.memory import Done, Memory
from consilience.client.solvers import SGD, Solver
from consilience.client.terms.term import Context, Term
from consilience.core.checks import check
from consilience.core.losses import average
from consilience.core.plans import Batch, Work
from consilience.core.task import Task
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Start from the received model, follow the gradient of loss + terms, send the model back."""

    solver: Solver = field(default_factory=SGD)
    work: Work = field(default_factory=Work)
    terms: tuple[Term, ...] = ()
    memory: tuple[Memory, ...] = ()

    def __post_init__(self) -> None:
        check(self)

    def init(self, start: Tree) -> Tree:
        """What the memories start from, by their names."""
        return {part.name: part.init(start) for part in self.memory}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """The received model, a fresh solver state, no loss yet."""
        model = message["model"]
        zero = torch.zeros((), dtype=torch.float64, device=message["round"].device)
        carry = {"model": model, "solver": self.solver.init(model["params"]), "loss": zero, "rows": zero}
        return {**carry, "steps": zero} if self.memory else carry

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """One gradient step on one batch."""
        params, buffers = carry["model"]["params"], carry["model"]["buffers"]

        def objective(params: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            model = {"params": params, "buffers": buffers}
            output, moved = task.apply(model, batch.x, train=True, mask=batch.mask, key=batch.key)
            loss = average(task.losses(output, batch.y), batch.mask)
            context = Context(task, message, memory, buffers, output)
            return sum((term(params, context, batch) for term in self.terms), loss), (loss.detach(), moved)

        grads, (loss, buffers) = grad(objective, has_aux=True)(params)
        params, solver = self.solver.step(params, grads, carry["solver"], message["round"])
        rows: Tensor | int = len(batch.y) if batch.mask is None else batch.mask.sum()
        after = {
            "model": {"params": params, "buffers": buffers},
            "solver": solver,
            "loss": carry["loss"] + loss * rows,
            "rows": carry["rows"] + rows,
        }
        return {**after, "steps": carry["steps"] + 1} if self.memory else after

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The model, and the mean loss met along the way (0 if no step was done)."""
        reply = {"model": carry["model"], "loss": carry["loss"] / carry["rows"].clamp(min=1)}
        kept: Tree = {}
        for part in self.memory:
            done = Done(carry["model"], message, memory, carry["steps"], self.solver)
            kept[part.name], said = part.update(memory[part.name], done)
            reply = {**reply, **said}
        return reply, kept
