"""Deep unfolding: learn aggregation weights by running the whole federated training again and again."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.client.gradient_report import ReportedLoss
from consilience.core import rng
from consilience.core.algorithm import Algorithm
from consilience.core.protocols import Engine
from consilience.core.settings import Count, Invalid, Positive, Whole, check_value
from consilience.core.tree import Tree
from consilience.meta import simplex
from consilience.meta.adjoint import Keep, NotWeightedMean
from consilience.meta.conditions import Gradient, choose_gradient, why_not
from consilience.meta.initial import Initial, initial_table
from consilience.meta.schedule import Schedule
from consilience.meta.simplex import Constraint
from consilience.meta.slopes import slope_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Iteration:
    """One unfolded run and the weights after learning from it."""

    number: int  # counts from 1
    loss: float  # of the run, with the weights before
    weights: Tensor  # [T, K]
    slope: Tensor  # [T, K] dLoss/dTheta
    gradient: str  # the way to it
    state: dict[str, Tensor]  # for an exact continuation by `learning(resume=...)`


def learning(
    algorithm: Algorithm,
    engine: Engine,
    *,
    rounds: Count = 10,
    iterations: Count = 400,
    lr: Positive = 0.001,
    seed: Whole = 0,
    constraint: Constraint = "square",
    gradient: Gradient = "auto",
    keep: Keep = "device",
    start: Tree | None = None,
    initial: Initial = None,
    loss: ReportedLoss = "task",
    resume: Mapping[str, Tensor] | None = None,
) -> Iterator[Iteration]:
    """Learn a schedule, yielding every iteration; see `learn_schedule`. `resume`: the state of an earlier iteration."""
    rounds, iterations = check_value("rounds", rounds, Count), check_value("iterations", iterations, Count)
    lr, seed = check_value("lr", lr, Positive), check_value("seed", seed, Whole)
    constraint, keep = check_value("constraint", constraint, Constraint), check_value("keep", keep, Keep)
    loss = check_value("loss", loss, ReportedLoss)
    way = choose_gradient(check_value("gradient", gradient, Gradient), algorithm, engine, loss)
    # Paper: w^(0) is initialised inside the loop. Here: one and the same start, as in the authors' code.
    start = engine.start() if start is None else start
    slope = slope_of(way, algorithm, engine, start, keep=keep, loss=loss)
    state = _resumed(resume, rounds, iterations) if resume is not None else None
    if state is None:
        table = initial_table(initial, algorithm, engine, start, rounds=rounds, seed=seed)
        theta = simplex.free(table, constraint)
        state = {"theta": theta, "mean": theta * 0, "square": theta * 0}
        state |= {"losses": torch.zeros(0, dtype=torch.float64), "moved": torch.zeros(rounds, dtype=torch.bool)}
    theta = state["theta"].clone().requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=lr)
    done = len(state["losses"])
    moments = {"exp_avg": state["mean"].clone(), "exp_avg_sq": state["square"].clone()}
    optimiser.state[theta] = {"step": torch.tensor(float(done)), **moments}
    for number in range(done, iterations):
        table = simplex.weights(theta, constraint)
        run_seed = rng.key(seed, "unfolding", number) % 2**63  # batches and failures are drawn afresh for every run
        try:
            total, found = slope(table.detach(), run_seed)
        except NotWeightedMean:  # only a run shows whether a ledger moves the model
            if gradient != "auto" or why_not("autograd", algorithm, engine):
                raise
            way = "autograd"
            slope = slope_of(way, algorithm, engine, start, loss=loss)
            total, found = slope(table.detach(), run_seed)
        if not bool(found.isfinite().all()):
            raise Invalid(f"iteration {number + 1}: the gradient is not finite: lower the learning rates")
        optimiser.zero_grad()
        table.backward(found)
        optimiser.step()
        weights = simplex.weights(theta, constraint).detach().clone()
        state = {
            "theta": theta.detach().clone(),
            "mean": moments["exp_avg"].clone(),
            "square": moments["exp_avg_sq"].clone(),
            "losses": torch.cat([state["losses"], torch.tensor([total], dtype=torch.float64)]),
            "moved": state["moved"] | (found != 0).any(1).cpu(),
        }
        yield Iteration(number=number + 1, loss=total, weights=weights, slope=found, gradient=way, state=state)


def _resumed(state: Mapping[str, Tensor], rounds: int, iterations: int) -> dict[str, Tensor]:
    """A saved state, checked against the settings."""
    absent = [name for name in ("theta", "mean", "square", "losses", "moved") if name not in state]
    if absent:
        raise Invalid(f"resume has no {absent[0]}: pass the `state` of an iteration")
    if len(state["theta"]) != rounds:
        raise Invalid(f"resume has weights for {len(state['theta'])} rounds, not for {rounds}: pass rounds as before")
    if len(state["losses"]) >= iterations:
        raise Invalid(f"resume has all {len(state['losses'])} iterations: pass a larger number than {iterations}")
    return dict(state)


def learned(steps: Iterable[Iteration]) -> Schedule:
    """The schedule at the end of all iterations."""
    step = None
    for step in steps:  # noqa: B007 only the last one is needed
        pass
    if step is None:
        raise Invalid("a schedule is learned in at least one iteration")
    return Schedule(
        weights=step.weights,
        losses=step.state["losses"],
        gradient=step.gradient,
        idle_rounds=tuple(int(t) + 1 for t in torch.nonzero(~step.state["moved"]).flatten()),
    )


def learn_schedule(
    algorithm: Algorithm,
    engine: Engine,
    *,
    rounds: Count = 10,
    iterations: Count = 400,
    lr: Positive = 0.001,
    seed: Whole = 0,
    constraint: Constraint = "square",
    gradient: Gradient = "auto",
    keep: Keep = "device",
    start: Tree | None = None,
    initial: Initial = None,
    loss: ReportedLoss = "task",
    progress: bool = True,
) -> Schedule:
    """Weights Theta[round, client] that make the losses along `rounds` rounds of the algorithm, and after, small.

    iterations: unfolded runs, each followed by a step of Adam at rate `lr`; all begin at the same model `start`.
    constraint: theta^2 / sum theta^2 ("square"), "softmax", or "raw" weights that need not sum to one.
    gradient: "server" needs nothing but the models that clients send (plain SGD); "reported" lets clients send their
    summed gradients too, for any local training; "autograd" gives the same number through a graph; "full" also
    differentiates through local training. "auto" takes the first that fits.
    keep: where "server" and "reported" keep the received models; "nothing" repeats every run instead.
    initial: the first weights, [clients] or [rounds, clients], or a weighting, whose weights in one run are taken; by
    default N_k / N.
    loss: what the weights are to make small: the task's loss, or the squared error of probabilities ("squared_error")
    or of logits ("squared_error_logits") against one-hot labels; clients train on the task's loss in any case.
    """
    settings = {"rounds": rounds, "iterations": iterations, "lr": lr, "seed": seed, "constraint": constraint}
    more = {"gradient": gradient, "keep": keep, "start": start, "initial": initial, "loss": loss}
    steps = learning(algorithm, engine, **settings, **more)  # type: ignore[arg-type]
    schedule = learned(_printing(steps, iterations) if progress else steps)
    if schedule.note():
        warnings.warn(schedule.note(), stacklevel=2)
    return schedule


def _printing(steps: Iterator[Iteration], iterations: int) -> Iterator[Iteration]:
    """The iterations, with about twenty progress lines."""
    began = time.monotonic()
    for step in steps:
        if step.number == iterations or step.number % max(1, iterations // 20) == 0:
            took = time.monotonic() - began
            line = f"schedule {step.number}/{iterations}  loss {step.loss:.6g}  {took:.0f} s"
            print(line, file=sys.stderr, flush=True)
        yield step
