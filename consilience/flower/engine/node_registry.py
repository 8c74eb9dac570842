"""Which node holds which clients, with how many rows. Node ids are random, so every node is asked."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any, get_args

import numpy as np

from consilience.core.plans import Split
from consilience.core.refusal import Refused, contained, plain
from consilience.core.rounds import TooFewClients
from consilience.core.screening import Limits
from consilience.flower.audit.log import AuditLog
from consilience.flower.engine.agreement import differences
from consilience.flower.engine.health import NodeHealth
from consilience.flower.messages import wire
from consilience.flower.messages.limited_log import LimitedLog
from consilience.flower.messages.mail import Mail, NodeReplies, Waiting
from consilience.flower.messages.members import Members, refuse_shared
from consilience.flower.messages.pulling import TEXT, MessageLimit
from consilience.wire.admission import identities

log = logging.getLogger("consilience.flower")

SPLITS = get_args(Split)
EACH = 96  # characters of an introduction for one client: its number, and its rows
STRANGERS = 64  # nodes beyond the number of clients that are asked at once: others wait until these have answered
PATIENCE = 30.0  # seconds that a round waits for nodes that no round has waited for; later answers count later


class NodeRegistry:
    """Clients by node, and their sizes; nodes may connect and disconnect at any time."""

    def __init__(
        self,
        mail: Mail,
        *,
        clients: int,
        case: str,
        agreement: dict[str, str],
        waiting: Waiting,
        limits: Limits,
        members: Members | None = None,
    ) -> None:
        if members is not None:
            refuse_shared(members, clients)
        self._members = members  # None: a registered node may be any client
        self._introduction = MessageLimit(arrays=0, text=TEXT + EACH * clients)
        self._asked: Counter[int] = Counter()  # node -> how often it was asked: those asked least are asked first
        self._mail, self._case, self._agreement = mail, case, agreement
        self._waiting, self._limits = waiting, limits
        self.sizes = {split: np.zeros(clients, dtype=np.int64) for split in SPLITS}
        self.node_of: dict[int, int] = {}  # client -> node that is online
        self._met: set[int] = set()  # nodes that have introduced themselves
        self._refused: dict[int, str] = {}
        self._logged: Counter[str] = Counter()  # warnings by sender: the same may be refused every round
        self._waited: set[int] = set()  # nodes that a round has waited for: none waits again, however they answered
        self._strangers: set[int] = set()  # nodes online whose keys are not in the list
        self.audit: AuditLog | None = None
        self.health = NodeHealth()

    def __len__(self) -> int:
        return len(self.sizes["train"])

    def present(self) -> np.ndarray:
        """[K] which clients are online, after an update."""
        keys = self._online()
        online = set(keys)
        gone = [client for client, node in self.node_of.items() if node not in online]
        for client in gone:
            del self.node_of[client]
        if gone and self.audit is not None:
            self.audit.left(gone)
        self._met &= online
        self._refused = {node: why for node, why in self._refused.items() if node in online}
        self._meet(keys, sorted(online - self._met, key=lambda node: (self._asked[node], node)))
        self.health.connected(keys, self.node_of, self._refused)
        here = np.zeros(len(self), dtype=bool)
        here[list(self.node_of)] = True
        return here

    def _online(self) -> dict[int, str]:
        """The permitted nodes that are online, with the fingerprints of their keys ("" without a list of members)."""
        if self._members is None:
            return dict.fromkeys(self._mail.nodes(), "")
        keys = self._mail.keys()
        with LimitedLog("introductions", self._logged) as warnings:
            for node in sorted(set(keys) - self._strangers):
                if keys[node] not in self._members:
                    warnings.add("strangers", f"node {node} is not asked: its key is not in the list of members")
        self._strangers = {node for node, key in keys.items() if key not in self._members}
        return {node: key for node, key in keys.items() if key in self._members}

    def alone(self) -> dict[int, int]:
        """Client -> node, of the clients that are alone on their node."""
        held = Counter(self.node_of.values())
        return {client: node for client, node in self.node_of.items() if held[node] == 1}

    def wait_for(self, least: int) -> np.ndarray:
        """[K] which clients are online, once at least `least` are; `TooFewClients` when that takes too long."""
        end, logged = time.monotonic() + self._waiting.wait, -1
        while True:
            here = self.present()
            if here.sum() >= least:
                return here
            if time.monotonic() >= end:
                raise TooFewClients(self._explain(int(here.sum()), least))
            if here.sum() != logged:
                logged = int(here.sum())
                log.info("waiting for clients: %d of %d are connected", logged, least)
            time.sleep(1.0)

    def _explain(self, seen: int, least: int) -> str:
        why = "".join(f"; node {node} was refused: {reason}" for node, reason in sorted(self._refused.items())[:4])
        return (
            f"{seen} of the {least} clients that are needed were connected after {self._waiting.wait:g} seconds "
            f"({len(self._mail.nodes())} nodes online{why}). Start the missing SuperNodes and run it again: "
            "it continues after the last finished round"
        )

    def _meet(self, keys: dict[int, str], nodes: list[int]) -> None:
        """Ask new nodes which clients they hold, a limited number at once, so that unknown nodes delay no others."""
        if not nodes:
            return
        answers, asked = self._mail.later()
        done = asked.union(answers.replies, answers.failures, answers.refused)
        nodes = [node for node in nodes if node not in done][: len(self) + STRANGERS]
        if nodes:
            self._ask(keys, nodes, answers)
        answers.failures.update((node, str(problem)) for node, problem in answers.refused.items())
        with LimitedLog("introductions", self._logged) as warnings:
            self._learn(answers, keys, warnings)

    def _ask(self, keys: dict[int, str], nodes: list[int], found: NodeReplies) -> None:
        """Add the answers of these nodes; if all were asked before, without waiting for them."""
        self._asked = Counter({node: self._asked[node] for node in keys})
        self._asked.update(nodes)
        contents = {}
        for node in nodes:
            contents[node] = wire.records().RecordDict()
            wire.put_json(contents[node], "query", {"case": self._case})
        most = min(self._waiting.deadline, self._waiting.wait)
        patience = 0.0 if self._waited.issuperset(nodes) else min(PATIENCE, most)
        self._waited.update(nodes)
        bounds = dict.fromkeys(nodes, self._introduction)
        answers = self._mail.ask(contents, "query", "introduction", patience, bounds, open_for=most)
        found.replies.update(answers.replies)
        found.failures.update(answers.failures)
        found.refused.update(answers.refused)

    def _learn(self, answers: NodeReplies, keys: dict[int, str], warnings: LimitedLog) -> None:
        """Record which clients the nodes report, as far as that is valid."""
        claims: list[tuple[int, Any]] = []
        taking_part: dict[int, dict[int, list[int]]] = {}
        sizes: dict[int, list[int]] = {}
        for node, content in answers.replies.items():
            if node not in keys or node in self._met:  # disconnected meanwhile, or known by another answer
                continue
            try:
                with contained():
                    found = self._read(content)
                    if self._members is not None:
                        self._members[keys[node]].refuse_claims(found)
                    self._refuse_other_sizes(found)
            except Refused as problem:
                self._refuse(node, str(problem), warnings, keys.get(node, ""))
                continue
            taken = [client for client in found if self.node_of.get(client, node) != node]
            if taken:  # the earlier node keeps the client; once it has disconnected, this one is asked again
                why = f"client {plain(taken, most=80)} is online already"
                warnings.add(f"node {node}", f"node {node} refused: {why}")
                self._refused[node] = why
                continue
            claims += [(node, client) for client in found]
            taking_part[node] = found
            sizes |= found
        for node, why in answers.failures.items():
            if node in keys and node not in self._met:
                self._refuse(node, why, warnings, keys.get(node, ""))
        known, refusals = identities(claims, len(self))
        for refusal in refusals:
            warnings.add(f"client {refusal.client}", refusal)
        for client, node in known.items():
            self.node_of[client] = node
            for column, rows in zip(self.sizes.values(), sizes[client]):
                column[client] = rows
            self._met.add(node)
        for node, found in taking_part.items():
            mine = {client: rows for client, rows in found.items() if known.get(client) == node}
            if mine and self.audit is not None:
                self.audit.joined(node, keys.get(node, ""), mine)

    def _refuse_other_sizes(self, found: dict[int, list[int]]) -> None:
        """Rows are fixed by a client's first introduction: its weight must not grow during a run."""
        for client, rows in found.items():
            known = 0 <= client < len(self) and [int(sizes[client]) for sizes in self.sizes.values()]
            if known and any(known) and known != rows:
                raise Refused("examples", detail=f"client {client} had {known} rows ({', '.join(SPLITS)}), now {rows}")

    def _refuse(self, node: int, why: str, warnings: LimitedLog, key: str) -> None:
        self._refused[node] = why
        self._met.add(node)  # not asked again while it stays online
        warnings.add(f"node {node}", f"node {node} refused: {why}")
        if self.audit is not None:
            self.audit.turned_away(node, key, why)

    def _read(self, content: Any) -> dict[int, list[int]]:
        """Client -> rows of each split, as a node reports; refused if the numbers are invalid."""
        said = wire.get_json(content, "introduction")
        if not isinstance(said, dict):
            raise Refused("format", detail="no introduction")
        differing = differences(self._agreement, said.get("agreement"))
        if differing:
            raise Refused("settings", detail=f"its settings differ: {differing}")
        columns: list[Any] = [said.get(key) for key in ("clients", *SPLITS)]
        if not all(
            isinstance(column, list) and len(column) == len(columns[0] or ()) <= len(self) for column in columns
        ):
            named = ", ".join(("clients", *SPLITS))
            raise Refused("format", detail=f"{named} are not lists of one length, up to {len(self)}")
        for number in (number for column in columns for number in column):
            if type(number) is not int or not 0 <= number <= self._limits.max_examples:
                raise Refused("examples", detail=f"{plain(repr(number), most=40)} is no count that is allowed")
        return {client: rows for client, *rows in zip(*columns)}
