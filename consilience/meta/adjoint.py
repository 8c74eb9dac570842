"""dLoss/dTheta without an autograd graph, from the models that the server receives and one gradient at the last one.

With local steps held constant, w_k = w + const, so that for L = sum of all minibatch losses
  lambda_T = gradient of the terminal losses at w_T,
  lambda_t = sum_k (G_k + Theta_k lambda_{t+1}),   dL/dTheta_k = <lambda_{t+1}, w_k>,
where G_k is the sum of client k's minibatch gradients along its training: (w - w_k) / lr for plain SGD. A client whose
reply does not arrive meets its batches at w itself, in a report of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.client.gradient_report import GradientReport, ReportedLoss
from consilience.client.solvers import SGD
from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.exchange import Broadcast, Cohort, Pool
from consilience.core.protocols import Engine, PlansSteps
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.weighting.schedule import ScheduleWeights, shares
from consilience.server.rules.paced_averaging import PacedAveraging, paces

Keep = Literal["device", "cpu", "nothing"]


class NotWeightedMean(Invalid):
    """The server's new model is not the weighted mean, which the recursion assumes."""


class RecordedRound(NamedTuple):
    """The server's record of a round."""

    cohort: Cohort  # without its models
    models: Tree  # params [m, ...]
    gradient: Tree  # params: sum_k G_k, float64


class Adjoint:
    """Gradients of whole runs by the recursion above; `reported`: clients send G_k, else it is read off the models.

    `keep` says where the received models of all rounds are stored for the backward pass (rounds x clients x values).
    "nothing" repeats every unfolded run instead, and needs the memory of a single round.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        engine: Engine,
        start: Tree,
        *,
        solver: SGD | None,
        keep: Keep = "device",
        loss: ReportedLoss = "task",
    ) -> None:
        self._algorithm, self._engine, self._start = algorithm, engine, start
        self._solver, self._keep = solver, keep
        # Paper: Algorithm 3 sums the losses of all clients. Here: of those, too, whose replies are lost, as in the
        # authors' code; such a client does not train, and the terminal pass is not subject to failures either.
        self._report = GradientReport(work=replace(algorithm.client.work, reliable=True), loss=loss)

    @torch.no_grad()
    def __call__(self, table: Tensor, seed: int) -> tuple[float, Tensor]:
        """(loss, dLoss/dTheta [T, K]) of one unfolded run with the weights `table`."""
        total, kept, sums = 0.0, [], None
        last = self._start
        for met, model, loss in self._rounds(table, seed):
            total, last = total + loss, model
            if self._keep == "nothing":
                sums = _ahead(sums, met.gradient, _total_share(table, met.cohort))
            else:
                kept.append(met)
        ids = chosen(self._algorithm, self._engine, len(table), seed)
        loss, after = self._at(last, ids, len(table), seed)
        found = torch.zeros_like(table)
        if self._keep == "nothing":
            self._forwards(table, seed, after, sums, found)
        else:
            for met in reversed(kept):  # after: lambda_{t+1}
                total_weight = self._write_slopes(met, table, after, found)
                after = tree.map_leaves(lambda g, a: g.to(a.device) + total_weight * a, met.gradient, after)  # noqa: B023
        return total + loss, found

    def _forwards(self, table: Tensor, seed: int, last: Tree, sums: tuple[Tree, float] | None, found: Tensor) -> None:
        """Repeat the rounds and compute lambda forwards, starting from the known lambda_0."""
        if sums is None:
            return
        gradients, factor = sums
        here = tree.map_leaves(lambda g, a: g + factor * a, gradients, last)  # lambda_t
        for met, _, _ in self._rounds(table, seed):
            total_weight = _total_share(table, met.cohort)
            if total_weight == 0:
                raise Invalid("weights that sum to zero cannot be followed back: use keep='device' or 'cpu'")
            here = tree.map_leaves(lambda h, g: (h - g) / total_weight, here, met.gradient)  # noqa: B023
            self._write_slopes(met, table, here, found)

    def _write_slopes(self, met: RecordedRound, table: Tensor, after: Tree, found: Tensor) -> float:
        """Write a round's dL/dTheta into `found`; the sum of its weights."""
        if not len(met.cohort):
            return 1.0
        per_client = torch.zeros(len(met.cohort), dtype=torch.float64)
        for name, models in met.models.items():
            flat = models.reshape(len(models), -1).to(after[name].device, torch.float64)  # [m, P]
            per_client += (flat @ after[name].reshape(-1)).cpu()
        with torch.enable_grad():
            row = table[met.cohort.round].clone().requires_grad_()
            given = shares(row, met.cohort)
            (found[met.cohort.round],) = torch.autograd.grad(given, row, per_client)
        return float(given.sum())

    def _rounds(self, table: Tensor, seed: int) -> Iterator[tuple[RecordedRound, Tree, float]]:
        """(what is kept, the model after it, its loss) of every round."""
        server = replace(self._algorithm.server, weighting=ScheduleWeights.of(table))  # type: ignore[type-var]
        algorithm, model = replace(self._algorithm, server=server), self._start
        chances = len(table) + 1
        for done in run(algorithm, self._engine, rounds=len(table), seed=seed, start=model, max_bad_rounds=chances):
            cohort = done.cohort
            silent = np.setdiff1d(done.chosen, cohort.ids if cohort.heard is None else cohort.ids[cohort.heard])
            unheard, gradient = self._at(model, silent, done.number - 1, seed)
            met = RecordedRound(replace(cohort, reply={}), {}, gradient)
            if len(cohort):
                self._refuse_other_moves(algorithm, cohort, done.notes["weights"], done.model)
                met = self._met(cohort, model["params"], seed)
                if len(silent):
                    met = met._replace(gradient=tree.map_leaves(_sum, met.gradient, gradient))
            yield met, done.model, unheard + (_loss(cohort) if len(cohort) else 0.0)
            model = done.model

    def _at(self, model: Tree, ids: np.ndarray, round: int, seed: int) -> tuple[float, Tree]:
        """(losses, gradient in float64) of a round's minibatches of these clients, all at the same model."""
        zeros = tree.map_leaves(lambda leaf: torch.zeros_like(leaf, dtype=torch.float64), model["params"])
        if not len(ids):
            return 0.0, zeros
        question = Broadcast(shared={"model": model})
        answer = self._engine.exchange(self._report, Plain(), question, ids, round=round, seed=seed)
        if not len(answer):
            return 0.0, zeros
        gradient = tree.map_leaves(lambda leaf: leaf.sum(0, dtype=torch.float64), answer.reply["gradient"])
        return float(answer.reply["loss_sum"].sum()), gradient

    def _met(self, cohort: Cohort, before: Tree, seed: int) -> RecordedRound:
        models = cohort.reply["model"]["params"]
        if self._solver is None:
            gradient = tree.map_leaves(lambda g: g.sum(0, dtype=torch.float64), cohort.reply["gradient"])
        else:
            rate = (self._solver.lr * self._solver.decay**cohort.round * self._paces(cohort, seed)).reciprocal()

            def moved(old: Tensor, new: Tensor) -> Tensor:  # sum_k (w - w_k) / rate_k
                share = rate.to(new.device)
                wide = new.reshape(len(new), -1).to(torch.float64)
                return share.sum() * old.to(torch.float64) - (share @ wide).reshape(old.shape)

            gradient = {name: moved(before[name], value) for name, value in models.items()}
        bare = replace(cohort, reply={}, examples=cohort.examples.cpu())
        if self._keep == "cpu":
            models, gradient = tree.to(models, "cpu"), tree.to(gradient, "cpu")
        return RecordedRound(bare, models, gradient)

    def _paces(self, cohort: Cohort, seed: int) -> Tensor:
        """[m] the server's scale of each client's steps; 1 by default."""
        if not isinstance(self._algorithm.server, PacedAveraging):
            return torch.ones(len(cohort), dtype=torch.float64)
        engine, round = self._engine, cohort.round
        ids = chosen(self._algorithm, engine, round, seed)
        assert isinstance(engine, PlansSteps)  # else the paced server could not have sent a model
        steps = engine.planned(self._algorithm.client, ids, round=round, seed=seed)
        return paces(torch.from_numpy(engine.sizes[ids]), steps)[np.searchsorted(ids, cohort.ids)]

    def _refuse_other_moves(self, algorithm: Algorithm, cohort: Cohort, weights: Tensor, model: Tree) -> None:
        """Refuse a ledger that changes the model from the weighted mean."""
        server = algorithm.server
        if not isinstance(server, Averaging) or not server.ledgers:
            return
        mean = server.combine.merge(cohort.reply["model"], weights)["params"]
        if not all(torch.equal(value, mean[name]) for name, value in model["params"].items()):
            names = ", ".join(ledger.name for ledger in server.ledgers)
            raise NotWeightedMean(
                f"the server's ledgers ({names}) move the model away from the weighted mean, so that its gradient "
                "cannot be had from the replies: use gradient='autograd'"
            )


def chosen(algorithm: Algorithm, engine: Engine, round: int, seed: int) -> np.ndarray:
    """The clients selected in a round."""
    clients = len(engine.sizes)
    available = np.asarray(engine.available(round, seed))
    pool = Pool(sizes=engine.sizes, losses=np.full(clients, np.nan), available=available)
    return np.unique(algorithm.selection.choose(round, pool, seed))


def _total_share(table: Tensor, cohort: Cohort) -> float:
    """The sum of a round's weights: 1 if no reply arrived and the model is unchanged."""
    return float(shares(table[cohort.round], cohort).sum()) if len(cohort) else 1.0


def _sum(a: Tensor, b: Tensor) -> Tensor:
    return a + b.to(a.device)


def _loss(cohort: Cohort) -> float:
    """The sum of the minibatch losses met; without a report, each client's mean loss times its steps."""
    if "loss_sum" in cohort.reply:
        return float(cohort.reply["loss_sum"].sum())
    steps = torch.from_numpy(cohort.steps).to(cohort.reply["loss"].device)
    return float((cohort.reply["loss"] * steps).sum())


def _ahead(sums: tuple[Tree, float] | None, gradient: Tree, weight: float) -> tuple[Tree, float]:
    """lambda_0 so far: (sum_t (prod_{s<t} weight_s) G_t, prod_s weight_s)."""
    if sums is None:
        return gradient, weight
    so_far, factor = sums
    return tree.map_leaves(lambda a, g: a + factor * g, so_far, gradient), factor * weight
