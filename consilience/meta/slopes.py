"""Methods for dLoss/dTheta: from the received models, from client reports, or by autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from consilience.client.gradient_report import ReportedLoss, WithGradientSum
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.exchange import Broadcast
from consilience.core.protocols import Engine
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.meta.adjoint import Adjoint, Keep, chosen
from consilience.meta.conditions import Gradient, plain_solver
from consilience.meta.unfolded import LiveWeights, NoTraining, Unfolded

Slope = Callable[[Tensor, int], tuple[float, Tensor]]
"""(Theta [T, K], seed) -> (loss, dLoss/dTheta)."""


def slope_of(
    way: Gradient,
    algorithm: Algorithm,
    engine: Engine,
    start: Tree,
    *,
    keep: Keep = "device",
    loss: ReportedLoss = "task",
) -> Slope:
    """The gradient of whole runs from `start`, by the given method."""
    if way == "server":
        return Adjoint(algorithm, engine, start, solver=plain_solver(algorithm), keep=keep)
    if way == "reported":
        telling = replace(algorithm, client=WithGradientSum(training=algorithm.client, loss=loss))
        return Adjoint(telling, engine, start, solver=None, keep=keep, loss=loss)

    def by_graph(table: Tensor, seed: int) -> tuple[float, Tensor]:
        with torch.enable_grad():
            table = table.clone().requires_grad_()
            try:
                total = unfolded_loss(algorithm, engine, start, table, seed, detach=way == "autograd", loss=loss)
                (found,) = torch.autograd.grad(total, table)
            except RuntimeError as problem:
                if "derivative" not in str(problem):
                    raise
                raise Invalid(f"{algorithm.server!r} cannot be differentiated by PyTorch ({problem})") from problem
        return float(total.detach()), found

    return by_graph


def unfolded_loss(
    algorithm: Algorithm,
    engine: Engine,
    start: Tree,
    table: Tensor,
    seed: int,
    *,
    detach: bool,
    loss: ReportedLoss = "task",
) -> Tensor:
    """All minibatch losses along a run and at its last model, as a differentiable function of Theta [T, K]."""
    # Paper: losses of rounds 0 .. T-1, which the last round's weights do not touch. Here: one more pass at the last
    # model, as in the authors' code.
    server = replace(algorithm.server, weighting=LiveWeights(table=table))  # type: ignore[type-var]
    live, tape = replace(algorithm, server=server), Unfolded(engine, detach=detach, loss=loss)
    model, rounds = start, len(table)
    for done in run(live, tape, rounds=rounds, seed=seed, start=start, max_bad_rounds=rounds + 1):
        model = done.model
    ids = chosen(live, tape, rounds, seed)
    everyone = NoTraining(work=replace(live.client.work, reliable=True))
    tape.exchange(everyone, Plain(), Broadcast(shared={"model": model}), ids, round=rounds, seed=seed)
    nothing = table.sum() * 0  # if no reply ever arrived, no loss depends on the weights
    total = torch.stack(tape.losses).sum() if tape.losses else nothing
    return total if total.requires_grad else total + nothing
