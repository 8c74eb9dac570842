"""Advice from a diagnosis: which methods to try, which cannot help, and why.

Methods are ordered by their results on the measured task whose heterogeneity is most similar (`evidence`); the rest
follows from the methods' definitions. Nothing else is advised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from consilience.diagnose.diagnosis import Diagnosis
from consilience.diagnose.evidence import FAR, Finding, nearest, tasks

LABELS = 0.2  # total variation beyond chance
SHIFT = 0.05  # share of the features' variance beyond chance
WAITING = 0.4  # share of clients' time
LOST = 0.1  # share of replies
NEAR = 0.1  # distance to a measured task
MOST = 4  # methods named in one piece of advice


class Advice(NamedTuple):
    """One piece of advice: something to try, to avoid, or to know."""

    kind: str  # try first, try, cannot help, beware, know
    what: str
    because: str


def advise(of: Diagnosis) -> list[Advice]:
    """The advice for a diagnosis, the most useful first."""
    found = [*_one_model(of), *_own_models(of), *_machines(of), *_identities(of)]
    order = ("try first", "try", "beware", "cannot help", "know")
    return sorted(found, key=lambda item: order.index(item.kind))


def is_label_skewed(of: Diagnosis) -> bool:
    """Whether label skew exceeds chance and the threshold."""
    return of.labels.mean > of.labels.chance_high and of.labels.mean - of.labels.chance_mean >= LABELS


def is_shifted(of: Diagnosis) -> bool:
    """Whether inputs differ by more than chance and label skew explain."""
    return of.features is not None and of.features.is_shown and of.features.excess >= SHIFT


def is_heterogeneous(of: Diagnosis) -> bool:
    """Whether labels are skewed or inputs shifted."""
    return is_label_skewed(of) or is_shifted(of)


def _one_model(of: Diagnosis) -> Iterator[Advice]:
    """Advice for one global model: methods ahead and behind on the most similar measured task."""
    yield from _measured(of, "accuracy", "for one global model")


def _own_models(of: Diagnosis) -> Iterator[Advice]:
    """Advice for personal models."""
    if is_heterogeneous(of):
        yield from _measured(of, "clients_mean", "if each client needs to be good on its own rows only")
        return
    yield Advice(
        "beware",
        "personal models (ditto, fedper, local_only ...)",
        "clients are alike, so that a model of one's own only has fewer rows to learn from",
    )


def _measured(of: Diagnosis, metric: str, aim: str) -> Iterator[Advice]:
    task, far = nearest(of)
    findings = task.findings(metric)
    ahead = [found for found in findings if found.is_better][:MOST]
    behind = [found for found in findings[::-1] if found.is_worse][:MOST]
    where = f"measured: {task.strength} ({_reach(far)})"
    first = "try first" if metric == "accuracy" else "try"
    if ahead:
        what = f"{aim}: {task.baseline} as the yardstick, then {', '.join(found.method for found in ahead)}"
        yield Advice(first, what, f"ahead of it there: {_listed(ahead)} points; {where}")
    else:
        what = f"{aim}: {task.baseline}"
        yield Advice(first, what, f"none of {len(findings)} methods was shown to be ahead of it there; {where}")
    if behind:
        names = ", ".join(found.method for found in behind)
        yield Advice("beware", f"{aim}: {names}", f"behind {task.baseline} there: {_listed(behind)} points; {where}")


def _reach(far: float) -> str:
    """How far the evidence applies."""
    if far < NEAR:
        return "clients differ there as they do here"
    return "the nearest task, but not a near one: compare before you choose" if far >= FAR else "the nearest task"


def _listed(findings: Sequence[Finding]) -> str:
    return ", ".join(f"{found.method} {100 * found.difference:+.1f}" for found in findings)


def _machines(of: Diagnosis) -> Iterator[Advice]:
    if of.effort.waiting >= WAITING:
        yield Advice(
            "try",
            "fedbuff, or environment.enough_replies / environment.deadline",
            f"clients wait {of.effort.waiting:.0%} of their time for the slowest{_buffered()}",
        )
    lost = 1 - float(np.mean(of.effort.heard * of.effort.available))
    if lost >= LOST:
        worst = float((of.effort.heard * of.effort.available).min())
        yield Advice(
            "know",
            f"{lost:.0%} of the replies are missing, {1 - worst:.0%} of the worst client's",
            "the model leans towards those that answer; if these have other data, so has the model. Not measured here",
        )


def _buffered() -> str:
    """The measured gain and loss of asynchronous aggregation."""
    said = []
    for task in tasks():
        found = {item.method: item.difference for item in task.findings("accuracy")}
        mine, base = task.seconds("fedbuff"), task.seconds(task.baseline)
        if mine and base and "fedbuff" in found:
            said.append(f"{mine:.0f} s instead of {base:.0f} s at {100 * found['fedbuff']:+.1f} points ({task.task})")
    return f". For as many replies a buffered server took {', '.join(said)}" if said else ""


def _identities(of: Diagnosis) -> Iterator[Advice]:
    """Advice that follows from the methods' definitions alone."""
    if not of.normalisation:
        yield Advice(
            "cannot help",
            "fedbn",
            "it keeps normalisation layers with the clients, and this model has none: it would be FedAvg, bit for bit",
        )
    steps = of.effort.steps
    if len(steps) and steps.min() == steps.max():
        yield Advice(
            "cannot help",
            "fednova",
            f"every client does {steps[0]:.0f} steps a round, so that there is nothing to normalise: it is FedAvg",
        )
    if of.similarity.mean < of.similarity.chance - 0.02:
        yield Advice(
            "know",
            "clients' models drift apart within a round",
            f"their features agree less (CKA {of.similarity.mean:.2f}) than those of clients with random "
            f"rows ({of.similarity.chance:.2f}): fewer local epochs than {of.local_epochs:g} cost rounds, but average "
            "better",
        )
