"""Channels applied one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from consilience.core import rng, tree
from consilience.core.capabilities import HasFeedback, HasForm, SumsOnly, Wraps, capability
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.protocols import Channel
from consilience.core.settings import Invalid
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Chain(Wraps):
    """Applies the client halves of the channels in order, and their server halves in reverse order."""

    channels: tuple[Channel, ...]
    holds = "channels"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse()

    @property
    def sums_only(self) -> bool:
        """Whether one of them delivers only a sum."""
        return any(_sums_only(channel) for channel in self.channels)

    @property
    def form(self) -> str:
        """What the whole chain sends: "codes", "sparse", "dense", or "" for a model."""
        forms = {_form(channel) for channel in self.channels}
        return next((form for form in ("codes", "sparse", "dense") if form in forms), "")

    @property
    def feedback(self) -> bool:
        """Whether one of them uses error feedback."""
        offers = (capability(channel, HasFeedback) for channel in self.channels)
        return any(found is not None and found.feedback for found in offers)

    def init(self, start: Tree) -> Tree:
        """The memory of each channel."""
        kept = {_name(i): channel.init(start) for i, channel in enumerate(self.channels)}
        return {name: memory for name, memory in kept.items() if memory}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """All client halves."""
        kept: Tree = {}
        for i, channel in enumerate(self.channels):
            seen = self._seen(i, message)
            reply, after = channel.encode(reply, seen, memory.get(_name(i), {}), rng.fold(key, i))
            if after:
                kept[_name(i)] = after
        return reply, kept

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """All server halves, the last channel's first."""
        for i in reversed(range(len(self.channels))):
            cohort = self.channels[i].decode(cohort, self._received(i, received), rng.key(key, "chain", i))
        return cohort

    def _received(self, place: int, received: Broadcast) -> Broadcast:
        shared, personal = self._seen(place, received.shared), self._seen(place, received.personal)
        return replace(received, shared=shared, personal=personal)

    def _seen(self, place: int, message: Tree) -> Tree:
        """The message as the channel at this position receives it."""
        if "model" not in message:
            return message
        return {**message, "model": {**message["model"], "params": self._anchor(place, message["model"]["params"])}}

    def _anchor(self, place: int, params: Tree) -> Tree:
        """What the channel at this position subtracts and adds: the parameters, zeros once that is done, or nothing."""
        before = [_form(channel) for channel in self.channels[:place]]
        if not any(before):
            return params
        return tree.map_leaves(torch.zeros_like, params) if set(before) <= {"", "dense"} else {}

    def _refuse(self) -> None:
        """Refuse an order in which one channel cannot read the output of another."""
        if not self.channels:
            raise Invalid("Chain.channels is empty: name at least one channel, or use channel = 'plain'")
        every = list(_each(self))
        for place, channel in enumerate(every[1:], 1):
            for earlier in every[:place]:
                reason = _conflict(earlier, channel)
                if reason:
                    raise Invalid(f"{type(channel).__name__} cannot come behind {type(earlier).__name__}: {reason}")


def _each(channel: Channel) -> Iterator[Channel]:
    """The channels of a chain, and of chains inside it, in their order."""
    if not isinstance(channel, Chain):
        yield channel
        return
    for inner in channel.channels:
        yield from _each(inner)


def _conflict(first: Channel, second: Channel) -> str:
    """Why the second channel cannot read the output of the first ("" if it can)."""
    if _form(first) == "codes":
        return "it sends codes, not numbers; put it last"
    if _sums_only(first):
        return "over-the-air addition acts on what is sent last; put it last"
    if _form(first) == "sparse":
        if _sums_only(second):
            return "clients send different places, which cannot be added over the air"
        if _form(second) == "sparse":
            return "an update can be made sparse only once"
        if not _form(second):
            return "it needs whole models; put it first"
    return ""


def _name(place: int) -> str:
    return f"channel_{place}"


def _form(channel: Channel) -> str:
    """What a channel sends: "" a model, "dense" an update, "sparse" values and indices, "codes" integers."""
    found = capability(channel, HasForm)
    return "" if found is None else found.form


def _sums_only(channel: Channel) -> bool:
    found = capability(channel, SumsOnly)
    return found is not None and found.sums_only
