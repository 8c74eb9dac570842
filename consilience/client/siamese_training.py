"""FedSiam-DA's client: its model and a copy of the global one, trained towards each other with stop-gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from consilience.client.augmentations import Augmentation, augmented, mixed_losses, refuse_misfits
from consilience.client.cosine import cosine
from consilience.client.memory.memory import Memory, TrainingEnd
from consilience.client.memory.models import PreviousModel
from consilience.client.solver_wrappers import finished, solve
from consilience.client.solvers import SGD, Solver
from consilience.client.terms.term import Context, Term
from consilience.core.capabilities import ChecksTask
from consilience.core.plans import Batch, Work
from consilience.core.settings import Invalid, NonNegative, check
from consilience.core.task import Task
from consilience.core.tree import Tree, where
from consilience.task.losses import average


class SiameseOutputs(NamedTuple):
    """Outputs of a siamese model for a batch."""

    z: Tensor  # [B, d] representation
    p: Tensor  # [B, d] prediction of the other branch's representation
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class SiameseTraining:
    """loss + mu (cos(z_past, z) - 1/2 cos(p', sg z) - 1/2 cos(p, sg z')): ' is a private copy of the received model.

    The copy is trained together with the client's model, on the one term that depends on it, and dropped after the
    round; `freeze_global` keeps it as received. The past model is the client's model at the end of its last epoch
    (`history` "round": of its last round); in its very first epoch there is none. `sequential` updates the copy before
    the client's model uses it. Needs a model with features(x), predict(z) and head(z).
    Ablations: with `stop_gradient=False` sg is the identity, so that both terms move both models; with
    `predictor=False` p = z, and predict(z) is not used.
    """

    solver: Solver = field(default_factory=SGD)
    copy_solver: Solver | None = None  # None: the client's solver, with a separate state
    work: Work = field(default_factory=Work)
    mu: NonNegative = 0.1
    freeze_global: bool = False
    history: Literal["epoch", "round"] = "epoch"
    sequential: bool = False
    stop_gradient: bool = True
    predictor: bool = True
    terms: tuple[Term, ...] = ()
    memory: tuple[Memory, ...] = (PreviousModel(),)
    augment: tuple[Augmentation, ...] = ()  # both models use the same augmented rows

    def __post_init__(self) -> None:
        check(self)
        if self.freeze_global and self.sequential:
            raise Invalid("sequential = True has no effect with freeze_global = True: only one model moves")
        if "previous" not in [part.name for part in self.memory]:
            raise Invalid("SiameseTraining.memory must hold PreviousModel(): the client is pushed from its own past")

    def check_against(self, task: Task) -> None:
        """Refuse a model without heads, or one that a term does not support."""
        for method in ("features(x)", *(("predict(z)",) if self.predictor else ()), "head(z)"):
            if not callable(getattr(task.module, method.partition("(")[0], None)):
                raise Invalid(
                    f"{type(task.module).__name__} has no {method}, which siamese training needs: use model.name = "
                    "'siamese' (in Python models.siamese.siamese_heads), which puts projection and prediction heads "
                    "on any backbone"
                )
        refuse_misfits(self.augment, task)
        for term in self.terms:
            if isinstance(term, ChecksTask):
                term.check_against(task)

    def check_rows(self, x: Any) -> None:
        """Refuse features that an augmentation does not support."""
        for part in self.augment:
            part.check_rows(x)

    def init(self, start: Tree) -> Tree:
        """Initial memories, by name."""
        return {part.name: part.init(start) for part in self.memory}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """The received model twice, new solver states, and the past model from memory."""
        self.check_against(task)
        model = message["model"]
        zero = torch.zeros((), dtype=torch.float64, device=message["round"].device)
        carry = {"model": model, "solver": self.solver.init(model["params"]), "loss": zero, "rows": zero, "steps": zero}
        if not self.freeze_global:
            carry |= {"copy": model, "copy_solver": self._copies.init(model["params"])}
        return {**carry, "past": memory["previous"]} if self.history == "epoch" else carry

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """One gradient step of the client's model, and one of the copy."""
        carry = self._with_past(carry, batch)
        batch, mixed = augmented(self.augment, batch)
        buffers = carry["model"]["buffers"]
        past = carry["past"] if self.history == "epoch" else memory["previous"]
        z_past = _still(task, past["model"], batch)

        def local(
            params: Tree, copy: SiameseOutputs, joint: bool = False
        ) -> tuple[Tensor, tuple[Tensor, Tree, Tensor]]:
            seen, moved = self._outputs(task, {"params": params, "buffers": buffers}, batch)
            logits = seen.logits
            losses = task.row_losses(logits, batch) if mixed is None else mixed_losses(task, logits, batch, mixed)
            loss = average(losses, batch.mask)
            away = average(cosine(z_past, seen.z), batch.mask)  # +cos: pushes away from the past model
            away = torch.where(past["known"], away, torch.zeros_like(away))
            # Paper: eq (11) is ce + mu hist + stop. Here: ce + mu (hist + stop), as Algorithm 1 and eq (5) have it.
            total = loss + self.mu * (away + self._closer(seen, copy, batch, joint))
            context = Context(task, message, memory, buffers, seen.logits)
            total = sum((term(params, context, batch) for term in self.terms), total)
            return total, (loss.detach(), moved, seen.z)

        grads, (loss, moved, _), after = self._gradients(local, task, carry, batch, message)
        rows = _rows(batch)
        state = carry["solver"]
        params, solver = solve(self.solver, carry["model"]["params"], grads, state, message["round"], rows)
        return {
            **carry,
            **after,
            "model": {"params": params, "buffers": moved},
            "solver": solver,
            "loss": carry["loss"] + loss * rows,
            "rows": carry["rows"] + rows,
            "steps": carry["steps"] + 1,
        }

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The client's model and the mean training loss; the copy is dropped."""
        model = finished(self.solver, carry["model"], carry["solver"], message["round"])
        reply = {"model": model, "loss": carry["loss"] / carry["rows"].clamp(min=1)}
        kept: Tree = {}
        done = TrainingEnd(model, message, memory, carry["steps"], self.solver)
        for part in self.memory:
            kept[part.name], said = part.update(memory[part.name], done)
            reply = {**reply, **said}
        return reply, kept

    @property
    def _copies(self) -> Solver:
        return self.copy_solver or self.solver

    def _with_past(self, carry: Tree, batch: Batch) -> Tree:
        """At a new epoch the current model becomes the past one; the first epoch of a round keeps the one in memory."""
        if self.history == "round":
            return carry
        new = {"model": carry["model"], "known": torch.ones_like(carry["past"]["known"])}
        return {**carry, "past": where(batch.first & (carry["steps"] > 0), new, carry["past"])}

    def _closer(self, own: SiameseOutputs, other: SiameseOutputs, batch: Batch, joint: bool = False) -> Tensor:
        """One model's part of L_stop: -1/2 cos(p, sg z') and, without stop-gradient, -1/2 cos(p', z).

        `joint`: the second half is left out, because the caller differentiates both models at once.
        """
        near = self._half(own.p, other.z, batch)
        return near if self.stop_gradient or joint else near + self._half(other.p, own.z, batch)

    def _half(self, p: Tensor, z: Tensor, batch: Batch) -> Tensor:
        """-1/2 cos(p, sg z): pulls p towards z, which gets no gradient."""
        return -0.5 * average(cosine(p, z.detach() if self.stop_gradient else z), batch.mask)

    def _gradients(self, local: Any, task: Task, carry: Tree, batch: Batch, message: Tree) -> tuple[Tree, Any, Tree]:
        """(gradients of the client's parameters, what `local` reports, the updated copy and its solver state)."""
        params = carry["model"]["params"]
        if self.freeze_global:
            return (*grad(local, has_aux=True)(params, self._frozen(task, message["model"], batch)), {})
        buffers = carry["copy"]["buffers"]

        def pulled(copied: Tree, client: SiameseOutputs) -> tuple[Tensor, Tree]:
            seen, moved = self._outputs(task, {"params": copied, "buffers": buffers}, batch)
            return self.mu * self._closer(seen, client, batch), moved

        def both(params: Tree, copied: Tree) -> tuple[Tensor, Any]:
            seen, moved = self._outputs(task, {"params": copied, "buffers": buffers}, batch)
            total, told = local(params, seen, joint=True)
            return total + self.mu * self._half(seen.p, told[2], batch), (told, moved)

        def step(grads: Tree, moved: Tree) -> Tree:
            copy, state = carry["copy"]["params"], carry["copy_solver"]
            copied, solver = solve(self._copies, copy, grads, state, message["round"], _rows(batch))
            return {"copy": {"params": copied, "buffers": moved}, "copy_solver": solver}

        if not self.sequential:
            (grads, pulls), (told, moved) = grad(both, argnums=(0, 1), has_aux=True)(params, carry["copy"]["params"])
            return grads, told, step(pulls, moved)
        with torch.no_grad():
            client = self._outputs(task, carry["model"], batch)[0]
        after = step(*grad(pulled, has_aux=True)(carry["copy"]["params"], client))
        with torch.no_grad():  # a second pass over the same batch: its statistics are not counted again
            copy = self._outputs(task, {"params": after["copy"]["params"], "buffers": buffers}, batch)[0]
        return (*grad(local, has_aux=True)(params, copy), after)

    def _outputs(self, task: Task, model: Tree, batch: Batch, train: bool = True) -> tuple[SiameseOutputs, Tree]:
        """(all views, buffers) of a model."""
        views = _views if self.predictor else _views_without_predictor
        return task.apply(model, batch.x, train=train, mask=batch.mask, key=batch.key, through=views)

    @torch.no_grad()
    def _frozen(self, task: Task, model: Tree, batch: Batch) -> SiameseOutputs:
        """Views of a frozen copy, in evaluation mode; its p is read only without stop-gradient."""
        if not self.stop_gradient:
            return self._outputs(task, model, batch, train=False)[0]
        z = _still(task, model, batch)
        return SiameseOutputs(z, z, z)


def _rows(batch: Batch) -> Tensor | int:
    return len(batch.y) if batch.mask is None else batch.mask.sum()


def _views(module: Any, x: Any) -> SiameseOutputs:
    z = module.features(x)
    return SiameseOutputs(z, module.predict(z), module.head(z))


def _views_without_predictor(module: Any, x: Any) -> SiameseOutputs:
    z = module.features(x)
    return SiameseOutputs(z, z, module.head(z))


@torch.no_grad()
def _still(task: Task, model: Tree, batch: Batch) -> Tensor:
    """z of a frozen model, in evaluation mode."""
    return task.features(model, batch.x)
