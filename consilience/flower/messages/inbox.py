"""Checks the replies to a round of messages; nothing is used unchecked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from consilience.core.refusal import Refusal, Refused, contained, plain
from consilience.core.screening import Limits
from consilience.engines.workload import Workload
from consilience.flower.messages import wire
from consilience.flower.messages.limited_log import LimitedLog
from consilience.flower.messages.mail import NodeReplies
from consilience.wire.admission import Admitted, Arrival, admit
from consilience.wire.template import Template


def _no_replies() -> Admitted:
    empty = np.empty(0, np.int64)
    return Admitted(ids=empty, reply={}, examples=torch.empty(0, dtype=torch.float64), steps=empty)


@dataclass(frozen=True, eq=False, kw_only=True)
class Inbox:
    """The accepted replies, and their clients' reports about memories."""

    admitted: Admitted = field(default_factory=_no_replies)
    memory: dict[int, str] = field(default_factory=dict)  # client -> digest of its memory now
    lost: int = 0  # clients that had lost their memory and started with a new one
    digests: dict[int, str] = field(default_factory=dict)  # client -> digest of its reply

    def reasons(self, answers: NodeReplies) -> str:
        """Why there are no replies, in words."""
        failures = [*answers.failures.values(), *(str(refusal) for refusal in self.admitted.refusals)]
        return "; ".join(failures[:3]) or "no answer before the deadline"


def read(
    answers: NodeReplies,
    workload: Workload,
    template: Template,
    node_of: Mapping[int, int],
    round: int,
    run: str,
    limits: Limits,
) -> Inbox:
    """Check every reply to the orders."""
    arrivals: list[Arrival] = []
    memory: dict[int, tuple[str, bool]] = {}
    refusals: list[Refusal] = []
    steps = dict(zip(workload.ids.tolist(), workload.steps.tolist()))
    asked = {client: (count, rows) for (client, count), rows in zip(steps.items(), workload.sizes.tolist())}
    for node, content in sorted(answers.replies.items()):
        try:
            with contained():
                said = wire.get_answer(content)
                if len(said) > len(steps):
                    raise Refused("format", key="answer", detail=f"{len(said)} answers for {len(steps)} clients")
        except Refused as problem:
            refusals.append(problem.by(f"of node {node}"))
            continue
        for one in said:
            try:
                with contained():
                    arrival, kept = _arrival(one, content, asked, node_of.get(one.client) == node), memory_of(one)
                arrivals.append(arrival)
                memory.setdefault(one.client, kept)
            except Refused as problem:
                mine = type(one.client) is int and node_of.get(one.client) == node
                refusals.append(problem.by(one.client if mine else f"of node {node}"))
    for node, unread in sorted(answers.refused.items()):
        refusals += [unread.by(client) for client in steps if node_of.get(client) == node]
    admitted, _ = admit(arrivals, template=template, round=round, asked=set(steps), run=run, limits=limits)
    admitted = replace(admitted, refusals=(*admitted.refusals, *refusals))
    with LimitedLog(f"round {round + 1}") as warnings:
        for refusal in admitted.refusals:
            warnings.add(f"client {refusal.client}", refusal)
        for note in admitted.notes:
            warnings.add("changed replies", note)
    used = {client: memory[client] for client in admitted.ids.tolist()}
    return Inbox(
        admitted=admitted,
        memory={client: digest for client, (digest, _) in used.items()},
        lost=sum(gone for _, gone in used.values()),
        digests={int(one.client): str(one.digest) for one in arrivals if one.client in used},
    )


def _arrival(said: wire.ReplyReport, content: Any, asked: Mapping[int, tuple[int, int]], is_its_node: bool) -> Arrival:
    """One reply, if it answers the order; `asked`: client -> (steps ordered, rows at its introduction)."""
    client = said.client
    if type(client) is not int or not is_its_node:
        raise Refused("identity", detail="it is not a client of the node that answered")
    if client not in asked:
        raise Refused("unasked", detail="it was not asked in this round")
    steps, rows = asked[client]
    if said.steps != steps:
        raise Refused("steps", detail=f"it says {plain(said.steps, most=40)} steps where {steps} were ordered")
    if said.examples != rows:
        detail = f"it says {plain(said.examples, most=40)} rows where its introduction said {rows}"
        raise Refused("examples", detail=detail)
    name = wire.reply_name(client)
    if name not in content:
        raise Refused("missing_key", key=name, detail="there is no reply")
    if not isinstance(said.digest, str):
        raise Refused("digest", detail="there is none")
    return Arrival(
        client=client,
        round=said.round,
        examples=said.examples,
        steps=said.steps,
        run=said.run,
        packed=wire.packed(content[name]),
        digest=said.digest,
    )


def memory_of(said: wire.ReplyReport) -> tuple[str, bool]:
    """A memory's digest and whether the previous memory was lost, if the report is well-formed."""
    text = said.memory
    if not isinstance(text, str) or len(text) not in (0, 64) or not all(c in "0123456789abcdef" for c in text):
        raise Refused("memory", detail="what it says of its memory is no digest")
    return text, said.lost is True
