"""From numbers to advice: what to try, what cannot help, and why.

Each rule stands on a row of the table in docs/diagnose.md, or on a method's definition; nothing else is advised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from consilience.diagnose.diagnosis import Diagnosis

LABELS = 0.2  # total variation beyond chance
SIZES = 0.3  # Gini
SHIFT = 0.05  # share of the features' variance beyond chance
WORK = 2.0  # most over fewest local epochs
WAITING = 0.4  # share of clients' time
CONFLICT = 1.5  # B over B by chance
LOST = 0.1  # share of replies
MEASURED = "measured: docs/diagnose.md"


class Advice(NamedTuple):
    """One thing to do, to leave, or to know."""

    kind: str  # try first, try, cannot help, beware, know
    what: str
    because: str


def advise(of: Diagnosis) -> list[Advice]:
    """What follows from a diagnosis, the most useful first."""
    found = [*_one_model(of), *_own_models(of), *_sizes(of), *_work(of), *_machines(of), *_identities(of)]
    order = ("try first", "try", "beware", "cannot help", "know")
    return sorted(found, key=lambda item: order.index(item.kind))


def is_label_skewed(of: Diagnosis) -> bool:
    """Whether labels differ by more than chance, and by enough to matter."""
    return of.labels.mean > of.labels.chance_high and of.labels.mean - of.labels.chance_mean >= LABELS


def is_shifted(of: Diagnosis) -> bool:
    """Whether inputs differ by more than chance and labels explain."""
    return of.features is not None and of.features.is_shown and of.features.excess >= SHIFT


def is_unlike(of: Diagnosis) -> bool:
    """Whether clients' data differ in a way that was found to matter."""
    return is_label_skewed(of) or is_shifted(of)


def _one_model(of: Diagnosis) -> Iterator[Advice]:
    """For those who want one global model."""
    ways = [word for word, there in (("labels", is_label_skewed(of)), ("inputs", is_shifted(of))) if there]
    if not ways:
        yield Advice(
            "try first",
            "fedavg; then fedavgm or feddyn for speed",
            f"neither labels ({of.labels.mean:.2f} against {of.labels.chance_mean:.2f} by chance) nor inputs differ by "
            f"more than luck. With clients alike, only the server's momentum and FedDyn were faster ({MEASURED})",
        )
        yield Advice(
            "cannot help",
            "fedprox, scaffold, simprox and other corrections for unlike clients",
            f"there is nothing to correct: with clients alike they stayed within a point of FedAvg ({MEASURED})",
        )
        return
    because = f"{' and '.join(ways)} differ by more than luck"
    if of.later.b >= CONFLICT * of.later.chance:
        because += f", and clients' gradients with them (B = {of.later.b:.1f}, {of.later.chance:.1f} by chance)"
    yield Advice(
        "try first",
        "for one global model: fedavg as the yardstick, then feddyn and fedavgm",
        f"{because}; these two gained most over FedAvg under label skew, feature shift and unequal work. But unlike "
        f"clients need not be hard ones: on synthetic(1, 1) FedAvg was as good as any ({MEASURED})",
    )
    yield Advice(
        "beware",
        "fedprox as a cure for unlike data",
        f"its leash slows everyone: in none of the settings measured was it ahead of FedAvg ({MEASURED}); "
        "it is meant for clients that do very many steps, and its mu must be tuned",
    )


def _own_models(of: Diagnosis) -> Iterator[Advice]:
    """For those whose clients may each have a model of their own."""
    if not is_unlike(of):
        yield Advice(
            "beware",
            "personal models (ditto, fedper, local_only ...)",
            f"clients are alike, so that a model of one's own only has fewer rows to learn from ({MEASURED})",
        )
        return
    yield Advice(
        "try",
        "local_only and ditto, if each client needs to be good on its own rows only",
        "clients differ, and what a client meets is narrower than the whole: on clients' own test rows both were far "
        "ahead of FedAvg, and ahead of every global model where inputs differ. Run local_only first: what does not "
        f"beat it gains nothing from the others ({MEASURED})",
    )


def _sizes(of: Diagnosis) -> Iterator[Advice]:
    if of.quantity.gini < SIZES:
        return
    yield Advice(
        "beware",
        "methods that count every client alike (simprox, scaffold), and fednova",
        f"sizes are unequal (Gini {of.quantity.gini:.2f}), so that a few rows would count as much as many: where sizes "
        f"alone differed these fell behind FedAvg, which weighs by rows ({MEASURED})",
    )


def _work(of: Diagnosis) -> Iterator[Advice]:
    if of.effort.epochs_ratio < WORK:
        return
    yield Advice(
        "try",
        "scaffold",
        f"some clients do {of.effort.epochs_ratio:.3g} times as many passes as others, which pulls the average towards "
        f"them; besides FedDyn and the server's momentum, its control variates helped there ({MEASURED})",
    )
    yield Advice(
        "beware",
        "fednova in short runs",
        "it removes that pull by definition, but also shortens the server's steps: after 15 rounds it was behind "
        f"FedAvg ({MEASURED})",
    )


def _machines(of: Diagnosis) -> Iterator[Advice]:
    if of.effort.waiting >= WAITING:
        yield Advice(
            "try",
            "fedbuff, or environment.enough_replies / environment.deadline",
            f"clients wait {of.effort.waiting:.0%} of their time for the slowest. A buffered server took 37 simulated "
            "seconds where FedAvg took 137 for as many replies, and lost 2 points (docs/comparison.md)",
        )
    lost = 1 - float(np.mean(of.effort.heard * of.effort.available))
    if lost >= LOST:
        worst = float((of.effort.heard * of.effort.available).min())
        yield Advice(
            "know",
            f"{lost:.0%} of the replies are missing, {1 - worst:.0%} of the worst client's",
            "the model leans towards those that answer; if these have other data, so has the model. Not measured here",
        )


def _identities(of: Diagnosis) -> Iterator[Advice]:
    """What follows from the methods' definitions alone."""
    if not of.normalisation:
        yield Advice(
            "cannot help",
            "fedbn",
            "it keeps normalisation layers at home, and this model has none: it would be FedAvg, bit for bit",
        )
    steps = of.effort.steps
    if len(steps) and steps.min() == steps.max():
        yield Advice(
            "cannot help",
            "fednova",
            f"every client does {steps[0]:.0f} steps a round, so that there is nothing to normalise: it is FedAvg",
        )
    if of.likeness.mean < of.likeness.chance - 0.02:
        yield Advice(
            "know",
            "clients' models drift apart within a round",
            f"their features agree less (CKA {of.likeness.mean:.2f}) than those of clients with random rows "
            f"({of.likeness.chance:.2f}): fewer local epochs than {of.local_epochs:g} cost rounds, but average better",
        )
