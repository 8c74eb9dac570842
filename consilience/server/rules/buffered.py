"""The asynchronous server: it updates after a few replies, even if they started from older models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core.capabilities import Buffers, MovesWithoutReplies, Reasons, TrainsModel, Wraps
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Count, Fraction
from consilience.core.tree import Tree
from consilience.privacy import SpendsPrivacy
from consilience.server.averaging.averaging import Averaging
from consilience.server.protocols import Combine, Step, Weighting
from consilience.server.rules.staleness import PolynomialStaleness, Staleness


@dataclass(frozen=True, kw_only=True)
class Buffered(Wraps):
    """A round is `buffer` replies, while up to `concurrency` clients work (None: all that are selected).

    Before `averaging` weights and merges them, stale replies are adjusted: with moves = "update" a client's update is
    applied to the current model, w + rate s(tau) (w_k - w_sent); with moves = "model" the current model moves towards
    the client's, w + rate s(tau) (w_k - w). tau is the number of rounds since the client received its model.
    """

    averaging: Averaging = field(default_factory=Averaging)
    buffer: Count = 10
    concurrency: Count | None = None
    staleness: Staleness = field(default_factory=PolynomialStaleness)
    rate: Fraction = 1.0
    moves: Literal["update", "model"] = "update"
    holds = "averaging"
    refuses: ClassVar[Reasons] = {
        Buffers: "has a buffer of its own: there can be only one",
        MovesWithoutReplies: "moves without replies, and a buffer waits for them",
        TrainsModel: "trains on replies as they are, and these are of different ages",
        SpendsPrivacy: "counts rounds in which clients take part at random, and a buffer takes the fastest",
    }

    @property
    def needs_each_reply(self) -> bool:
        """As averaging: staleness is known beforehand, so a sum remains sufficient."""
        return self.averaging.needs_each_reply

    @property
    def weighting(self) -> Weighting:
        """The weighting of `averaging`."""
        return self.averaging.weighting

    @property
    def combine(self) -> Combine:
        """The combining rule of `averaging`."""
        return self.averaging.combine

    @property
    def step(self) -> Step:
        """The server step of `averaging`."""
        return self.averaging.step

    def init(self, start: Tree, clients: int) -> Tree:
        """As averaging."""
        return self.averaging.init(start, clients)

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """As averaging."""
        return self.averaging.broadcast(state, ids)

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The next global model."""
        old = torch.zeros_like(cohort.examples)
        if cohort.staleness is not None:
            old = torch.from_numpy(cohort.staleness).to(old)
        scale = self.rate * self.staleness.discount(old)  # [m]
        notes: Notes = {"staleness": old, "discount": scale}
        if bool((scale == 1).all()) and (not bool(old.any()) or self.moves == "model"):
            after, found = self.averaging.update(state, cohort)  # nothing is stale: identical bits
            return after, {**found, **notes}
        # weighted by the full update, since a discounted update would look like a small one
        full = self._current(state["model"], cohort, torch.ones_like(scale))
        sent = {kind: {n: state["model"][kind][n] for n in named} for kind, named in full.reply["model"].items()}
        weights, kept, found = self.averaging.weighting.weigh(full, sent, state["weighting"])
        discounted = self._current(state["model"], cohort, scale)
        given = replace(self.averaging, weighting=_Given(weights, self.averaging.weighting.needs_each_reply))
        after, _ = given.update(state, discounted)
        return {**after, "weighting": kept}, {"weights": weights, **found, **notes}

    def model(self, state: Tree) -> Tree:
        """The global model."""
        return self.averaging.model(state)

    def _current(self, model: Tree, cohort: Cohort, scale: Tensor) -> Cohort:
        """The cohort as if its clients had started from `model`, with updates times `scale`."""
        replies, started = cohort.reply["model"], _started(model, cohort)

        def moved(start: Tree, replies: Tree, now: Tree) -> Tree:
            return {name: _moved(now[name], start[name], reply, scale) for name, reply in replies.items()}

        if self.moves == "model":
            fresh = {kind: moved(model[kind], named, model[kind]) for kind, named in replies.items()}
        else:  # buffers are statistics, not updates: a variance plus a difference may be negative
            fresh = {**replies, "params": moved(started["params"], replies["params"], model["params"])}
        return replace(cohort, reply={**cohort.reply, "model": fresh})


@dataclass(frozen=True)
class _Given:
    """Fixed weights."""

    weights: Tensor
    needs_each_reply: bool

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """The fixed weights."""
        return self.weights, state, {}


def _started(model: Tree, cohort: Cohort) -> Tree:
    """The models [m, ...] or [...] that clients started from."""
    if cohort.received is None:
        return model
    return cohort.received.personal.get("model") or cohort.received.shared["model"]


def _moved(now: Tensor, start: Tensor, reply: Tensor, scale: Tensor) -> Tensor:
    """now + scale (reply - start), [m, ...]; the reply itself, bit for bit, where nothing changes."""
    if not reply.is_floating_point():
        return reply
    share = scale.to(reply.dtype).reshape(-1, *(1,) * (reply.dim() - 1))
    same = (share == 1) & (start == now)
    return torch.where(same, reply, now + share * (reply - start))
