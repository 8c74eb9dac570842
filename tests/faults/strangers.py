"""An engine whose clients' replies travel as bytes through `admit`, and may be tampered with on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tiny
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.screening import Limits
from consilience.flower.engine.templates import reply_template
from consilience.wire.admission import Arrival, Template, admit
from consilience.wire.arrays import Packed, digest, to_bytes

RUN = "the run"
Tamper = Callable[[list[Arrival], int], list[Arrival]]
"""(the arrivals of a round, its number from 0) -> what really arrives."""


class Strangers:
    """The usual engine does the work; what its clients send goes through bytes, tampering and admission."""

    def __init__(self, tamper: Tamper, limits: Limits | None = None, *, sealed: bool = True, **options: Any) -> None:
        self._engine, self._tamper, self._limits = tiny.engine(**options), tamper, limits or Limits()
        self._sealed = sealed
        self._templates: dict[Any, Template] = {}
        self.notes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def exchange(
        self, client: Any, channel: Any, broadcast: Broadcast, ids: np.ndarray, *, round: int, seed: int
    ) -> Cohort:
        done = self._engine.exchange(client, channel, broadcast, ids, round=round, seed=seed)
        template = self._templates.get((client, channel))
        if template is None:
            template = reply_template(client, channel, self._engine.task, broadcast, dtype=self._engine.dtype)
            self._templates[client, channel] = template
        sent = [self._arrival(done, row, template) for row in range(len(done))]
        found, _ = admit(
            self._tamper(sent, round), template=template, round=round, run=RUN, asked=ids, limits=self._limits
        )
        self.notes += found.notes
        return found.cohort(round=round, counts=done.counts)

    def _arrival(self, done: Cohort, row: int, template: Template) -> Arrival:
        reply = tree.rows(done.reply, row)
        one = Arrival(
            client=int(done.ids[row]),
            round=done.round,
            examples=int(done.examples[row]),
            steps=int(done.steps[row]),
            run=RUN,
            packed=template.pack(reply),
        )
        return replace(one, digest=digest(reply, *one.facts)) if self._sealed else one


def at(client: int, change: Callable[[Arrival], list[Arrival]], round: int = 1) -> Tamper:
    """Change what one client sends in one round."""

    def tamper(arrivals: list[Arrival], now: int) -> list[Arrival]:
        if now != round:
            return arrivals
        return [sent for one in arrivals for sent in (change(one) if one.client == client else [one])]

    return tamper


def packed(key: str, item: Any) -> Callable[[Arrival], list[Arrival]]:
    """A client that sends this under a key; its digest is taken away, since a liar would lie about that as well."""
    return lambda one: [replace(one, packed={**(one.packed or {}), key: item}, digest=None)]


def tensor(key: str, value: Tensor) -> Callable[[Arrival], list[Arrival]]:
    """A client that sends this tensor under a key."""
    return packed(key, to_bytes(value))


def altered(
    key: str, change: Callable[[Packed], Packed], *, keep_digest: bool = True
) -> Callable[[Arrival], list[Arrival]]:
    """Bytes that are changed on the way, which the sender's digest does not know."""

    def alter(one: Arrival) -> list[Arrival]:
        assert one.packed is not None
        changed = {**one.packed, key: change(one.packed[key])}
        return [replace(one, packed=changed, digest=one.digest if keep_digest else None)]

    return alter


def nobody(one: Arrival) -> list[Arrival]:
    """A client that sends nothing."""
    return []


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)
