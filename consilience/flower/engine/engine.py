"""The server side: an engine whose clients are reached through a Flower Grid."""

from __future__ import annotations

import functools
import logging
import time
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
from consilience.core.rounds import TooFewClients
from consilience.core.screening import Limits
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.placement import Placement
from consilience.engines.vectorised.program import memories
from consilience.engines.vectorised.tuning import LaneChoice, LaneName
from consilience.engines.workload import Workload, heard_steps
from consilience.environments.environment import Environment
from consilience.flower.audit.log import RECORD, AuditLog
from consilience.flower.engine import wire
from consilience.flower.engine.agreement import PRE_TRAINING, TRAIN, agreement, name_of, rules_of
from consilience.flower.engine.exchange_log import ExchangeLog, personal_part
from consilience.flower.engine.inbox import Inbox, read
from consilience.flower.engine.mail import Mail, NodeReplies, Waiting
from consilience.flower.engine.members import Members
from consilience.flower.engine.node_registry import NodeRegistry
from consilience.flower.engine.pulling import Bound
from consilience.flower.engine.templates import reply_template
from consilience.flower.secure.cohort import SecureRound, refuse_tables
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
        self._turn = 0  # secure sums begun
        self._log = ExchangeLog()
        self._stale: list[Refusal] = []  # late replies to earlier messages, counted with the next round's

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
        return self._log.audit

    @property
    def agreement(self) -> dict[str, str]:
        """The digests that must be equal on every node."""
        return self._agreement

    @property
    def node_health(self) -> list[dict[str, Any]]:
        """The health of each node: connected since, last answer, number of answers, refusals by reason."""
        return self._registry.health.facts()

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
        self._log.audit = self._registry.audit = audit

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
        template = self._template(name, client, channel, broadcast)
        if name == TRAIN and self._secure is not None:
            return self._exchange_sum(self._secure, broadcast, workload, template, round, seed)
        for attempt in range(self._waiting.retries + 1):
            answers = self._ask(name, broadcast, workload, round, seed)
            found = read(answers, workload, template, self._registry.node_of, round, self._run, self._limits)
            # a retry because no client answered would make one client's reply affect the others' (privacy)
            if len(found.admitted.ids) or not client.work.trains or self._asks_once:
                break
            self._log.received(name, workload, found.digests, found.admitted.refusals, round)
            self._pause(attempt, round)
        else:
            raise self._no_replies(workload, round, found.reasons(answers))
        self._log.received(name, workload, found.digests, (*found.admitted.refusals, *self._stale), round)
        for each, digest in found.memory.items():
            self._digests[each] = digest
        return self._cohort(workload, found, round)

    def _exchange_sum(
        self, terms: SecureTerms, broadcast: Broadcast, workload: Workload, template: Template, round: int, seed: int
    ) -> Cohort:
        """Training of which the server sees only the sum; if the sum fails, the round leaves the model unchanged."""
        for attempt in range(self._waiting.retries + 1):
            self._turn += 1
            nodes = self._registry.alone()
            asked = SecureRound(
                workload=workload,
                nodes={client: nodes[client] for client in workload.ids.tolist() if client in nodes},
                template=template,
                received=Broadcast(shared=tree.to(broadcast.shared, "cpu"), personal=broadcast.personal),
                round=round,
                run=self._run,
                case=self._case,
                turn=self._turn,
            )
            head = self._log.sent(TRAIN, broadcast, workload, {node: [c] for c, node in asked.nodes.items()}, round)
            found, layout = asked.ask(
                self._mail,
                terms,
                functools.partial(self._order_for_sum, broadcast, workload, round, seed, head),
                self._waiting.deadline,
            )
            self._count_stale(found.stale)
            self._log.summed(asked, found, self._stale)
            if found.met or len(asked.nodes) < FEWEST:
                break
            self._pause(attempt, round)
        else:
            raise self._no_replies(workload, round, found.why)
        stale, self._stale = self._stale, []
        cohort = asked.cohort(found, layout, stale)
        answered = {asked.nodes[client]: None for client in cohort.ids.tolist()}
        self._registry.health.replied(NodeReplies(replies=answered, stale=found.stale))
        if found.mean is not None:
            for said, _ in found.in_clear.values():
                self._digests[said.client] = said.memory
        examples = cohort.examples.to(self.device)
        return replace(cohort, reply=tree.to(cohort.reply, self.device), examples=examples)

    def _order_for_sum(
        self,
        broadcast: Broadcast,
        workload: Workload,
        round: int,
        seed: int,
        head: dict[str, Any] | None,
        places: np.ndarray,
    ) -> Any:
        return self._content(TRAIN, broadcast, workload.only(places), round, seed, head)

    def _pause(self, attempt: int, round: int) -> None:
        """Wait before the next attempt, unless this was the last."""
        if attempt < self._waiting.retries:
            pause = self._waiting.pause * 2**attempt
            log.warning("round %d: no client answered; asking again in %g seconds", round + 1, pause)
            time.sleep(pause)
            self._registry.wait_for(self._least)

    def _no_replies(self, workload: Workload, round: int, why: str) -> TooFewClients:
        return TooFewClients(
            f"round {round + 1}: none of {len(workload.ids)} clients sent a usable reply, "
            f"{self._waiting.retries + 1} times in a row ({why}). "
            "The last finished round is saved: start it again to continue"
        )

    def _ask(self, name: str, broadcast: Broadcast, workload: Workload, round: int, seed: int) -> NodeReplies:
        """One message to each node, for all of its clients that are chosen."""
        by_node: dict[int, list[int]] = {}
        for place, client in enumerate(workload.ids.tolist()):
            if client in self._registry.node_of:
                by_node.setdefault(self._registry.node_of[client], []).append(place)
        contents = {}
        told = {node: workload.ids[places].tolist() for node, places in by_node.items()}
        head = self._log.sent(name, broadcast, workload, told, round)
        for node, places in by_node.items():
            mine = workload.only(np.array(places))
            contents[node] = self._content(name, broadcast, mine, round, seed, head)
        kind = "train" if name == TRAIN else "evaluate"
        template = self._templates[name]
        nbytes, leaves = template.most(self._limits.castable, slack=self._limits.slack), len(template.leaves)
        bounds = {node: Bound.of(nbytes, leaves, len(places)) for node, places in by_node.items()}
        answers = self._mail.ask(contents, kind, f"round {round + 1}", self._waiting.deadline, bounds)
        self._count_stale(answers.stale)
        self._registry.health.replied(answers)
        return answers

    def _count_stale(self, stale: list[tuple[int, str]]) -> None:
        for node, group in stale:
            detail = f"its answer to {group} came after the deadline"
            self._stale.append(Refusal(client=f"of node {node}", reason="stale_round", detail=detail))

    def _content(
        self,
        name: str,
        broadcast: Broadcast,
        mine: Workload,
        round: int,
        seed: int,
        head: dict[str, Any] | None = None,
    ) -> Any:
        clients = mine.ids.tolist()
        known = [self._digests[client] for client in clients]
        content = wire.records().RecordDict()
        wire.put_order(
            content,
            wire.Order(
                run=self._run,
                case=self._case,
                rule=name,
                round=round,
                seed=seed,
                agreement=self._agreement,
                clients=clients,
                steps=mine.steps.tolist(),
                heard=mine.heard.tolist(),
                memory=known,
            ),
        )
        wire.put_tree(content, "shared", tree.to(broadcast.shared, "cpu"))
        wire.put_tree(content, "personal", tree.to(personal_part(broadcast, mine), "cpu"))
        if head is not None:
            wire.put_json(content, RECORD, head)
        if self._remembers and not all(known):  # needed for the initial memory
            wire.put_tree(content, "start", tree.to(self.start(), "cpu"))
        return content

    def _cohort(self, workload: Workload, found: Inbox, round: int) -> Cohort:
        """The replies as a cohort, in client order, with what is missing counted."""
        admitted, lost = found.admitted, found.lost
        kept = np.isin(workload.ids, admitted.ids)
        refused = {refusal.client for refusal in admitted.refusals}
        silent = sum(client not in refused for client in workload.ids[~kept].tolist())
        refusals = admitted.refusals
        if len(workload.ids):
            refusals, self._stale = (*refusals, *self._stale), []
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

    def _template(self, name: str, client: ClientRule, channel: Channel, broadcast: Broadcast) -> Template:
        """What replies must look like; the same in every round."""
        if name not in self._templates:
            dtype, task = self.dtype, self._task
            self._templates[name] = reply_template(client, channel, task, broadcast, dtype=dtype)
        return self._templates[name]


def _refuse_simulated_time(environment: Environment) -> None:
    for key in ("rows_per_second", "download", "upload", "latency", "jitter", "deadline", "enough_replies"):
        if getattr(environment, key):
            raise Invalid(f"environment.{key} simulates time, and here real time passes: leave it out")
