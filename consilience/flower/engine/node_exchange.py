"""Asks the nodes for the replies to one round's orders, again while none is usable."""

from __future__ import annotations

import logging
import time

import numpy as np

from consilience.core import tree
from consilience.core.exchange import Cohort
from consilience.core.refusal import Refusal
from consilience.core.rounds import TooFewClients
from consilience.core.screening import Limits
from consilience.flower.engine.agreement import TRAIN
from consilience.flower.engine.exchange_log import ExchangeLog
from consilience.flower.engine.node_registry import NodeRegistry
from consilience.flower.messages.inbox import Inbox, read
from consilience.flower.messages.mail import Mail, NodeReplies, Waiting
from consilience.flower.messages.orders import Orders
from consilience.flower.messages.pulling import MessageLimit
from consilience.flower.secure.cohort import SecureRound
from consilience.flower.secure.terms import FEWEST, SecureTerms
from consilience.wire.template import Template

log = logging.getLogger("consilience.flower")


class NodeExchange:
    """Sends orders by mail and returns checked replies, one by one or, in a secure sum, only their mean.

    least: clients that must be connected before the nodes are asked again.
    """

    def __init__(self, mail: Mail, registry: NodeRegistry, waiting: Waiting, limits: Limits, least: int) -> None:
        self._mail, self._registry, self._waiting, self._limits = mail, registry, waiting, limits
        self._least = least
        self.log = ExchangeLog()
        self._turn = 0  # secure sums begun
        self._stale: list[Refusal] = []  # late replies to earlier messages, counted with the next round's

    def replies(self, orders: Orders, template: Template, *, once: bool) -> tuple[Inbox, list[Refusal]]:
        """The checked replies, and the late replies to earlier messages; `once`: nobody is asked again."""
        rule, workload, round = orders.rule, orders.workload, orders.round
        for attempt in range(self._waiting.retries + 1):
            answers = self._ask(orders, template)
            found = read(answers, workload, template, self._registry.node_of, round, orders.run, self._limits)
            if len(found.admitted.ids) or once:
                break
            self.log.received(rule, workload, found.digests, found.admitted.refusals, round)
            self._pause(attempt, round)
        else:
            raise self._no_replies(orders, found.reasons(answers))
        stale, self._stale = self._stale, []
        self.log.received(rule, workload, found.digests, (*found.admitted.refusals, *stale), round)
        return found, stale

    def summed(self, orders: Orders, template: Template, terms: SecureTerms) -> tuple[Cohort, dict[int, str]]:
        """(The cohort, of which the server sees only the sum, and its clients' digests of memories).

        If the sum fails, the cohort is empty, and the round leaves the model unchanged.
        """
        workload = orders.workload
        for attempt in range(self._waiting.retries + 1):
            self._turn += 1
            nodes = self._registry.alone()
            asked = SecureRound(
                orders=orders,
                nodes={client: nodes[client] for client in workload.ids.tolist() if client in nodes},
                template=template,
                shared=tree.to(orders.broadcast.shared, "cpu"),
                turn=self._turn,
            )
            told = {node: [client] for client, node in asked.nodes.items()}
            head = self.log.sent(TRAIN, orders.broadcast, workload, told, orders.round)
            found, layout = asked.ask(self._mail, terms, head, self._waiting.deadline)
            self._count_stale(found.stale)
            self.log.summed(asked, found, self._stale)
            if found.met or len(asked.nodes) < FEWEST:
                break
            self._pause(attempt, orders.round)
        else:
            raise self._no_replies(orders, found.why)
        stale, self._stale = self._stale, []
        cohort = asked.cohort(found, layout, stale)
        answered = {asked.nodes[client]: None for client in cohort.ids.tolist()}
        self._registry.health.replied(NodeReplies(replies=answered, stale=found.stale))
        reports = found.in_clear.values() if found.mean is not None else ()
        return cohort, {said.client: said.memory for said, _ in reports}

    def _ask(self, orders: Orders, template: Template) -> NodeReplies:
        """One message to each node, for all of its clients that are chosen."""
        workload, group = orders.workload, f"round {orders.round + 1}"
        by_node: dict[int, list[int]] = {}
        for place, client in enumerate(workload.ids.tolist()):
            if client in self._registry.node_of:
                by_node.setdefault(self._registry.node_of[client], []).append(place)
        told = {node: workload.ids[places].tolist() for node, places in by_node.items()}
        head = self.log.sent(orders.rule, orders.broadcast, workload, told, orders.round)
        contents = {node: orders.content(workload.only(np.array(places)), head) for node, places in by_node.items()}
        kind = "train" if orders.rule == TRAIN else "evaluate"
        nbytes, leaves = template.most(self._limits.castable, slack=self._limits.slack), len(template.leaves)
        bounds = {node: MessageLimit.of(nbytes, leaves, len(places)) for node, places in by_node.items()}
        answers = self._mail.ask(contents, kind, group, self._waiting.deadline, bounds)
        self._count_stale(answers.stale)
        self._registry.health.replied(answers)
        return answers

    def _count_stale(self, stale: list[tuple[int, str]]) -> None:
        for node, group in stale:
            detail = f"its answer to {group} came after the deadline"
            self._stale.append(Refusal(client=f"of node {node}", reason="stale_round", detail=detail))

    def _pause(self, attempt: int, round: int) -> None:
        """Wait before the next attempt, unless this was the last."""
        if attempt < self._waiting.retries:
            pause = self._waiting.pause * 2**attempt
            log.warning("round %d: no client answered; asking again in %g seconds", round + 1, pause)
            time.sleep(pause)
            self._registry.wait_for(self._least)

    def _no_replies(self, orders: Orders, why: str) -> TooFewClients:
        return TooFewClients(
            f"round {orders.round + 1}: none of {len(orders.workload.ids)} clients sent a usable reply, "
            f"{self._waiting.retries + 1} times in a row ({why}). "
            "The last finished round is saved: start it again to continue"
        )
