"""The record of each client: its data, and per round its scores and similarities.

It has files of its own, since it grows with the number of clients and similarities reveal something about the
clients' data: the other records can be shared without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core.exchange import Cohort
from consilience.core.federation import Federation, NumberedNames, Rows
from consilience.core.rounds import Round
from consilience.task.scores import ClientScores, Scores

MOST_CLIENTS = 500
"""With more clients, percentiles of their values are recorded instead of the values."""

MOST_COMPARED = 64
"""The most clients of a cohort, the first by number, in a recorded similarity matrix."""

MOST_COUNTS = 1_000_000
"""Larger tables client x class are left out."""

PERCENTILES = np.arange(101)


def client_row(
    round: Round, scores: Scores | None, personal: ClientScores | None, drift: Tensor | None = None
) -> dict[str, Any]:
    """One compact row per round: existing values to four digits; `drift` [m] is the cohort's."""
    row: dict[str, Any] = {"round": round.number}
    if scores is not None:
        row |= _values(scores.clients.main.key, scores.clients.values)
    if personal is not None:
        row |= _values(f"personal_{personal.main.key}", personal.values)
    if round.cohort.refusals:
        row |= _refused(round.cohort)
    return row | _cohort(round, drift) | _noted(round)


def federation_facts(federation: Federation, label_names: tuple[str, ...]) -> dict[str, Any]:
    """Names and row counts of the clients, and how many rows of each class they hold, where there are classes."""
    train, test = federation.train, federation.test
    facts: dict[str, Any] = {
        "names": [] if isinstance(federation.names, NumberedNames) else list(federation.names),
        "labels": list(label_names),
        "train_rows": train.sizes.tolist(),
        "test_rows": test.sizes.tolist() if test is not None else None,
    }
    classes = federation.classes
    known = isinstance(train, Rows)  # unless rows are on other machines
    if known and classes is not None and len(federation) * classes <= MOST_COUNTS and not train.y.is_floating_point():
        facts["class_counts"] = _class_counts(federation, classes).tolist()
    return facts


def _class_counts(federation: Federation, classes: int) -> np.ndarray:
    """[K, C] training labels of each client."""
    clients = len(federation)
    sizes, labels = federation.train.sizes.numpy(), federation.train.y.cpu().numpy()
    order = federation.train.owned().numpy()
    flat = labels[order].reshape(len(order), -1).astype(np.int64)  # several labels a row: each counts
    owner = np.repeat(np.arange(clients), sizes)[:, None]
    inside = (flat >= 0) & (flat < classes)
    return np.bincount((owner * classes + flat)[inside], minlength=clients * classes).reshape(clients, classes)


def _values(name: str, values: np.ndarray) -> dict[str, Any]:
    known = values[np.isfinite(values)]
    if not len(known):
        return {}
    if len(values) > MOST_CLIENTS:
        return {f"{name}_percentiles": np.round(np.percentile(known, PERCENTILES), 4).tolist()}
    return {name: np.round(values, 4).tolist()}


def _cohort(round: Round, drift: Tensor | None) -> dict[str, Any]:
    """Training loss and drift of each of the cohort, in the order of its ids.

    Neither exists for a secure sum, of which only the mean is known, nor for a private run, which hides single clients.
    """
    cohort = round.cohort
    if not 0 < len(cohort) <= MOST_CLIENTS or cohort.traffic is not None or "epsilon" in round.notes:
        return {}
    found = {} if drift is None else {"cohort_drift": _four_digits(drift)}
    losses = cohort.reply.get("loss")
    return found | ({} if losses is None else {"cohort_loss": _four_digits(losses)})


def _four_digits(values: Tensor) -> list[float | None]:
    """Four significant digits; non-finite values become null."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values.to(torch.float64).tolist()]


def _refused(cohort: Cohort) -> dict[str, Any]:
    """Reason -> clients whose replies were refused."""
    found: dict[str, list[int]] = {}
    for refusal in cohort.refusals[:MOST_CLIENTS]:
        if isinstance(refusal.client, int):
            found.setdefault(refusal.reason, []).append(refusal.client)
    return {"refused": found} if found else {}


def _noted(round: Round) -> dict[str, Any]:
    """What the server rule reports of single clients: similarities, swapped models and clusters, where it has them."""
    notes, found = round.notes, dict[str, Any]()
    if isinstance(notes.get("similarity"), Tensor):
        found |= _similarity(round.cohort, notes["similarity"])
    if notes.get("model_of") is not None:  # whose model each client of the cohort holds from now on
        found["model_of"] = notes["model_of"].tolist()
    for name in ("clusters", "cluster"):
        numbers = notes.get(name)
        if isinstance(numbers, Tensor) and numbers.dim() == 1 and 1 < len(numbers) == len(round.cohort):
            found["cluster"] = numbers.to(torch.int64).tolist()
    return found


def _similarity(cohort: Cohort, matrix: Tensor) -> dict[str, Any]:
    """The matrix below its diagonal, row by row, and whose rows it has: the cohort's, or those that answered."""
    answered = cohort.ids if cohort.heard is None else cohort.ids[cohort.heard]
    ids = next((ids for ids in (cohort.ids, answered) if 1 < len(ids) == len(matrix)), None)
    if ids is None or matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        return {}
    kept = min(len(ids), MOST_COMPARED)
    below = torch.tril_indices(kept, kept, -1)
    known = matrix.detach().to("cpu", torch.float64)
    return {"compared": ids[:kept].tolist(), "similarity": np.round(known[below[0], below[1]].numpy(), 4).tolist()}
