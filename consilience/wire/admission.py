"""Admission of replies: checks before any reply reaches the server rule.

An engine with untrusted replies passes them to `admit`, which compares each with a `Template` and with the request;
`screen`, in the loop, checks the values of every engine's replies after decoding.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from consilience.core import tree
from consilience.core.exchange import Cohort
from consilience.core.refusal import Refusal, Refused, contained, plain, tally
from consilience.core.screening import Limits
from consilience.core.tree import Tree
from consilience.wire import arrays
from consilience.wire.arrays import Packed
from consilience.wire.template import Leaf, Template

__all__ = ["Admitted", "Arrival", "Leaf", "Refusal", "Refused", "Template", "admit", "identities"]

LONGEST_METRIC = 64  # characters of a metric's name
LARGEST = 2**63  # larger numbers are not valid counts


@dataclass(frozen=True, eq=False, kw_only=True)
class Arrival:
    """One reply as received, unchecked."""

    client: int | str
    round: Any
    examples: Any
    steps: Any = 1
    run: Any = ""
    reply: Any = None  # a tree of tensors; or
    packed: Mapping[str, Packed] | None = None  # bytes by path
    digest: str | None = None  # of the reply and `facts`, if the client sent one
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> tuple[str, ...]:
        """What `arrays.digest(reply, *facts)` covers besides the tensors."""
        said = (self.client, self.run, self.round, self.examples, self.steps)
        return tuple(item if isinstance(item, str) else _shown(item) for item in said)


@dataclass(frozen=True, eq=False, kw_only=True)
class Admitted:
    """The accepted replies of a round, in ascending client order."""

    ids: np.ndarray  # [m] int64
    reply: Tree  # stacked [m, ...]; {} if there is none
    examples: torch.Tensor  # [m] float64
    steps: np.ndarray  # [m] int64
    metrics: tuple[dict[str, float], ...] = ()  # [m] the valid metrics of each
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()  # casts, capped counts, dropped metrics: one line each

    def cohort(self, *, round: int, seed: int = 0, counts: Mapping[str, int] | None = None) -> Cohort:
        """As a cohort, with refusals added to `counts` (such as `silent`)."""
        return Cohort(
            reply=self.reply,
            ids=self.ids,
            examples=self.examples,
            steps=self.steps,
            round=round,
            seed=seed,
            counts={**(counts or {}), **tally(self.refusals)},
            refusals=self.refusals,
        )


def admit(
    arrivals: Iterable[Arrival],
    *,
    template: Template,
    round: int,
    asked: Collection[int],
    run: str = "",
    limits: Limits | None = None,
) -> tuple[Admitted, list[Refusal]]:
    """The accepted replies and the reasons for all refusals; at most one reply per requested client is accepted."""
    limits, asked = limits or Limits(), {int(client) for client in asked}
    accepted: dict[int, tuple[Tree, float, int, dict[str, float]]] = {}
    refusals: list[Refusal] = []
    notes: list[str] = []
    for arrival in arrivals:
        try:
            with contained():
                client = _expected(arrival, round, run, asked)
                if client in accepted:
                    detail = f"it has answered round {round} already: the first answer is kept"
                    raise Refused("duplicate", detail=detail)
                accepted[client] = _checked(arrival, template, limits, notes)
        except Refused as problem:
            refusals.append(
                problem.by(arrival.client if isinstance(arrival.client, (int, str)) else _shown(arrival.client))
            )
    refusals.sort(key=lambda it: (isinstance(it.client, str), it.client, it.reason, it.detail))
    ids = sorted(accepted)
    kept = [accepted[client] for client in ids]
    return Admitted(
        ids=np.array(ids, dtype=np.int64),
        reply=tree.stack([reply for reply, *_ in kept]) if kept else {},
        examples=torch.tensor([examples for _, examples, *_ in kept], dtype=torch.float64),
        steps=np.array([steps for _, _, steps, _ in kept], dtype=np.int64),
        metrics=tuple(metrics for *_, metrics in kept),
        refusals=tuple(refusals),
        notes=tuple(sorted(notes)),
    ), refusals


def identities(claims: Iterable[tuple[Any, Any]], clients: int) -> tuple[dict[int, Any], list[Refusal]]:
    """Client -> node, from (node, the client it claims to be).

    Two nodes with the same identity are both refused, since the right one cannot be determined.
    """
    nodes: dict[int, list[Any]] = {}
    refusals: list[Refusal] = []
    for node, client in claims:
        if type(client) is not int or not 0 <= client < clients:
            said = plain(repr(client), most=64)
            refusals.append(Refusal(client=str(node), reason="identity", detail=f"{said} is none of 0..{clients - 1}"))
        elif node not in nodes.setdefault(client, []):
            nodes[client].append(node)
    for client, several in nodes.items():
        if len(several) > 1:
            detail = f"{len(several)} nodes say they are client {client}: {', '.join(sorted(map(str, several)))}"
            refusals.append(Refusal(client=client, reason="identity", detail=detail))
    return {client: several[0] for client, several in sorted(nodes.items()) if len(several) == 1}, refusals


def _expected(arrival: Arrival, round: int, run: str, asked: Collection[int]) -> int:
    """The client, if this round of this run requested its reply."""
    if arrival.run != run:
        raise Refused("other_run", detail=f"it belongs to run {_shown(arrival.run)}, this is {run!r}")
    if type(arrival.round) is not int or not 0 <= arrival.round < LARGEST:
        raise Refused("round", detail=f"{_shown(arrival.round)} is no round")
    if arrival.round != round:
        stale = arrival.round < round
        detail = f"r{arrival.round} < {round}" if stale else f"r{arrival.round} > {round}"
        raise Refused("stale_round" if stale else "future_round", detail=detail)
    if type(arrival.client) is not int or arrival.client not in asked:
        raise Refused("unasked", detail=f"it was not asked in round {round}")
    return arrival.client


def _checked(
    arrival: Arrival, template: Template, limits: Limits, notes: list[str]
) -> tuple[Tree, float, int, dict[str, float]]:
    """(reply, examples, steps, metrics) of one arrival; cheap checks run first."""
    who = f"client {arrival.client}"
    examples = _count("examples", arrival.examples, least=1)
    if examples > limits.max_examples:
        if limits.on_excess == "refuse":
            raise Refused("examples", detail=f"{examples:,} rows: more than max_examples = {limits.max_examples:,}")
        notes.append(f"{who}: {plain(examples)} rows counted as {limits.max_examples}")
        examples = limits.max_examples
    steps = _count("steps", arrival.steps, least=0)
    if steps > limits.max_steps:
        raise Refused("steps", detail=f"{steps:,}: more than max_steps = {limits.max_steps:,}")
    if arrival.packed is not None:  # compared before it is parsed
        reply = template.read(arrival.packed, limits.castable, slack=limits.slack)
        flat = tree.flatten(reply)
    else:
        reply = arrival.reply
        flat = template.compare(reply, limits.castable)
    if arrival.digest is None and limits.needs_digest:
        raise Refused("digest", detail="it came without one")
    if arrival.digest is not None and arrays.digest(reply, *arrival.facts) != arrival.digest:
        raise Refused("digest", detail="not what the sender's digest says: truncated or changed on the way")
    reply, casts = template.cast(flat)
    notes.extend(f"{who}: {path} cast to {arrays.dtype_name(template.leaves[path].dtype)}" for path in casts)
    metrics, dropped = _clean(arrival.metrics, limits.max_metrics)
    if dropped:
        notes.append(f"{who}: metrics dropped: {dropped}")
    return reply, float(examples), steps, metrics


def _count(what: str, value: Any, *, least: int) -> int:
    """A self-reported integer, which is required."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, (bool, np.bool_))
    if isinstance(value, (float, np.floating)):
        whole = math.isfinite(value) and value == math.floor(value)
    if not whole or not least <= value < LARGEST:
        raise Refused(what, detail=f"{_shown(value)} is no whole number of at least {least}")
    return int(value)


def _shown(value: Any) -> str:
    """An untrusted value as printable text."""
    return plain(value if isinstance(value, int) else repr(value), most=64)


def _clean(metrics: Any, most: int) -> tuple[dict[str, float], str]:
    """(the finite metrics, a note about dropped ones)."""
    if not isinstance(metrics, Mapping):
        return {}, f"{type(metrics).__name__} instead of names and numbers"
    kept: dict[str, float] = {}
    dropped: list[Any] = []
    for name, value in metrics.items():
        named = isinstance(name, str) and 0 < len(name) <= LONGEST_METRIC and name.isascii() and name.isprintable()
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
        if named and number and len(kept) < most:
            kept[name] = float(value)
        else:
            dropped.append(name)
    return kept, f"{len(dropped)}, the first is {_shown(dropped[0])}" if dropped else ""
