"""Checks that one client changes the clipped sum by at most one bound; other settings are refused with the reason.

The proof: a round's sum is one clipped update per client, and what a client's update is, and whether it arrives, is
decided by its own rows, its own draws and what all were sent. So without one client the others' updates are
unchanged, and the sum changes by its update alone. Whatever lets one client's rows decide about another's reply
breaks it. Settings are therefore accepted by name; settings added later are refused until they are
reviewed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn, Protocol, runtime_checkable

from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import KeepsLayers, PostTrainingPass, PreTrainingPass, capability
from consilience.core.settings import Invalid

ENVIRONMENT = (
    *("epochs", "steps", "communication", "availability", "dropout", "silent", "straggler_policy"),
    *("rows_per_second", "download", "upload", "latency", "speed_spread", "jitter", "deadline"),
)
"""Environment settings that depend on a client's own number, rows and draws; a silent client's stand-in adds zero."""
LIMITS = ("max_norm", "max_examples", "on_excess", "max_steps", "castable", "slack", "needs_digest", "max_metrics")
"""Limits that check each reply alone."""
REASONS = {
    "environment.stragglers": "it makes a fixed share of those who take part slow, so that who they are depends on who "
    "else takes part: use environment.steps, speed_spread or dropout",
    "environment.enough_replies": "it leaves out all but the fastest, so that one client decides whether "
    "another counts: use environment.deadline",
    "limits.max_ratio": "it compares replies with each other, so that a private run leaves it out anyway",
    "limits.max_growth": "it compares a reply with those of earlier rounds, so that a private run leaves it out anyway",
    "limits.examples_ratio": "it compares the clients' rows with each other",
    "limits.min_valid": "it drops all replies of a round if one of them is missing: leave it at 1",
}
UNKNOWN = "it is not part of the privacy proof: leave it at its default"


@runtime_checkable
class SamplesIndependently(Protocol):
    """A selection that takes every client with the same probability, independently of the others."""

    @property
    def sampling_rate(self) -> float:
        """The probability."""
        ...


def refuse_unproven(algorithm: Algorithm, engine: Any, limits: Any, *, rate: float) -> None:
    """Refuse what could let one client change the clipped sum by more than one bound, and another sampling rate."""
    _refuse_parts(algorithm, rate)
    for section, settings, proven in (
        ("environment", getattr(engine, "environment", None), ENVIRONMENT),
        ("limits", limits, LIMITS),
    ):
        if dataclasses.is_dataclass(settings):
            _refuse_settings(section, settings, proven)


def _refuse_parts(algorithm: Algorithm, rate: float) -> None:
    selection, client, channel = algorithm.selection, algorithm.client, algorithm.channel
    if not isinstance(selection, SamplesIndependently):
        _refuse(f"selection {type(selection).__name__}", "privacy is counted for clients that take part independently")
    if selection.sampling_rate != rate:
        _refuse(f"selection rate {selection.sampling_rate:g}", f"the server's noise is counted at rate {rate:g}")
    if not isinstance(channel, Plain):
        _refuse(f"channel {type(channel).__name__}", "its server half sees all replies before they are clipped")
    for look in (PreTrainingPass, PostTrainingPass):
        if capability(client, look) is not None:
            _refuse(f"client {type(client).__name__}", "its second pass over the rows is not part of the privacy proof")
    keeping = capability(client, KeepsLayers)
    if keeping is not None and keeping.personal_layers is not None:
        _refuse("personal_layers", "only whole models are clipped and get noise")


def _refuse_settings(section: str, settings: Any, proven: tuple[str, ...]) -> None:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in proven and value != field.default:
            name = f"{section}.{field.name}"
            _refuse(f"{name} = {value!r}", REASONS.get(name, UNKNOWN))


def _refuse(what: str, reason: str) -> NoReturn:
    raise Invalid(f"a private run cannot have {what}: {reason}")
