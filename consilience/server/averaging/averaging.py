"""The averaging server: weight the replies, merge them, take a server step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from consilience.core.capabilities import capability
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.protocols import waits_for_replies
from consilience.core.settings import Invalid, check
from consilience.core.tree import Tree
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.steps.plain import Replace
from consilience.server.averaging.weighting.by_size import ByExamples, UniformWeights
from consilience.server.protocols import (
    Combine,
    CombineAround,
    Ledger,
    RoundOutcome,
    Step,
    Tolerant,
    Weighting,
    read_by,
    take_step,
    uses_weights,
)


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """One global model: `weighting` gives each reply a weight, `combine` merges them, `step` updates the parameters."""

    weighting: Weighting = field(default_factory=ByExamples)
    combine: Combine = field(default_factory=WeightedMean)
    step: Step = field(default_factory=Replace)
    ledgers: tuple[Ledger, ...] = ()

    def __post_init__(self) -> None:
        check(self)
        plain = isinstance(self.weighting, (ByExamples, UniformWeights))  # the defaults, accepted with any `combine`
        if not plain and not uses_weights(self.combine):
            raise Invalid(
                f"combine = {self.combine!r} counts every reply the same, so that weighting = {self.weighting!r} would "
                "have no effect: leave one of them out"
            )

    @property
    def needs_each_reply(self) -> bool:
        """Whether any of its parts reads single replies."""
        replies = [self.weighting.needs_each_reply, self.combine.needs_each_reply]
        return any([*replies, *(ledger.needs_each_reply for ledger in self.ledgers)])

    @property
    def queued(self) -> bool:
        """Whether it has parts that read single replies, and all of them do so on the device."""
        parts: list[Weighting | Combine | Ledger] = [self.weighting, self.combine, *self.ledgers]
        reading = [part for part in parts if part.needs_each_reply]
        return bool(reading) and not any(waits_for_replies(part) for part in reading)

    @property
    def reads(self) -> tuple[str, ...]:
        """What weighting and ledgers read of the replies."""
        return read_by(self.weighting, *self.ledgers)

    def init(self, start: Tree, clients: int) -> Tree:
        """The initial model and the states of the parts."""
        tolerant = capability(self.combine, Tolerant)
        if tolerant is not None:
            tolerant.check_against(clients)
        weighting, step = self.weighting.init(start, clients), self.step.init(start["params"])
        state: Tree = {"model": start, "weighting": weighting, "step": step}
        if self.ledgers:
            state["ledgers"] = {ledger.name: ledger.initial(start, clients) for ledger in self.ledgers}
            state["clients"] = torch.tensor(clients)
        return state

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The global model and what the ledgers send, to all clients."""
        sent = {ledger.name: ledger.broadcast(state["ledgers"][ledger.name]) for ledger in self.ledgers}
        return Broadcast(shared={"model": state["model"], **{name: tree for name, tree in sent.items() if tree}})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The next global model."""
        model = state["model"]
        sent = _sent(model, cohort.reply["model"])
        weights, weighting, notes = self.weighting.weigh(cohort, sent, state["weighting"])
        around = capability(self.combine, CombineAround)
        if around is not None:
            merged = around.merge_around(cohort.reply["model"], weights, sent)
        else:
            merged = self.combine.merge(cohort.reply["model"], weights)
        if sent is not model:  # the server's copy of personal layers is unchanged
            merged = {kind: {**leaves, **merged[kind]} for kind, leaves in model.items()}
        params, step = take_step(self.step, model["params"], merged["params"], state["step"], cohort.round)
        after: Tree = {"weighting": weighting, "step": step}
        if self.ledgers:
            after["ledgers"] = {}
            after["clients"] = state["clients"]
        for ledger in self.ledgers:
            outcome = RoundOutcome(cohort, weights, model["params"], params, int(state["clients"]))
            after["ledgers"][ledger.name], params = ledger.update(state["ledgers"][ledger.name], outcome)
        moved = {"params": params, "buffers": merged["buffers"]}
        return {"model": moved, **after}, {"weights": weights, **notes}

    def model(self, state: Tree) -> Tree:
        """The global model."""
        return state["model"]


def _sent(model: Tree, replies: Tree) -> Tree:
    """The leaves of the model that replies hold: all, unless some layers are personal."""
    if all(len(leaves) == len(replies[kind]) for kind, leaves in model.items()):
        return model
    return {kind: {name: leaves[name] for name in replies[kind]} for kind, leaves in model.items()}
