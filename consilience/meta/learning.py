"""Deep unfolding: learn aggregation weights by running the whole federated training again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from consilience.client.gradient_report import WithGradientSum
from consilience.core import rng
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.exchange import Broadcast
from consilience.core.protocols import Engine
from consilience.core.rounds import run
from consilience.core.settings import Count, Invalid, Positive, Whole, check_value
from consilience.core.tree import Tree
from consilience.meta import simplex
from consilience.meta.adjoint import Adjoint, Keep, chosen
from consilience.meta.conditions import Gradient, plain_solver, settle
from consilience.meta.schedule import Schedule
from consilience.meta.simplex import Constraint
from consilience.meta.unfolded import LiveWeights, Standing, Unfolded

Slope = Callable[[Tensor, int], tuple[float, Tensor]]
"""(Theta [T, K], seed) -> (loss, dLoss/dTheta)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Iteration:
    """One unfolded run and the weights after learning from it."""

    number: int  # counts from 1
    loss: float  # of the run, with the weights before
    weights: Tensor  # [T, K]
    slope: Tensor  # [T, K] dLoss/dTheta
    gradient: str  # the way to it


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
) -> Iterator[Iteration]:
    """Learn a schedule, yielding every iteration; see `learn_schedule`."""
    rounds, iterations = check_value("rounds", rounds, Count), check_value("iterations", iterations, Count)
    lr, seed = check_value("lr", lr, Positive), check_value("seed", seed, Whole)
    constraint = check_value("constraint", constraint, Constraint)
    way = settle(check_value("gradient", gradient, Gradient), algorithm, engine)
    # Paper: w^(0) is initialised inside the loop. Here: one and the same start, as in the authors' code.
    slope = _slope(way, algorithm, engine, engine.start() if start is None else start, check_value("keep", keep, Keep))
    theta = simplex.first(engine.sizes, rounds, constraint).requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=lr)
    for number in range(iterations):
        table = simplex.weights(theta, constraint)
        # batches and failures are drawn afresh for every run
        loss, found = slope(table.detach(), rng.key(seed, "unfolding", number) % 2**63)
        if not bool(found.isfinite().all()):
            raise Invalid(f"iteration {number + 1}: the gradient is not finite: lower the learning rates")
        optimiser.zero_grad()
        table.backward(found)
        optimiser.step()
        weights = simplex.weights(theta, constraint).detach().clone()
        yield Iteration(number=number + 1, loss=loss, weights=weights, slope=found, gradient=way)


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
    progress: bool = True,
) -> Schedule:
    """Weights Theta[round, client] that make the losses along `rounds` rounds of the algorithm, and after, small.

    iterations: unfolded runs, each followed by a step of Adam at rate `lr`; all begin at the same model `start`.
    constraint: theta^2 / sum theta^2 ("square"), "softmax", or "raw" weights that need not sum to one.
    gradient: "server" needs nothing but the models that clients send (plain SGD); "reported" lets clients send their
    summed gradients too, for any local training; "autograd" gives the same number through a graph; "full" also
    differentiates through local training. "auto" takes the first that fits.
    keep: where "server" and "reported" keep the received models; "nothing" repeats every run instead.
    """
    settings = {"rounds": rounds, "iterations": iterations, "lr": lr, "seed": seed, "constraint": constraint}
    steps = learning(algorithm, engine, **settings, gradient=gradient, keep=keep, start=start)  # type: ignore[arg-type]
    losses, began = [], time.monotonic()
    for step in steps:
        losses.append(step.loss)
        if progress and (step.number == iterations or step.number % max(1, iterations // 20) == 0):
            took = time.monotonic() - began
            line = f"schedule {step.number}/{iterations}  loss {step.loss:.6g}  {took:.0f} s"
            print(line, file=sys.stderr, flush=True)
    return Schedule(weights=step.weights, losses=torch.tensor(losses, dtype=torch.float64), gradient=step.gradient)


def _slope(way: Gradient, algorithm: Algorithm, engine: Engine, start: Tree, keep: Keep) -> Slope:
    if way == "server":
        return Adjoint(algorithm, engine, start, solver=plain_solver(algorithm), keep=keep)
    if way == "reported":
        telling = replace(algorithm, client=WithGradientSum(training=algorithm.client))
        return Adjoint(telling, engine, start, solver=None, keep=keep)

    def by_graph(table: Tensor, seed: int) -> tuple[float, Tensor]:
        with torch.enable_grad():
            table = table.clone().requires_grad_()
            loss = unfolded_loss(algorithm, engine, start, table, seed, detach=way == "autograd")
            (found,) = torch.autograd.grad(loss, table)
        return float(loss.detach()), found

    return by_graph


def unfolded_loss(
    algorithm: Algorithm, engine: Engine, start: Tree, table: Tensor, seed: int, *, detach: bool
) -> Tensor:
    """All minibatch losses along a run and at its last model, as a differentiable function of Theta [T, K]."""
    # Paper: losses of rounds 0 .. T-1, which the last round's weights do not touch. Here: one more pass at the last
    # model, as in the authors' code.
    server = replace(algorithm.server, weighting=LiveWeights(table=table))  # type: ignore[type-var]
    live, tape = replace(algorithm, server=server), Unfolded(engine, detach=detach)
    model, rounds = start, len(table)
    for done in run(live, tape, rounds=rounds, seed=seed, start=start, max_bad_rounds=rounds + 1):
        model = done.model
    ids = chosen(live, tape, rounds, seed)
    everyone = Standing(work=replace(live.client.work, reliable=True))
    tape.exchange(everyone, Plain(), Broadcast(shared={"model": model}), ids, round=rounds, seed=seed)
    nothing = table.sum() * 0  # where nobody was ever heard, no loss depends on the weights
    total = torch.stack(tape.losses).sum() if tape.losses else nothing
    return total if total.requires_grad else total + nothing
