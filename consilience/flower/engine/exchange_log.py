"""The entries of one exchange in the audit log, if there is one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from consilience.core import tree
from consilience.core.exchange import Broadcast
from consilience.core.refusal import Refusal
from consilience.engines.workload import Workload
from consilience.flower.audit.log import AuditLog
from consilience.flower.engine.agreement import TRAIN
from consilience.flower.messages.orders import personal_part
from consilience.flower.secure.checked_grid import SumResult
from consilience.flower.secure.cohort import SecureRound
from consilience.flower.secure.sum import refusals_of


class ExchangeLog:
    """Logs messages and replies; without a log it does nothing."""

    def __init__(self) -> None:
        self.audit: AuditLog | None = None

    def sent(
        self, rule: str, broadcast: Broadcast, workload: Workload, nodes: Mapping[int, Sequence[int]], round: int
    ) -> dict[str, Any] | None:
        """Log what is about to be sent to the clients of each node; returns the log's head, which is sent with it."""
        if self.audit is None:
            return None
        parts = {}
        for node, clients in nodes.items():
            mine = workload.only(np.isin(workload.ids, clients))
            parts[node] = clients, tree.to(personal_part(broadcast, mine), "cpu")
        return self.audit.sent(round, rule, tree.to(broadcast.shared, "cpu"), parts)

    def received(
        self,
        rule: str,
        workload: Workload,
        digests: Mapping[int, str],
        refusals: Iterable[Refusal],
        round: int,
        *,
        masked: bool = False,
    ) -> None:
        """Log which replies came, and which clients were refused or silent."""
        if self.audit is not None:
            refusals = tuple(refusals)
            heard = {*digests, *(refusal.client for refusal in refusals)}
            silent = [client for client in workload.ids.tolist() if client not in heard]
            self.audit.received(round, rule, digests, refusals, silent, masked=masked)

    def summed(self, asked: SecureRound, found: SumResult, stale: Iterable[Refusal]) -> None:
        """Log the masked replies of a secure sum."""
        client_of = {node: client for client, node in asked.nodes.items()}
        digests = {client_of[node]: digest for node, digest in found.digests.items()}
        refusals = (*refusals_of(found, client_of), *stale)
        self.received(TRAIN, asked.orders.workload, digests, refusals, asked.orders.round, masked=True)
