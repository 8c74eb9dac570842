"""The health of each node: since when it is connected, when it last answered, and its refused replies."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from consilience.core.refusal import Refusal
from consilience.flower.messages.mail import NodeReplies

MOST_NODES = 2000  # nodes remembered; those not seen for longest are dropped first


@dataclass(eq=False, kw_only=True)
class _Node:
    joined: str
    seen: str
    online: bool = True
    clients: list[int] = field(default_factory=list)
    answered: int = 0  # messages of rounds
    failed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    problem: str = ""  # the last one, in words


class NodeHealth:
    """Counts and wall-clock times by node; results of the run do not depend on them."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}  # those seen last come last

    def connected(self, online: Iterable[int], node_of: Mapping[int, int], problems: Mapping[int, str]) -> None:
        """Update which nodes are online, with which clients, and why nodes without clients have none."""
        here, now = set(online), _now()
        held: dict[int, list[int]] = {}
        for client, node in node_of.items():
            held.setdefault(node, []).append(client)
        for node, known in self._nodes.items():
            known.online = node in here
        for node in sorted(here):
            known = self._seen(node, now)
            known.clients = sorted(held.get(node, known.clients))
            if node in problems:
                known.problem = problems[node]
        for node in list(self._nodes)[: max(0, len(self._nodes) - MOST_NODES)]:
            del self._nodes[node]

    def replied(self, answers: NodeReplies) -> None:
        """Update by the answers to one round of messages; `answered` does not change for silent nodes."""
        now = _now()
        for node in answers.replies:
            self._seen(node, now).answered += 1
        for node, why in answers.failures.items():
            known = self._seen(node, now)
            known.failed, known.problem = known.failed + 1, why
        for node, _ in answers.stale:
            self._seen(node, now)

    def refused(self, refusals: Iterable[Refusal], node_of: Mapping[int, int]) -> None:
        """Count refused replies by reason at the node that sent them."""
        for refusal in refusals:
            client = refusal.client
            node = node_of.get(client) if isinstance(client, int) else _named(client)
            if node in self._nodes:
                self._nodes[node].refused[refusal.reason] += 1
                self._nodes[node].problem = str(refusal)

    def facts(self, sizes: np.ndarray) -> list[dict[str, Any]]:
        """One row per node, by its first client; ids are text, since JSON readers round such large numbers.

        sizes: [K] the training rows of each client, as its node reported them.
        """
        rows = [
            {
                "node": str(node),
                "clients": known.clients,
                "train_rows": sizes[known.clients].tolist(),
                "online": known.online,
                "joined": known.joined,
                "last_seen": known.seen,
                "answered": known.answered,
                "failed": known.failed,
                "refused": dict(sorted(known.refused.items())),
                "problem": known.problem,
            }
            for node, known in self._nodes.items()
        ]
        return sorted(rows, key=lambda row: (row["clients"][:1] or [float("inf")], row["node"]))

    def _seen(self, node: int, now: str) -> _Node:
        known = self._nodes.pop(node, None) or _Node(joined=now, seen=now)
        if not known.online:
            known.joined = now
        known.seen, known.online = now, True
        self._nodes[node] = known
        return known


def _named(sender: str) -> int | None:
    """The number in 'of node 12'."""
    number = sender.removeprefix("of node ")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 24 else None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
