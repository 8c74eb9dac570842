"""Choice of the malicious clients, and replacement of their replies.

An attack is a channel whose server half forges replies: the strongest attacker knows the whole cohort, and only the
server half sees it. In a chain it acts on replies as they are at its position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.settings import Fraction, Invalid, Whole, check
from consilience.core.tree import Tree

Forge = Callable[[Tree, Tree], Tree]
"""(own updates of malicious clients [b, ...], honest updates [h, ...]) in float64 -> forged updates [b, ...]."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Base class: the listed `clients`, or a `fraction` of all, are malicious; `decode` forges what they send."""

    clients: tuple[Whole, ...] = ()
    fraction: Fraction | None = None

    def __post_init__(self) -> None:
        check(self)
        require_some(type(self).__name__, self.clients, self.fraction)

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The reply, unchanged."""
        return reply, memory


def require_some(part: str, clients: tuple[int, ...], fraction: float | None) -> None:
    """Refuse an attack without attackers, or with two definitions of them."""
    if bool(clients) == (fraction is not None):
        raise Invalid(f"{part} takes either clients or fraction: give exactly one of them")


def are_malicious(ids: np.ndarray, clients: tuple[int, ...], fraction: float | None) -> np.ndarray:
    """[m] flags: the listed clients, or every (1 / fraction)-th, which is floor(fraction K) of K clients."""
    if fraction is None:
        return np.isin(ids, clients)
    count = np.floor((ids + 1) * fraction + 1e-9) - np.floor(ids * fraction + 1e-9)
    return count > 0


def split(cohort: Cohort, clients: tuple[int, ...], fraction: float | None) -> tuple[Tensor, Tensor]:
    """Indices of (malicious, honest) clients among those that replied with finite values."""
    malicious = are_malicious(cohort.ids, clients, fraction)
    there = np.ones(len(cohort), dtype=bool) if cohort.heard is None else cohort.heard
    finite = tree.all_finite(cohort.reply) if len(cohort) else there
    honest = np.flatnonzero(~malicious & there & finite)
    device = cohort.examples.device
    return torch.from_numpy(np.flatnonzero(malicious & there)).to(device), torch.from_numpy(honest).to(device)


def forged(cohort: Cohort, received: Broadcast, malicious: Tensor, honest: Tensor, forge: Forge) -> Cohort:
    """The cohort with the parameters of malicious clients replaced; the rest of their replies is unchanged."""
    if not len(malicious) or not len(honest):
        return cohort
    start = starts(cohort, received)
    params = cohort.reply["model"]["params"]
    updates = tree.map_leaves(lambda p, s: p.to(torch.float64) - s.to(torch.float64), params, start)
    fake = forge(tree.rows(updates, malicious), tree.rows(updates, honest))

    def put(stacked: Tensor, begin: Tensor, update: Tensor) -> Tensor:
        own = begin[malicious] if len(begin) == len(stacked) else begin
        return stacked.index_copy(0, malicious, (own.to(torch.float64) + update).to(stacked.dtype))

    model = {**cohort.reply["model"], "params": tree.map_leaves(put, params, start, fake)}
    return with_model(cohort, model)


def starts(cohort: Cohort, received: Broadcast) -> Tree:
    """[m, ...] the parameters that each client received, or [1, ...] if all received the same."""
    if not isinstance(cohort.reply.get("model"), dict) or "params" not in cohort.reply["model"]:
        raise Invalid(f"attacks forge replies that hold a model, but these hold {', '.join(cohort.reply)}")
    if "model" in received.personal:
        return received.personal["model"]["params"]
    if "model" not in received.shared:
        raise Invalid("attacks need to know the model that clients started from, but the server sent none")
    return tree.map_leaves(lambda leaf: leaf.unsqueeze(0), received.shared["model"]["params"])


def with_model(cohort: Cohort, model: Tree) -> Cohort:
    """The same cohort with these models."""
    return replace(cohort, reply={**cohort.reply, "model": model})


def alike(update: Tree, count: int) -> Tree:
    """[count, ...] the same update for all malicious clients."""
    return tree.map_leaves(lambda leaf: leaf.expand(count, *leaf.shape), update)
