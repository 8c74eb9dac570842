"""Fits a rule that explains learned weights by client properties, for use in other federations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from consilience.client.label_counting import LabelCounting
from consilience.core import rng
from consilience.core.algorithm import Algorithm
from consilience.core.exchange import Cohort, Notes
from consilience.core.protocols import Engine
from consilience.core.rounds import run
from consilience.core.settings import Count, Invalid, Positive, Whole, check_value
from consilience.core.tree import Tree
from consilience.server.averaging.weighting.schedule import ScheduleWeights, shares
from consilience.server.averaging.weighting.transferred import (
    FEATURES,
    TERMS,
    Feature,
    TransferredWeights,
    observe,
    terms,
    unknown,
)

NEWTON_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class FittedRule:
    """A rule, and how far its weights are from the learned ones: mean Kullback-Leibler divergence over rounds."""

    rule: TransferredWeights
    divergence: float
    by_examples: float  # of N_k / N, for comparison


@dataclass(frozen=True, kw_only=True)
class FeatureNotes:
    """A schedule's weights, with client features in the notes."""

    schedule: ScheduleWeights
    features: tuple[Feature, ...]
    arrival: tuple[float, ...]
    needs_each_reply = True  # as the rule that will be fitted

    def init(self, start: Tree, clients: int) -> Tree:
        """No known features."""
        self.schedule.init(start, clients)
        return unknown(start, clients)

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """This round's row, and features [m, F]."""
        values, state = observe(self.features, cohort, model, state, self.arrival)
        row = self.schedule.row(cohort.round, cohort.examples.device)
        return shares(row, cohort), state, {"features": values}


def fit_rule(
    weights: Tensor,
    algorithm: Algorithm,
    engine: Engine,
    *,
    features: tuple[Feature, ...] = FEATURES,
    trials: Count = 3,
    seed: Whole = 0,
    ridge: Positive = 1e-3,
    arrival: tuple[float, ...] = (),
    start: Tree | None = None,
) -> FittedRule:
    """The rule whose weights are nearest to the learned ones [rounds, clients], in `trials` runs that use them.

    The mean divergence of the rule's weights from the learned ones is made as small as possible, with `ridge` / 2 times
    the squared coefficients added; it is convex. arrival: the rates at which clients' replies arrive, where known.
    """
    # Paper: names such a rule as future work ("a novel adaptive weighting strategy"). Here: a log-linear one.
    trials, seed = check_value("trials", trials, Count), check_value("seed", seed, Whole)
    if not features:
        raise Invalid("a rule needs at least one feature")
    watching = FeatureNotes(schedule=ScheduleWeights.of(weights), features=features, arrival=arrival)
    client = LabelCounting(training=algorithm.client) if "label_entropy" in features else algorithm.client
    server = replace(algorithm.server, weighting=watching)  # type: ignore[type-var]
    watched, start = replace(algorithm, client=client, server=server), engine.start() if start is None else start
    rounds = len(weights)
    designs, targets, plain = [], [], []
    for trial in range(trials):
        run_seed = rng.key(seed, "rule", trial) % 2**63
        for done in run(watched, engine, rounds=rounds, seed=run_seed, start=start, max_bad_rounds=rounds + 1):
            if len(done.cohort) < 2:
                continue
            values = done.notes["features"].cpu()  # [m, F]
            scale = terms(done.number - 1, rounds)
            designs.append((values.unsqueeze(2) * scale).flatten(1))  # [m, F * 3]
            given = done.notes["weights"].cpu()
            targets.append(given / given.sum())
            examples = done.cohort.examples.cpu()
            plain.append(_divergence(given / given.sum(), examples / examples.sum()))
    if not designs:
        raise Invalid("no round had two clients: there is nothing to fit a rule to")
    found = _fitted(designs, targets, ridge)
    apart = [_divergence(target, torch.softmax(design @ found, 0)) for design, target in zip(designs, targets)]
    table = found.reshape(len(features), TERMS).tolist()
    rule = TransferredWeights(features=features, coefficients=tuple(tuple(row) for row in table), rounds=rounds)
    return FittedRule(rule=rule, divergence=sum(apart) / len(apart), by_examples=sum(plain) / len(plain))


def _fitted(designs: list[Tensor], targets: list[Tensor], ridge: float) -> Tensor:
    """Newton's method with halved steps on the mean cross-entropy of softmax(design @ c) [m], ridge added."""
    found = torch.zeros(designs[0].shape[1], dtype=torch.float64)

    def objective(at: Tensor) -> float:
        fits = (-(y * torch.log_softmax(z @ at, 0)).sum() for z, y in zip(designs, targets))
        return float(sum(fits)) / len(designs) + ridge / 2 * float(at @ at)

    best = objective(found)
    for _ in range(NEWTON_STEPS):
        slope, curve = ridge * found, ridge * torch.eye(len(found), dtype=torch.float64)
        for z, y in zip(designs, targets):
            p = torch.softmax(z @ found, 0)
            slope = slope + z.T @ (p - y) / len(designs)
            curve = curve + z.T @ (p.unsqueeze(1) * (z - p @ z)) / len(designs)
        step, size = torch.linalg.solve(curve, slope), 1.0
        while size > 1e-8 and objective(found - size * step) > best:
            size /= 2
        moved = objective(found - size * step)
        if not moved < best:
            break
        found, best = found - size * step, moved
    return found


def _divergence(target: Tensor, found: Tensor) -> float:
    """Kullback-Leibler divergence, in nats."""
    return float((torch.special.xlogy(target, target) - torch.special.xlogy(target, found)).sum())
