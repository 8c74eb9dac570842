"""Turns one round's orders into a secure sum, and its result into a cohort whose replies are all the mean."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from consilience.core.exchange import Cohort
from consilience.core.refusal import Refusal, Refused, tally
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.flower.messages import wire
from consilience.flower.messages.inbox import memory_of
from consilience.flower.messages.limited_log import LimitedLog
from consilience.flower.messages.mail import Mail
from consilience.flower.messages.orders import Orders
from consilience.flower.secure import masks, private
from consilience.flower.secure.checked_grid import InClear, SumRequest, SumResult
from consilience.flower.secure.sum import refusals_of, secure_sum
from consilience.flower.secure.terms import SecureTerms, VectorLayout
from consilience.wire.template import Template

log = logging.getLogger("consilience.flower")


@dataclass(frozen=True, eq=False, kw_only=True)
class SecureRound:
    """The orders of one round: each client is alone on its node."""

    orders: Orders
    nodes: Mapping[int, int]  # client -> node, of those connected
    template: Template  # of a reply in clear
    shared: Tree  # what all clients receive, in host memory
    turn: int

    def ask(
        self, mail: Mail, terms: SecureTerms, head: dict[str, Any] | None, deadline: float
    ) -> tuple[SumResult, VectorLayout]:
        """Run the four stages; `head`: of the audit log, if there is one."""
        orders, workload = self.orders, self.orders.workload
        if orders.broadcast.personal:
            raise Invalid("a secure sum is of replies to one broadcast, and here every client is sent its own")
        template = self.template if terms.noise is None else private.template_of(self.template, terms.noise)
        layout, places = VectorLayout(template), {int(client): k for k, client in enumerate(workload.ids)}
        asked = SumRequest(
            contents={
                node: orders.content(workload.only(np.array([places[client]])), head)
                for client, node in self.nodes.items()
            },
            case=orders.case,
            turn=self.turn,
            group=f"round {orders.round + 1}",
            binding=masks.binding(run=orders.run, case=orders.case, round=orders.round, turn=self.turn),
            heaviest=float(max((terms.weight(self._size(client)) for client in self.nodes), default=1)),
            length=layout.length,
            look=lambda node, content: self._look(node, content, layout),
            bound=float(self.shared[private.BOUND]) if terms.noise is not None else 0.0,
        )
        return secure_sum(mail, terms, asked, deadline), layout

    def cohort(self, found: SumResult, layout: VectorLayout, stale: list[Refusal]) -> Cohort:
        """The cohort of the clients whose replies are in the sum (none if it failed); missing ones are counted."""
        workload, round = self.orders.workload, self.orders.round
        client_of = {node: client for client, node in self.nodes.items()}
        refusals = (*refusals_of(found, client_of), *stale)
        with LimitedLog(f"round {round + 1}") as warnings:
            for refusal in refusals:
                warnings.add(f"client {refusal.client}", refusal)
        in_clear = {client_of[node]: in_clear for node, in_clear in found.in_clear.items()}
        kept = np.isin(workload.ids, sorted(in_clear) if found.mean is not None else [])
        refused = {refusal.client for refusal in refusals}
        away = {client_of[node] for node in found.silent} | (set(workload.ids.tolist()) - set(self.nodes))
        mine = [in_clear[client] for client in workload.ids[kept].tolist()]
        more = {
            "silent": workload.counts.get("silent", 0) + len(away - refused),
            "memory_lost": sum(said.lost is True for said, _ in mine),
            "clipped_updates": _clipped(mine, round),
            **tally(refusals),
        }
        counters = [aside.counters for _, aside in mine]
        return Cohort(
            reply=layout.replies(found.mean, self.shared, counters) if found.mean is not None else {},
            ids=workload.ids[kept],
            examples=torch.from_numpy(workload.sizes[kept]).to(torch.float64),
            steps=workload.steps[kept],
            round=round,
            counts={**workload.counts, **{reason: count for reason, count in more.items() if count}},
            refusals=refusals,
            traffic=found.nbytes,
        )

    def _size(self, client: int) -> int:
        workload = self.orders.workload
        return int(workload.sizes[np.searchsorted(workload.ids, client)])

    def _look(self, node: int, content: Any, layout: VectorLayout) -> InClear:
        """A node's report in clear, refused if it does not match the order: weights are agreed on before the round."""
        orders, workload = self.orders, self.orders.workload
        client = next(client for client, its_node in self.nodes.items() if its_node == node)
        place = int(np.searchsorted(workload.ids, client))
        expected = {
            "client": client,
            "run": orders.run,
            "round": orders.round,
            "examples": int(workload.sizes[place]),
            "steps": int(workload.steps[place]),
        }
        said, aside = wire.get_answer(content), wire.get_aside(content)
        for key, value in expected.items():
            if len(said) != 1 or type(getattr(said[0], key)) is not type(value) or getattr(said[0], key) != value:
                raise Refused(key, detail=f"it does not say {value}, which was ordered")
        memory_of(said[0])
        if type(aside.clipped) is not int or not 0 <= aside.clipped <= layout.length:
            raise Refused("format", key=wire.ASIDE, detail="no count of clipped values")
        if not isinstance(aside.counters, dict) or sorted(aside.counters) != layout.counters:
            raise Refused("format", key=wire.ASIDE, detail="other counters than the model's")
        if any(type(count) is not int or not -(2**63) <= count < 2**63 for count in aside.counters.values()):
            raise Refused("format", key=wire.ASIDE, detail="a counter that is no whole number")
        return said[0], aside


def _clipped(in_clear: list[InClear], round: int) -> int:
    """How many replies had values beyond the clip."""
    values = [aside.clipped for _, aside in in_clear if aside.clipped]
    if values:
        log.warning(
            "round %d: %d values of %d clients were clipped before they were summed: raise deploy.secure_clip",
            round + 1,
            sum(values),
            len(values),
        )
    return len(values)


def refuse_tables(start: Tree) -> None:
    """Refuse, before any client is asked, a model whose whole numbers would have to be sent in clear."""
    VectorLayout(Template.of(start))
