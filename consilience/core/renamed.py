"""Former names of settings, for error messages and `consilience migrate`."""

from __future__ import annotations

from collections.abc import Iterable

OPTIONS: dict[str, tuple[str, ...]] = {
    "beyond": ("on_excess", "after_last"),  # limits; schedule weighting
    "by": ("metric", "proportional_to"),  # clusters; by_loss selection
    "client": ("max_client",),  # capped weighting
    "first": ("first_stage", "enough_replies"),  # fedsiam_da and dual weighting; environment
    "floor": ("min_gain",),  # radio channels
    "fresh": ("fresh_losses",),  # selections by loss
    "group": ("max_group",),  # capped weighting
    "home": ("personal_layers",),
    "most": ("max_clusters", "max_weight"),  # clustered_fl; agreement weighting
    "near": ("min_cosine",),  # capped weighting
    "noise": ("noise_size",),  # fedgen and its ledger
    "of": ("compare_on",),  # simprox and dual weighting, and their recipes
    "otherwise": ("if_infeasible",),  # capped weighting
    "prev": ("previous_model",),  # simprox
}
"""Old option -> its current names, in the parts that offer it."""

PARTS: dict[str, str] = {"held": "fixed_for_rounds", "together": "pooled", "vouched": "agreement"}
"""Old name of a part -> its current name."""

VALUES: dict[str, str] = {"stand_in": "broadcast_model"}  # environment.silent
"""Old value of a setting with a fixed set of values -> its current name."""


def option(name: str, known: Iterable[str]) -> str | None:
    """The current name of an unknown option, if it was renamed."""
    known = set(known)
    return next((new for new in OPTIONS.get(name, ()) if name not in known and new in known), None)


def part(name: str, known: Iterable[str]) -> str | None:
    """The current name of an unknown part, if it was renamed."""
    new = PARTS.get(name.lower().replace("-", "_"))
    return new if new in set(known) and name not in set(known) else None


def value(word: object, allowed: Iterable[object]) -> str | None:
    """The current name of an unknown value, if it was renamed."""
    new = VALUES.get(word) if isinstance(word, str) else None
    return new if new in set(allowed) else None
