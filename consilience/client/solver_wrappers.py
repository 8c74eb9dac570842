"""Wrappers around any solver: learning-rate schedules, gradient clipping, gradient accumulation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from consilience.client.solvers import SGD, Solver
from consilience.core import tree
from consilience.core.rate_schedules import RateSchedule
from consilience.core.settings import Invalid, Positive, Range, check
from consilience.core.tree import Tree, leaves, map_leaves

Several = Annotated[int, Range(least=2)]


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A solver with learning rate lr x rounds(finished rounds) x steps(finished steps of this round).

    Every step is taken at the full rate and then scaled: a solver's step is proportional to its rate, weight decay
    included, and its state does not depend on the rate.
    """

    solver: Solver = field(default_factory=SGD)
    rounds: RateSchedule | None = None
    steps: RateSchedule | None = None

    def __post_init__(self) -> None:
        check(self)
        refuse_accumulation(self.solver)
        if self.rounds is None and self.steps is None:
            raise Invalid("Scheduled needs a schedule over rounds, or over the steps of a round: give one")

    @property
    def lr(self) -> float:
        """The base rate of the schedules."""
        return self.solver.lr

    def init(self, params: Tree) -> Tree:
        """The solver's state, and the step count if the rate depends on it."""
        state = {"solver": self.solver.init(params)}
        return {**state, "count": _zero(params)} if self.steps is not None else state

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """w <- w + factor (step(w) - w)."""
        moved, inner = self.solver.step(params, grads, state["solver"], round)
        after, factor = {"solver": inner}, torch.ones((), dtype=torch.float64, device=round.device)
        if self.rounds is not None:
            factor = factor * self.rounds.factor_at(round)
        if self.steps is not None:
            factor = factor * self.steps.factor_at(state["count"])
            after["count"] = state["count"] + 1
        return map_leaves(lambda w, new: w + factor.to(w.dtype) * (new - w), params, moved), after


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """A solver whose gradient is clipped first, as torch.nn.utils.clip_grad_norm_ (`norm`) or clip_grad_value_ do."""

    solver: Solver = field(default_factory=SGD)
    norm: Positive | None = None  # maximum norm of the gradient over all parameters
    value: Positive | None = None  # maximum absolute value of each coordinate

    def __post_init__(self) -> None:
        check(self)
        refuse_accumulation(self.solver)
        if (self.norm is None) == (self.value is None):
            raise Invalid(
                f"Clipped.norm = {self.norm} and Clipped.value = {self.value}: give one of the two, as the gradient is "
                "clipped by its norm or by its coordinates"
            )

    @property
    def lr(self) -> float:
        """The solver's rate."""
        return self.solver.lr

    def init(self, params: Tree) -> Tree:
        """The solver's state."""
        return self.solver.init(params)

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """The solver's step along the clipped gradient."""
        if self.value is not None:
            bound = self.value
            return self.solver.step(params, map_leaves(lambda g: g.clamp(-bound, bound), grads), state, round)
        norms = [torch.linalg.vector_norm(leaf) for leaf in leaves(grads)]
        scale = (self.norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        return self.solver.step(params, map_leaves(lambda g: g * scale.to(g.dtype), grads), state, round)


@runtime_checkable
class WeighsBatches(Protocol):
    """A solver that needs the number of rows of each batch, and the end of a round."""

    def step_on(self, params: Tree, grads: Tree, state: Tree, round: Tensor, rows: Tensor) -> tuple[Tree, Tree]:
        """(parameters, state) after one batch with this many rows."""
        ...

    def finish(self, params: Tree, state: Tree, round: Tensor) -> Tree:
        """The parameters after the last batch of a round."""
        ...


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """One solver step per `every` batches, along the mean gradient over all their rows.

    Batches left over at the end of a client's round make one last step.
    """

    solver: Solver = field(default_factory=SGD)
    every: Several = 2  # batches

    def __post_init__(self) -> None:
        check(self)
        refuse_accumulation(self.solver)

    @property
    def lr(self) -> float:
        """The solver's rate."""
        return self.solver.lr

    def init(self, params: Tree) -> Tree:
        """The solver's state, and no gradient yet."""
        zero = _zero(params)
        sums = map_leaves(torch.zeros_like, params)
        return {"solver": self.solver.init(params), "sum": sums, "rows": zero, "batches": zero.clone()}

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """A step in which every batch has the same weight."""
        return self.step_on(params, grads, state, round, torch.ones_like(state["rows"]))

    def step_on(self, params: Tree, grads: Tree, state: Tree, round: Tensor, rows: Tensor) -> tuple[Tree, Tree]:
        """Accumulate the batch; take a solver step if it is the last of its window."""
        weight = rows.to(torch.float64)
        gathered = {
            "solver": state["solver"],
            "sum": map_leaves(lambda s, g: s + weight.to(g.dtype) * g, state["sum"], grads),
            "rows": state["rows"] + weight,
            "batches": state["batches"] + 1,
        }
        moved, inner = self._move(params, gathered, round)
        due = gathered["batches"] >= self.every
        return tree.where(due, moved, params), tree.where(due, {"solver": inner, **self._empty(gathered)}, gathered)

    def finish(self, params: Tree, state: Tree, round: Tensor) -> Tree:
        """A last step along the remaining gradient."""
        return tree.where(state["batches"] > 0, self._move(params, state, round)[0], params)

    def _move(self, params: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        rows = state["rows"].clamp(min=1)
        mean = map_leaves(lambda s: s / rows.to(s.dtype), state["sum"])
        return self.solver.step(params, mean, state["solver"], round)

    def _empty(self, state: Tree) -> Tree:
        return map_leaves(torch.zeros_like, {name: state[name] for name in ("sum", "rows", "batches")})


def solve(solver: Solver, params: Tree, grads: Tree, state: Tree, round: Tensor, rows: Any) -> tuple[Tree, Tree]:
    """(parameters, state) after a batch with this many rows."""
    if isinstance(solver, WeighsBatches):
        count = rows if isinstance(rows, Tensor) else torch.full((), rows, device=round.device)
        return solver.step_on(params, grads, state, round, count)
    return solver.step(params, grads, state, round)


def finished(solver: Solver, model: Tree, state: Tree, round: Tensor) -> Tree:
    """The model after the last batch of a round."""
    if not isinstance(solver, WeighsBatches):
        return model
    return {**model, "params": solver.finish(model["params"], state, round)}


def refuse_accumulation(solver: Solver) -> None:
    """Refuse a solver that needs batch sizes and ends of rounds where these are not passed on."""
    if isinstance(solver, WeighsBatches):
        raise Invalid(
            f"{solver!r} is not supported here: gradient accumulation must be the outermost solver of local training"
        )


def plain_sgd(solver: Solver) -> SGD | None:
    """The underlying SGD without momentum, if its rate is constant within a round; else None."""
    if isinstance(solver, Scheduled) and solver.steps is None:
        solver = solver.solver
    return solver if isinstance(solver, SGD) and not solver.momentum else None


def rate_in(solver: Solver, round: Tensor) -> Tensor:
    """The learning rate of plain SGD in this round."""
    plain = plain_sgd(solver)
    assert plain is not None
    rate = plain.lr * torch.pow(torch.as_tensor(plain.decay, dtype=torch.float64, device=round.device), round)
    if isinstance(solver, Scheduled) and solver.rounds is not None:
        rate = rate * solver.rounds.factor_at(round)
    return rate


def without_weight_decay(solver: Any) -> Any:
    """The same solver, wrappers included, without weight decay."""
    names = {each.name for each in dataclasses.fields(solver)} if dataclasses.is_dataclass(solver) else ()
    if "weight_decay" in names:
        return dataclasses.replace(solver, weight_decay=0.0)
    return dataclasses.replace(solver, solver=without_weight_decay(solver.solver)) if "solver" in names else solver


def _zero(params: Tree) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
