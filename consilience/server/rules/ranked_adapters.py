"""Clients whose adapters have different ranks: each trains and sends the first rows of A and columns of B alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from consilience.core.capabilities import Buffers, Reasons, ReceivesSchedule, Wraps
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.protocols import ServerRule
from consilience.core.settings import Count, Invalid
from consilience.core.tree import Tree, here
from consilience.layers.adapters import LORA, Factors, pairs_in, pairs_of, within_rank
from consilience.server.averaging.averaging import Averaging


@dataclass(frozen=True, kw_only=True)
class RankedAdapters(Wraps):
    """`server`, for which client k of K has rank `ranks`[k mod len(ranks)], at most that of the model's adapters.

    Factors keep the model's shapes: what lies beyond a client's rank is 0, as `AdapterTraining` leaves it. An adapter
    with less rank than a client may have is trained whole.
    """

    server: ServerRule = field(default_factory=Averaging)
    ranks: tuple[Count, ...] = ()
    factors: Factors = LORA
    holds = "server"
    refuses: ClassVar[Reasons] = {
        ReceivesSchedule: "sends clients what depends on their work, without their ranks: use an averaging server",
        Buffers: "updates when a buffer is full, which was not tried with different ranks: give all clients one rank",
    }

    @property
    def needs_each_reply(self) -> bool:
        """As in the server."""
        return self.server.needs_each_reply

    def init(self, start: Tree, clients: int) -> Tree:
        """As in the server; ranks that do not fit the clients or the model are refused."""
        if self.ranks:
            self._refuse(start["params"])
        return self.server.init(start, clients)

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """As in the server, and to each client its rank."""
        sent = self.server.broadcast(state, ids)
        model = {**sent.shared, **sent.personal}["model"]
        device = next(iter(model["params"].values())).device
        return replace(sent, personal={**sent.personal, "rank": self._ranks(ids, device)})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """As in the server; what a channel has added beyond a client's rank is taken off."""
        pairs = pairs_in(cohort.reply["model"]["params"], self.factors)
        ranks = self._ranks(cohort.ids, cohort.examples.device)
        return self.server.update(state, replace(cohort, reply=within_rank(here(cohort.reply), pairs, ranks)))

    def model(self, state: Tree) -> Tree:
        """As in the server."""
        return self.server.model(state)

    def _ranks(self, ids: np.ndarray, device: torch.device) -> Tensor:
        ranks = self.ranks or (torch.iinfo(torch.int64).max,)  # (): the model's own
        return torch.tensor([ranks[client % len(ranks)] for client in ids], device=device)

    def _refuse(self, params: Mapping[str, Tensor]) -> None:
        largest = max(len(params[pair.a]) for pair in pairs_of(params, self.factors))
        if max(self.ranks) > largest:
            raise Invalid(
                f"ranks: a client has rank {max(self.ranks)}, but the model's adapters have at most {largest}: build "
                "the model with the largest rank of all clients"
            )
