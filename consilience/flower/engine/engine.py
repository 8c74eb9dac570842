"""The server side: an engine whose clients are reached through a Flower Grid."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import IndependentReplies, capability
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.federation import Rows
from consilience.core.protocols import Channel, ClientRule
from consilience.core.refusal import Refusal, tally
from consilience.core.screening import Limits
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.placement import Placement
from consilience.engines.vectorised.program import memories
from consilience.engines.vectorised.tuning import LaneChoice, LaneName
from consilience.engines.workload import Workload, heard_steps
from consilience.environments.environment import Environment
from consilience.flower.audit.log import AuditLog
from consilience.flower.engine.agreement import PRE_TRAINING, TRAIN, agreement, name_of, rules_of
from consilience.flower.engine.node_exchange import NodeExchange
from consilience.flower.engine.node_registry import NodeRegistry
from consilience.flower.engine.templates import reply_template
from consilience.flower.messages.inbox import Inbox
from consilience.flower.messages.mail import Mail, Waiting
from consilience.flower.messages.members import Members
from consilience.flower.messages.orders import Orders
from consilience.flower.secure.cohort import refuse_tables
from consilience.flower.secure.sum import refuse_other_flower
from consilience.flower.secure.terms import EXPERIMENTAL, FEWEST, UNTESTED, SecureTerms
from consilience.wire.template import Template

log = logging.getLogger("consilience.flower")

NOTHING = bytes(32)  # the digest of no memory


class FlowerEngine:
    """Sends each node one message with what its chosen clients are to do; replies are checked, then stacked by client.

    `algorithm` is built on both sides from one config, so only trees and small settings are sent. `test`: rows that the
    server may test on; without them clients test on their own. min_available: clients that must be connected for a
    round to begin; left out, all at first, and any number later. secure: of the replies to training, the server sees
    only the sum. members: which node keys may speak for which clients; None: a registered node may be any. Memories
    stay with their clients: `recall` gives their digests.
    """

    def __init__(
        self,
        grid: Any,
        task: Task,
        algorithm: Algorithm,
        *,
        clients: int,
        run: str,
        case: str = "",
        min_available: int | None = None,
        environment: Environment | None = None,
        waiting: Waiting | None = None,
        limits: Limits | None = None,
        test: Rows | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        lane: LaneName = "serial",
        secure: SecureTerms | None = None,
        members: Members | None = None,
    ) -> None:
        self._placement = Placement.of(device, dtype)
        self.device, self.dtype = self._placement
        self.environment, self._limits = environment or Environment(), limits or Limits()
        self.environment.check_against(clients)
        _refuse_simulated_time(self.environment)
        self._choice = LaneChoice(lane="serial" if lane == "auto" else lane)
        self._waiting = waiting or Waiting()
        self._task = self._placement.task(task)
        self.algorithm, self._rules = algorithm, rules_of(algorithm)
        independent = capability(algorithm.server, IndependentReplies)
        self._asks_once = independent is not None and independent.independent_replies
        self._run, self._case = run, case
        self._agreement, self._secure = agreement(algorithm, task, dtype, clients, secure), secure
        self._mail = Mail(grid)
        self._registry = NodeRegistry(
            self._mail,
            clients=clients,
            case=case,
            agreement=self._agreement,
            waiting=self._waiting,
            limits=self._limits,
            members=members,
        )
        self._declared = frozenset(client for one in (members or {}).values() for client in one.train)
        self._at_first, self._least = min_available or clients, min_available or (FEWEST if secure else 1)
        self._nodes = NodeExchange(self._mail, self._registry, self._waiting, self._limits, self._least)
        self._test = None if test is None else self._placement.rows(test)
        start = self.start()
        if secure is not None:
            refuse_other_flower()
            refuse_tables(start)
        self._remembers = bool(tree.flatten(memories(algorithm.client.init(start), algorithm.channel.init(start))))
        if secure is not None and secure.noise is not None and self._remembers:
            raise Invalid(
                "clients of this algorithm keep a memory, whose digest the server is told: in a private secure sum "
                "nothing may depend on rows but what has noise. Leave algorithm.terms or deploy.secure_aggregation out"
            )
        self._digests = [""] * clients
        self._templates: dict[str, Template] = {}

    @property
    def task(self) -> Task:
        """The task, with its constants on the server's device."""
        return self._task

    @property
    def sizes(self) -> np.ndarray:
        """[K] training rows of every client, as it reports; 0 before its node was seen."""
        return self._registry.sizes["train"]

    @property
    def test_rows(self) -> Rows | None:
        """The server's own test rows."""
        return self._test

    @property
    def test_sizes(self) -> np.ndarray | None:
        """[K] test rows of every client, as it reports; 0 before its node was seen; None if clients do not test."""
        return self._registry.sizes["test"] if self._secure is None or self._secure.clear_tests else None

    @property
    def validation_sizes(self) -> np.ndarray:
        """[K] validation rows of every client, on which it tests models itself."""
        return self._registry.sizes["validation"]

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """The lane in which clients are asked to work; each node has a device of its own."""
        return self._choice.resolved

    @property
    def audit(self) -> AuditLog | None:
        """The audit log, if there is one."""
        return self._nodes.log.audit

    @property
    def agreement(self) -> dict[str, str]:
        """The digests that must be equal on every node."""
        return self._agreement

    @property
    def node_health(self) -> list[dict[str, Any]]:
        """The health of each node: its clients and their rows, connected since, last answer, refusals by reason."""
        return self._registry.health.facts(self.sizes)

    def count_refused(self, refusals: Iterable[Refusal]) -> None:
        """Count a finished round's refused replies, including screened ones, at their nodes."""
        self._registry.health.refused(refusals, self._registry.node_of)

    def place(self, values: Tree) -> Tree:
        """A tree that was saved, on the server's device."""
        return self._placement.saved(values)

    def close(self) -> None:
        """Do nothing: the grid belongs to Flower."""

    def keep_log(self, audit: AuditLog) -> None:
        """Log joining nodes, sent messages and replies from now on."""
        self._nodes.log.audit = self._registry.audit = audit

    def meet(self) -> None:
        """Wait until enough clients are connected."""
        if self._secure is not None:
            log.warning(EXPERIMENTAL)
            if self._test is None and not self._secure.clear_tests:
                log.warning(UNTESTED)
        here = self._registry.wait_for(self._at_first)
        log.info("%d of %d clients are connected, with %d rows", int(here.sum()), len(here), int(self.sizes.sum()))

    def start(self) -> Tree:
        """The initial model."""
        return self._placement.start(self._task)

    def available(self, round: int, seed: int) -> np.ndarray:
        """[K] which clients can participate: online, and available by the environment's draw."""
        here = self._registry.wait_for(self._least)
        return here & self.environment.available(round, len(here), seed)

    def planned(self, client: ClientRule, ids: np.ndarray, *, round: int, seed: int) -> np.ndarray:
        """[m] steps that clients will do in a round's exchange; 0 for clients whose reply will not arrive."""
        return heard_steps(self.environment, client.work, ids, self.sizes[ids], round=round, seed=seed)

    def recall(self) -> Tree:
        """[K, 32] SHA-256 of every client's memory, zeros before its first; {} where clients keep none."""
        if not self._remembers:
            return {}
        known = [bytes.fromhex(digest) if digest else NOTHING for digest in self._digests]
        return {"digests": torch.tensor([list(digest) for digest in known], dtype=torch.uint8)}

    def restore(self, memory: Tree) -> None:
        """Expect the memories that had these digests; {}: none yet."""
        self._digests = [""] * len(self._registry)
        if memory:
            rows = [bytes(row) for row in memory["digests"].tolist()]
            self._digests = ["" if row == NOTHING else row.hex() for row in rows]

    def exchange(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, ids: np.ndarray, *, round: int, seed: int
    ) -> Cohort:
        """Send, wait until all have answered or the deadline has passed, and return the valid replies."""
        name = name_of(self._rules, client, channel)
        sizes = self._registry.sizes[client.work.rows][ids]
        workload = Workload.of(self.environment, client.work, ids, sizes, round=round, seed=seed)
        if name == PRE_TRAINING:  # clients run this pass when they train, and do not send its result
            workload = workload.only(np.zeros(len(workload.ids), dtype=bool))
        if not len(workload.ids):
            return self._cohort(workload, Inbox(), round)
        if name not in self._templates:  # what replies must look like: the same in every round
            self._templates[name] = reply_template(client, channel, self._task, broadcast, dtype=self.dtype)
        template = self._templates[name]
        orders = self._orders(name, broadcast, workload, round, seed)
        if name == TRAIN and self._secure is not None:
            cohort, memory = self._nodes.summed(orders, template, self._secure)
            examples = cohort.examples.to(self.device)
            cohort = replace(cohort, reply=tree.to(cohort.reply, self.device), examples=examples)
        else:
            # a retry because no client answered would make one client's reply affect the others' (privacy)
            once = not client.work.trains or self._asks_once
            found, stale = self._nodes.replies(orders, template, once=once)
            cohort, memory = self._cohort(workload, found, round, stale), found.memory
        for each, digest in memory.items():
            self._digests[each] = digest
        return cohort

    def _orders(self, name: str, broadcast: Broadcast, workload: Workload, round: int, seed: int) -> Orders:
        new = self._remembers and not all(self._digests[client] for client in workload.ids.tolist())
        return Orders(
            rule=name,
            broadcast=broadcast,
            workload=workload,
            memory=self._digests,
            start=self.start() if new else None,
            agreement=self._agreement,
            round=round,
            seed=seed,
            run=self._run,
            case=self._case,
        )

    def _cohort(self, workload: Workload, found: Inbox, round: int, stale: Iterable[Refusal] = ()) -> Cohort:
        """The replies as a cohort, in client order, with what is missing counted."""
        admitted, lost = found.admitted, found.lost
        kept = np.isin(workload.ids, admitted.ids)
        refused = {refusal.client for refusal in admitted.refusals}
        silent = sum(client not in refused for client in workload.ids[~kept].tolist())
        refusals = (*admitted.refusals, *stale)
        examples, capped = self._capped(admitted.ids, admitted.examples)
        more = {"silent": workload.counts.get("silent", 0) + silent, "memory_lost": lost, "capped_examples": capped}
        more |= tally(refusals)
        return Cohort(
            reply=tree.to(admitted.reply, self.device),
            ids=workload.ids[kept],
            examples=examples.to(self.device),
            steps=workload.steps[kept],
            round=round,
            heard=workload.heard[kept],
            counts={**workload.counts, **{reason: count for reason, count in more.items() if count}},
            refusals=refusals,
        )

    def _capped(self, ids: np.ndarray, examples: torch.Tensor) -> tuple[torch.Tensor, int]:
        """[m] the rows that count, and how many were lowered: of what a client claims, no more than
        `limits.examples_ratio` times the median of all, unless its rows were declared beforehand."""
        known = self.sizes[self.sizes > 0]
        if self._limits.examples_ratio is None or not len(known):
            return examples, 0
        most = float(np.sort(known)[(len(known) - 1) // 2] * self._limits.examples_ratio)
        claimed = torch.from_numpy(~np.isin(ids, list(self._declared)))
        lowered = torch.where(claimed, examples.clamp(max=most), examples)
        return lowered, int((lowered < examples).sum())


def _refuse_simulated_time(environment: Environment) -> None:
    for key in ("rows_per_second", "download", "upload", "latency", "jitter", "deadline", "enough_replies"):
        if getattr(environment, key):
            raise Invalid(f"environment.{key} simulates time, and here real time passes: leave it out")
