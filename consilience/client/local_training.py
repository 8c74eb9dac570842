"""Standard local training: minimise the task's loss plus terms by a few epochs of a local solver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from consilience.client.augmentations import Augmentation, augmented, mixed_losses, refuse_misfits
from consilience.client.memory.memory import ChecksSolver, Memory, OwnModel, TrainingEnd
from consilience.client.personal_layers import PersonalLayers, joined, split
from consilience.client.solver_wrappers import WeighsBatches, finished, solve
from consilience.client.solvers import SGD, Solver
from consilience.client.terms.one_pass import with_features
from consilience.client.terms.term import Context, NeedsMemory, ReadsFeatures, Term, WholeModel
from consilience.core import tree
from consilience.core.capabilities import ChecksTask
from consilience.core.plans import Batch, Work
from consilience.core.settings import Invalid, Whole, check
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.task.gradients import gradient
from consilience.task.losses import average


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Start from the received model, minimise loss + terms by gradient steps, send the model back.

    Leaves selected by `personal_layers` stay with the client: they are kept in its memory, replace the received ones,
    and are never sent. With `personal_epochs`, the first epochs train only these leaves and the rest only the others.
    """

    solver: Solver = field(default_factory=SGD)
    work: Work = field(default_factory=Work)
    terms: tuple[Term, ...] = ()
    memory: tuple[Memory, ...] = ()
    personal_layers: PersonalLayers | None = None
    personal_epochs: Whole = 0
    augment: tuple[Augmentation, ...] = ()  # in this order, in training only

    def __post_init__(self) -> None:
        check(self)
        _refuse_missing_memory(self.terms, self.memory)
        for part in self.memory:
            if isinstance(part, ChecksSolver):
                part.check_solver(self.solver)
        names = [part.name for part in self.memory]
        if len(set(names)) < len(names) or "personal_layers" in names:
            raise Invalid(
                f"memory holds {', '.join(names)}: no two parts may have one name, nor the name 'personal_layers'"
            )
        whole = [type(term).__name__ for term in self.terms if isinstance(term, WholeModel) and term.whole_model]
        if self.personal_layers is not None and whole:
            raise Invalid(
                f"personal_layers = {self.personal_layers!r} is incompatible with the term {whole[0]}: it follows how "
                "every leaf differs between clients and server, and the server never sees the personal layers"
            )
        if self.personal_epochs and self.personal_layers is None:
            raise Invalid(
                f"personal_epochs = {self.personal_epochs} needs personal_layers: say which leaves are trained first"
            )
        if self.personal_epochs and isinstance(self.solver, WeighsBatches):
            raise Invalid(
                f"personal_epochs = {self.personal_epochs} is incompatible with gradient accumulation: batches of the "
                "personal layers' last window would be met by other layers than they were computed with"
            )

    def check_against(self, task: Task) -> None:
        """Refuse a model or loss that a term or the personal layers do not support."""
        refuse_misfits(self.augment, task)
        for term in self.terms:
            if isinstance(term, ChecksTask):
                term.check_against(task)
        if self.personal_layers is not None:
            self.personal_layers.check_against(task, task.start())

    def check_rows(self, x: Any) -> None:
        """Refuse features that an augmentation does not support."""
        for part in self.augment:
            part.check_rows(x)

    def init(self, start: Tree) -> Tree:
        """Initial memories, by name."""
        kept = {part.name: part.init(start) for part in self.memory}
        return (
            kept
            if self.personal_layers is None
            else {**kept, "personal_layers": split(start, self.personal_layers.personal_names(start))[0]}
        )

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """The received model (with the client's own leaves), a new solver state, and a zero loss."""
        if self.personal_layers is not None:
            self.personal_layers.check_against(task, message["model"])
        model = self._received(message, memory)["model"]
        zero = torch.zeros((), dtype=torch.float64, device=message["round"].device)
        solver = self._states_by_layers(model) if self.personal_epochs else self.solver.init(model["params"])
        carry = {"model": model, "solver": solver, "loss": zero, "rows": zero}
        if self.personal_epochs:
            carry["epoch"] = zero
        return {**carry, "steps": zero} if self.memory else carry

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """One gradient step on one batch."""
        message = self._received(message, memory)
        batch, mixed = augmented(self.augment, batch) if self.augment else (batch, None)
        params, buffers = carry["model"]["params"], carry["model"]["buffers"]
        featured = callable(getattr(task.module, "features", None)) and any(
            isinstance(term, ReadsFeatures) and term.reads_features for term in self.terms
        )

        def objective(params: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            model = {"params": params, "buffers": buffers}
            options: dict[str, Any] = {"train": True, "mask": batch.mask, "key": batch.key}
            if featured:
                (output, z), moved = task.apply(model, batch.x, **options, through=with_features)
            else:
                (output, moved), z = task.apply(model, batch.x, **options), None
            losses = task.row_losses(output, batch) if mixed is None else mixed_losses(task, output, batch, mixed)
            loss = average(losses, batch.mask)
            context = Context(task, message, memory, buffers, output, z)
            return sum((term(params, context, batch) for term in self.terms), loss), (loss.detach(), moved)

        grads, (loss, buffers) = gradient(objective, params)
        rows: Tensor | int = len(batch.y) if batch.mask is None else batch.mask.sum()
        if self.personal_epochs:
            params, solver = self._step_by_layers(carry, grads, batch, message["round"])
        else:
            params, solver = solve(self.solver, params, grads, carry["solver"], message["round"], rows)
        after = {
            "model": {"params": params, "buffers": buffers},
            "solver": solver,
            "loss": carry["loss"] + loss * rows,
            "rows": carry["rows"] + rows,
        }
        if self.personal_epochs:
            after["epoch"] = carry["epoch"] + batch.first
        return {**after, "steps": carry["steps"] + 1} if self.memory else after

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The model, and the mean training loss (0 if no step was done)."""
        model, kept = finished(self.solver, carry["model"], carry["solver"], message["round"]), {}
        steps = carry["steps"] if self.memory else carry["rows"]  # only memories read it
        done = TrainingEnd(model, self._received(message, memory), memory, steps, self.solver)
        if self.personal_layers is not None:
            kept["personal_layers"], model = split(model, self.personal_layers.personal_names(model))
        reply = {"model": model, "loss": carry["loss"] / carry["rows"].clamp(min=1)}
        for part in self.memory:
            kept[part.name], said = part.update(memory[part.name], done)
            reply = {**reply, **said}
        return reply, kept

    @property
    def is_personal(self) -> bool:
        """Whether its clients have personal models."""
        return self.personal_layers is not None or any(isinstance(part, OwnModel) for part in self.memory)

    def personal(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """This client's personal model."""
        own = [memory[part.name] for part in self.memory if isinstance(part, OwnModel) and part.name in memory]
        return own[0] if own else self._received(message, memory)["model"]

    def kept_leaves(self, model: Tree) -> frozenset[str]:
        """Names of the leaves that stay with the client."""
        return frozenset() if self.personal_layers is None else self.personal_layers.personal_names(model)

    def completed(self, model: Tree, memory: Tree) -> Tree:
        """The model with the client's own leaves filled in."""
        return model if self.personal_layers is None else joined(model, memory.get("personal_layers", {}))

    def _received(self, message: Tree, memory: Tree) -> Tree:
        """The message with the client's own leaves in the model."""
        if self.personal_layers is None:
            return message
        return {**message, "model": self.completed(message["model"], memory)}

    def _states_by_layers(self, model: Tree) -> Tree:
        """Solver states of the personal layers and of the others, which are trained in different epochs."""
        assert self.personal_layers is not None
        mine, others = split(model, self.personal_layers.personal_names(model))
        return {"personal_layers": self.solver.init(mine["params"]), "shared": self.solver.init(others["params"])}

    def _step_by_layers(self, carry: Tree, grads: Tree, batch: Batch, round: Tensor) -> tuple[Tree, Tree]:
        """(parameters, solver states) after a step on the leaves that are trained in this epoch."""
        assert self.personal_layers is not None
        params = carry["model"]["params"]
        names, states = self.personal_layers.personal_names(carry["model"]), {}
        personal_turn = carry["epoch"] + batch.first <= self.personal_epochs
        for part, turn, mine in (("personal_layers", personal_turn, True), ("shared", ~personal_turn, False)):
            old = {name: value for name, value in params.items() if (name in names) == mine}
            new, state = self.solver.step(old, {n: grads[n] for n in old}, carry["solver"][part], round)
            params = {**params, **tree.where(turn, new, old)}
            states[part] = tree.where(turn, state, carry["solver"][part])
        return params, states


def _refuse_missing_memory(terms: tuple[Term, ...], memory: tuple[Memory, ...]) -> None:
    """Refuse a term that reads a memory which is not configured; the error names the fix."""
    kept = [part.name for part in memory]
    for term in terms:
        for name in term.needs if isinstance(term, NeedsMemory) else ():
            if name not in kept:
                raise Invalid(
                    f"the term {type(term).__name__} reads the client's memory {name!r}, but the client keeps "
                    f"{', '.join(kept) or 'none'}: add the memory, or use a recipe that brings it along"
                )
