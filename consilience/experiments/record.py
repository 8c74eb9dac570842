"""The record of every round: one row of metrics, reproducible byte for byte, and one of timing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from consilience.core.exchange import Cohort
from consilience.core.federation import Rows
from consilience.core.metrics import Metrics
from consilience.core.refusal import tally
from consilience.core.remote import each
from consilience.core.rounds import Round
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.experiments import update_log
from consilience.experiments.client_log import client_row
from consilience.experiments.client_tests import FederatedTest, PersonalTest
from consilience.experiments.evaluation import evaluate, evaluate_each
from consilience.experiments.stopping import PREFIX, BestSoFar
from consilience.runs.observation import Observation
from consilience.task.scores import ClientScores, Scores

COUNTS = ("silent", "empty_client", "nonfinite", "late", "clipped_updates", "memory_lost", "worker_lost")
WHERE_NEEDED = ("capped_examples",)  # counts, recorded if not zero
MOST_REFUSALS = 20  # refusals described in a row; all are counted


@dataclass(frozen=True, eq=False, kw_only=True)
class Observer:
    """Tests and describes each round: after every `every` rounds and after the last one (0: never).

    With `local` the clients' models are tested as well, as they were after training and before the server's step;
    with `personal` the clients' personal models, each on its own test rows.
    """

    task: Task
    test: Rows | None  # on the device
    every: int
    rounds: int
    local: bool = False
    personal: PersonalTest | None = None
    remote: FederatedTest | None = None  # where the server has no test rows
    validation: Rows | None = None  # on the device
    remote_validation: FederatedTest | None = None  # where clients hold these rows back themselves
    best: BestSoFar | None = None  # called with every round: it may end the run
    maps: bool = False  # whether the geometry of clients' updates is recorded
    sampled_from: int | None = None  # clients with test rows, where `test` holds those of a sample

    def watch(self, rounds: Iterator[Round], before: Tree, traffic: tuple[int, int] = (0, 0)) -> Iterator[Observation]:
        """Pass rounds on with their rows; `before` is the model and `traffic` the bytes sent before the first one."""
        began = time.perf_counter()
        for round in rounds:
            observation = self.observe(round, before, traffic, time.perf_counter() - began)
            yield observation
            before, traffic, began = round.model, observation.traffic, time.perf_counter()

    def observe(self, round: Round, before: Tree, traffic: tuple[int, int], seconds: float) -> Observation:
        """A round of `seconds` seconds with its rows; `before` is the model, `traffic` the bytes before it."""
        trained = time.perf_counter()
        up, down = traffic[0] + round.bytes_up, traffic[1] + round.bytes_down
        chosen = self._validated(round)
        is_best = self.best is not None and self.best.see({"round": round.number, **chosen})
        scores, personal = self._scores(round), self._personally(round)
        drift, length = _drift(round.cohort, before)
        row = {**_quality(round.number, scores, self.task.metrics), **chosen, **self._locally(round, before)}
        row |= {**(personal.recorded("personal") if personal else {}), **_training(round, drift, length)}
        row |= {"bytes_up": round.bytes_up, "bytes_down": round.bytes_down}
        row |= {"bytes_up_total": up, "bytes_down_total": down}
        row |= {
            **{reason: round.cohort.counts.get(reason, 0) for reason in COUNTS},
            **_refusals(round.cohort, scores, personal),
        }
        row |= {"simulated_seconds": round.clock, **_staleness(round)}
        row |= {key: round.notes[key] for key in ("epsilon", "private", "bound") if key in round.notes}
        row |= {key: count for key in WHERE_NEEDED if (count := round.cohort.counts.get(key, 0))}
        timing = _timing(round, seconds, time.perf_counter() - trained)
        clients = client_row(round, scores, personal, drift)
        if self.maps and update_log.is_due(round.number) and _has_models(round.cohort, before):
            clients |= update_log.update_row(round.cohort, before)
        return Observation(
            round=round,
            row=row,
            timing=timing,
            traffic=(up, down),
            clients=clients,
            metrics=self.task.metrics.rows,
            is_best=is_best,
        )

    def _due(self, round: Round) -> bool:
        last = round.number == self.rounds or (self.best is not None and self.best.ends)
        return bool(self.every) and (round.number % self.every == 0 or last)

    def _validated(self, round: Round) -> dict[str, Any]:
        """All metrics on the validation rows; nothing in rounds that are not validated."""
        if self.best is None or round.number % (self.best.settings.every or 1):
            return {}
        if self.validation is not None:
            found: Scores | None = evaluate(self.task, round.model, self.validation)
        else:
            found = self.remote_validation(round.model) if self.remote_validation else None
        return {PREFIX + key: value for key, value in found.values.items()} if found else {}

    def _scores(self, round: Round) -> Scores | None:
        if self._due(round) and self.test is None and self.remote is not None:
            return self.remote(round.model)
        if not self._due(round) or self.test is None:
            return None
        found = evaluate(self.task, round.model, self.test)
        return replace(found, clients=replace(found.clients, sampled_from=self.sampled_from))

    def _locally(self, round: Round, before: Tree) -> dict[str, Any]:
        """Scores of the clients' trained models on all test rows; empty unless asked for."""
        if not self.local:
            return {}
        found = ClientScores.none(self.task.metrics.main_row)
        if self._due(round) and self.test is not None and _has_models(round.cohort, before):
            found = evaluate_each(self.task, round.cohort.reply["model"], self.test)
        return found.recorded("local")

    def _personally(self, round: Round) -> ClientScores | None:
        """Scores of the clients' personal models; None if there are none."""
        if self.personal is None:
            return None
        due = self._due(round)
        return self.personal(round.snapshot.server) if due else ClientScores.none(self.task.metrics.main_row)


def _quality(number: int, scores: Scores | None, metrics: Metrics) -> dict[str, Any]:
    values = scores.values if scores else dict.fromkeys(metric.key for metric in metrics.metrics)
    clients = scores.clients if scores else ClientScores.none(metrics.main_row)
    spread = {f"client_{metrics.main}_{name}": value for name, value in clients.spread().items()}
    return {"round": number, **values, **spread, **clients.sample("client")}


def _training(round: Round, drift: torch.Tensor | None, length: float) -> dict[str, Any]:
    """Participating clients, aggregation weights, missing replies and drift."""
    cohort, weights = round.cohort, round.notes.get("weights")
    shares = weights.to(torch.float64).cpu().numpy() if weights is not None and len(cohort) else None
    mean = None if drift is None else float(drift.mean())
    return {
        "cohort": cohort.ids.tolist(),
        "weights": shares.tolist() if shares is not None else None,
        "train_loss": _train_loss(cohort),
        "drift": mean,
        "drift_relative": mean / length if mean is not None and length else None,
        **({"gamma": cohort.reply["gamma"].tolist()} if len(cohort) and "gamma" in cohort.reply else {}),
    }


def _refusals(cohort: Cohort, scores: Scores | None, personal: ClientScores | None) -> dict[str, Any]:
    """The number of refused replies, to training and tests, by reason; if any, the first of them in words."""
    tests = (*(scores.clients.refusals if scores else ()), *(personal.refusals if personal else ()))
    refusals = (*cohort.refusals, *tests)
    named = [str(refusal) for refusal in refusals[:MOST_REFUSALS]]
    return {"rejected": tally(refusals), **({"refused": named} if named else {})}


def _staleness(round: Round) -> dict[str, Any]:
    """Staleness in rounds of the models that clients started from, if the server is asynchronous."""
    return {"staleness": round.notes["staleness"].tolist()} if "staleness" in round.notes else {}


def _train_loss(cohort: Cohort) -> float | None:
    """The mean of the losses that clients report, weighted by their rows; clients without steps are left out."""
    if not len(cohort) or "loss" not in cohort.reply:
        return None
    rows = np.where(cohort.steps > 0, cohort.examples.cpu().numpy(), 0.0)
    losses = cohort.reply["loss"].to(torch.float64).cpu().numpy()
    return float(rows @ losses / rows.sum()) if rows.sum() > 0 else None


def _has_models(cohort: Cohort, before: Tree) -> bool:
    """Whether the replies are whole models."""
    model = cohort.reply.get("model") if len(cohort) else None
    return isinstance(model, dict) and all(set(model.get(kind, ())) == set(before[kind]) for kind in before)


def _drift(cohort: Cohort, before: Tree) -> tuple[torch.Tensor | None, float]:
    """([m] |w_k - w|, |w|), w the model that clients were sent; None where replies are no models."""
    if not _has_models(cohort, before):
        return None, 0.0
    params, anchors = cohort.reply["model"]["params"], list(before["params"].values())
    squares = each(_moved_squared, [params[name] for name in before["params"]], anchors)  # [m] per tensor
    lengths = [torch.linalg.vector_norm(anchor, dtype=torch.float64).square() for anchor in anchors]
    return torch.stack(squares).sum(0).sqrt(), float(torch.stack(lengths).sum().sqrt())


def _moved_squared(stacked: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """[m] squared distances of one tensor's rows from the anchor."""
    return torch.linalg.vector_norm((stacked - anchor).flatten(1), dim=1, dtype=torch.float64).square()


def _timing(round: Round, training: float, testing: float) -> dict[str, Any]:
    rate = len(round.chosen) / training if training > 0 else None
    return {"round": round.number, "seconds": training, "evaluation_seconds": testing, "clients_per_second": rate}
