"""The orders of one round, written into a message for each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from consilience.core import tree
from consilience.core.exchange import Broadcast
from consilience.core.tree import Tree
from consilience.engines.workload import Workload
from consilience.flower.messages import wire


@dataclass(frozen=True, eq=False, kw_only=True)
class Orders:
    """What the chosen clients are to do in a round."""

    rule: str  # its name in the agreement
    broadcast: Broadcast
    workload: Workload
    memory: Sequence[str]  # of every client: digest of its memory, "" before its first
    start: Tree | None  # the initial model, where a client needs it for its first memory
    agreement: dict[str, str]
    round: int
    seed: int
    run: str
    case: str

    def content(self, mine: Workload, head: dict[str, Any] | None) -> Any:
        """The message for some of the clients; `head`: of the audit log, if there is one."""
        clients = mine.ids.tolist()
        known = [self.memory[client] for client in clients]
        content = wire.records().RecordDict()
        wire.put_order(
            content,
            wire.Order(
                run=self.run,
                case=self.case,
                rule=self.rule,
                round=self.round,
                seed=self.seed,
                agreement=self.agreement,
                clients=clients,
                steps=mine.steps.tolist(),
                heard=mine.heard.tolist(),
                memory=known,
            ),
        )
        wire.put_tree(content, "shared", tree.to(self.broadcast.shared, "cpu"))
        wire.put_tree(content, "personal", tree.to(personal_part(self.broadcast, mine), "cpu"))
        if head is not None:
            wire.put_json(content, wire.AUDIT, head)
        if self.start is not None and not all(known):
            wire.put_tree(content, "start", tree.to(self.start, "cpu"))
        return content


def personal_part(broadcast: Broadcast, mine: Workload) -> Tree:
    """The part of a broadcast that is sent to these clients only."""
    place = torch.from_numpy(mine.place)
    return tree.map_leaves(lambda leaf: leaf[place.to(leaf.device)], broadcast.personal)
