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
        chosen = {} if self.best is None else self._validated(round, self.best)
        is_best = self.best is not None and self.best.see({"round": round.number, **chosen})
        last = round.number == self.rounds or (self.best is not None and self.best.ends)
        due = bool(self.every) and (round.number % self.every == 0 or last)
        scores = self._scores(round) if due else None
        personal = None if self.personal is None else self._personally(round, self.personal, due)
        has_models = _has_models(round.cohort, before)
        drift, length = _drift(round.cohort, before) if has_models else (None, 0.0)
        row = {**_quality(round.number, scores, self.task.metrics), **chosen}
        if self.local:
            row |= self._locally(round, due and has_models)
        row |= {**(personal.recorded("personal") if personal else {}), **_training(round, drift, length)}
        row |= {"bytes_up": round.bytes_up, "bytes_down": round.bytes_down}
        row |= {"bytes_up_total": up, "bytes_down_total": down, "simulated_seconds": round.clock}
        row |= _missing(round.cohort, scores, personal)
        row |= {key: round.notes[key] for key in ("epsilon", "private", "bound") if key in round.notes}
        tested_in = time.perf_counter() - trained
        clients = client_row(round, scores, personal, drift)
        if self.maps and has_models and update_log.is_due(round.number):
            clients |= update_log.update_row(round.cohort, before)
        return Observation(
            round=round,
            row=row,
            timing={
                "round": round.number,
                "seconds": seconds,
                "evaluation_seconds": tested_in,
                "clients_per_second": len(round.chosen) / seconds if seconds > 0 else None,
            },
            traffic=(up, down),
            clients=clients,
            metrics=self.task.metrics.rows,
            is_best=is_best,
        )

    def _validated(self, round: Round, best: BestSoFar) -> dict[str, Any]:
        """All metrics on the validation rows; nothing in rounds that are not validated."""
        if round.number % (best.settings.every or 1):
            return {}
        if self.validation is not None:
            found: Scores | None = evaluate(self.task, round.model, self.validation)
        else:
            found = self.remote_validation(round.model) if self.remote_validation else None
        return {PREFIX + key: value for key, value in found.values.items()} if found else {}

    def _scores(self, round: Round) -> Scores | None:
        """The global model's, on the server's test rows or on the clients' own; None where there are none."""
        if self.test is None:
            return None if self.remote is None else self.remote(round.model)
        found = evaluate(self.task, round.model, self.test)
        return replace(found, clients=replace(found.clients, sampled_from=self.sampled_from))

    def _locally(self, round: Round, due: bool) -> dict[str, Any]:
        """Scores of the clients' trained models on all test rows."""
        if not due or self.test is None:
            return ClientScores.none(self.task.metrics.main_row).recorded("local")
        return evaluate_each(self.task, round.cohort.reply["model"], self.test).recorded("local")

    def _personally(self, round: Round, test: PersonalTest, due: bool) -> ClientScores:
        """Scores of the clients' personal models."""
        return test(round.snapshot.server) if due else ClientScores.none(self.task.metrics.main_row)


def _quality(number: int, scores: Scores | None, metrics: Metrics) -> dict[str, Any]:
    values = scores.values if scores else dict.fromkeys(metric.key for metric in metrics.metrics)
    clients = scores.clients if scores else ClientScores.none(metrics.main_row)
    spread = {f"client_{metrics.main}_{name}": value for name, value in clients.spread().items()}
    return {"round": number, **values, **spread, **clients.sample("client")}


def _training(round: Round, drift: torch.Tensor | None, length: float) -> dict[str, Any]:
    """Participating clients, aggregation weights, losses, drift, and staleness if the server is asynchronous."""
    cohort, weights = round.cohort, round.notes.get("weights")
    reply = cohort.reply if len(cohort) else {}
    shares = weights.to(torch.float64).cpu().numpy() if weights is not None and len(cohort) else None
    mean, loss = None if drift is None else float(drift.mean()), None
    if "loss" in reply:  # weighted by rows; clients without steps are left out
        rows = np.where(cohort.steps > 0, cohort.examples.cpu().numpy(), 0.0)
        losses = reply["loss"].to(torch.float64).cpu().numpy()
        loss = float(rows @ losses / rows.sum()) if rows.sum() > 0 else None
    return {
        "cohort": cohort.ids.tolist(),
        "weights": shares.tolist() if shares is not None else None,
        "train_loss": loss,
        "drift": mean,
        "drift_relative": mean / length if mean is not None and length else None,
        **({"gamma": reply["gamma"].tolist()} if "gamma" in reply else {}),
        **({"staleness": round.notes["staleness"].tolist()} if "staleness" in round.notes else {}),
    }


def _missing(cohort: Cohort, scores: Scores | None, personal: ClientScores | None) -> dict[str, Any]:
    """The number of missing and of refused replies, to training and tests, by reason; the first refused in words."""
    counts = {reason: cohort.counts.get(reason, 0) for reason in COUNTS}
    counts |= {reason: count for reason in WHERE_NEEDED if (count := cohort.counts.get(reason, 0))}
    tests = (*(scores.clients.refusals if scores else ()), *(personal.refusals if personal else ()))
    refusals = (*cohort.refusals, *tests)
    named = [str(refusal) for refusal in refusals[:MOST_REFUSALS]]
    return {**counts, "rejected": tally(refusals), **({"refused": named} if named else {})}


def _has_models(cohort: Cohort, before: Tree) -> bool:
    """Whether the replies are whole models."""
    model = cohort.reply.get("model") if len(cohort) else None
    return isinstance(model, dict) and all(set(model.get(kind, ())) == set(before[kind]) for kind in before)


def _drift(cohort: Cohort, before: Tree) -> tuple[torch.Tensor, float]:
    """([m] |w_k - w|, |w|), w the model that clients were sent; replies must be whole models."""
    params, anchors = cohort.reply["model"]["params"], list(before["params"].values())
    squares = each(_moved_squared, [params[name] for name in before["params"]], anchors)  # [m] per tensor
    lengths = [torch.linalg.vector_norm(anchor, dtype=torch.float64).square() for anchor in anchors]
    return torch.stack(squares).sum(0).sqrt(), float(torch.stack(lengths).sum().sqrt())


def _moved_squared(stacked: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """[m] squared distances of one tensor's rows from the anchor."""
    return torch.linalg.vector_norm((stacked - anchor).flatten(1), dim=1, dtype=torch.float64).square()
