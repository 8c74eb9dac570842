"""The same participants for several rounds in a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from consilience.core.capabilities import QueriesBeforeSelection, Reasons, Wraps
from consilience.core.client_flags import AllBut
from consilience.core.exchange import Pool
from consilience.core.protocols import Selection
from consilience.core.settings import Count
from consilience.selection.everyone import Everyone


@dataclass(frozen=True, kw_only=True)
class FixedForRounds(Wraps):
    """`inner` chooses once per `rounds` rounds; chosen clients that are not available skip the round.

    A choice depends only on the round, so `inner` receives the number of the choice as its round, all clients as
    available, and no losses.
    """

    inner: Selection = field(default_factory=Everyone)
    rounds: Count = 3
    holds = "inner"
    refuses: ClassVar[Reasons] = {
        QueriesBeforeSelection: "chooses by losses, which change every round, so its choice cannot be fixed: take a "
        "selection that does not ask, such as uniform",
    }

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """The available clients of the current choice."""
        steady = pool.knowing(available=AllBut(len(pool)), losses=np.broadcast_to(np.nan, len(pool)))
        chosen = self.inner.choose(round // self.rounds, steady, seed)
        return chosen[pool.able(chosen)]
