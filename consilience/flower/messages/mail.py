"""Messages to nodes and the replies before a deadline; later replies are recognised and never used."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from consilience.core.refusal import Refused, plain
from consilience.core.settings import Checked, NonNegative, Positive, Whole
from consilience.flower.messages.fetching import Fetching
from consilience.flower.messages.limited_log import LimitedLog
from consilience.flower.messages.members import keys_of
from consilience.flower.messages.pulling import MessageLimit, UnreadReply

GRACE = 30.0  # seconds that a message lives beyond its deadline: then the SuperLink drops it
UNANSWERED = (3, 4)  # Flower's codes for a message or reply that the SuperLink has dropped: not the node's fault
POLLS = (0.2, 1.0)  # seconds between two polls: at first, and at last


@dataclass(frozen=True, kw_only=True)
class Waiting(Checked):
    """How long the server waits, in real seconds.

    deadline: for a whole reply, from sending to the last byte. wait: for enough clients to connect. retries: how often
    a round without answers is repeated, after `pause`, twice that, four times ...
    """

    deadline: Positive = 600.0
    wait: Positive = 300.0
    retries: Whole = 3
    pause: NonNegative = 5.0


@dataclass(frozen=True, eq=False, kw_only=True)
class NodeReplies:
    """The replies to one round of messages, by node."""

    replies: dict[int, Any] = field(default_factory=dict)  # contents
    failures: dict[int, str] = field(default_factory=dict)  # why a node could not answer
    refused: dict[int, Refused] = field(default_factory=dict)  # replies that were never assembled
    stale: list[tuple[int, str]] = field(default_factory=list)  # (node, group) of replies to earlier messages


class Mail:
    """Sends through a Flower Grid; remembers messages that were not answered in time."""

    def __init__(self, grid: Any) -> None:
        self._grid, self._fetching = grid, Fetching(grid)
        self._overdue: dict[str, tuple[int, str, float]] = {}  # message -> node, group, when to forget it
        self._open: dict[str, tuple[int, float]] = {}  # messages whose replies may come later: node, when to forget it

    def nodes(self) -> list[int]:
        """The nodes that are online."""
        return sorted(self._grid.get_node_ids())

    def keys(self) -> dict[int, str]:
        """The nodes that are online, each with its key's fingerprint."""
        return keys_of(self._grid)

    def ask(
        self,
        contents: Mapping[int, Any],
        kind: str,
        group: str,
        deadline: float,
        bounds: Mapping[int, MessageLimit],
        *,
        open_for: float | None = None,
    ) -> NodeReplies:
        """Send each node its content and wait for whole replies, at most `deadline` seconds.

        open_for: seconds in which an answer is still accepted after the wait has ended: `later` returns it.
        """
        from flwr.app import Message

        answers = NodeReplies()
        nodes = sorted(contents)
        lives = GRACE + (deadline if open_for is None else open_for)
        messages = [Message(contents[n], n, kind, ttl=lives, group_id=group) for n in nodes]
        began = time.monotonic()
        end = began + deadline
        sent = {message: node for node, message in zip(nodes, self._grid.push_messages(messages)) if message}
        self._fetching.expect({message: bounds[node] for message, node in sent.items()})
        pause = POLLS[0]
        with LimitedLog(group) as warnings:
            while True:
                for reply in self._fetching.look([*sent, *self._overdue], end):
                    self._sort(reply, sent, answers, kind, warnings)
                left = end - time.monotonic()
                if not sent or left <= 0:
                    break
                time.sleep(min(pause, max(left, 0.01)))
                pause = min(pause * 1.2, POLLS[1])
        now = time.monotonic()
        if open_for is None:
            self._overdue |= {message: (node, group, now + GRACE) for message, node in sent.items()}
        else:
            self._open |= {message: (node, began + open_for) for message, node in sent.items()}
        self._overdue = {m: late for m, late in self._overdue.items() if late[2] > now}
        self._fetching.forget_all_but({*self._overdue, *self._open})
        return answers

    def later(self) -> tuple[NodeReplies, set[int]]:
        """Late answers that have arrived by now, and the nodes that may still answer."""
        answers, now = NodeReplies(), time.monotonic()
        sent = {message: node for message, (node, _) in self._open.items()}
        with LimitedLog("later answers") as warnings:
            for reply in self._fetching.look(list(sent), now) if sent else ():
                self._sort(reply, sent, answers, "query", warnings)
        self._open = {m: asked for m, asked in self._open.items() if m in sent and asked[1] > now}
        return answers, {node for node, _ in self._open.values()}

    def _sort(self, reply: Any, sent: dict[str, int], answers: NodeReplies, kind: str, warnings: LimitedLog) -> None:
        message = reply.metadata.reply_to_message_id
        node = sent.pop(message, None)
        if isinstance(reply, UnreadReply) and node is not None:
            answers.refused[node] = reply.problem
            return
        if node is None:
            late = self._overdue.pop(message, None)
            if late is not None and (isinstance(reply, UnreadReply) or not reply.has_error()):
                answers.stale.append(late[:2])
                warnings.add(f"node {late[0]}", f"node {late[0]} answered {late[1]} after its deadline: refused")
        elif reply.has_error() and reply.error.code in UNANSWERED:
            return
        elif reply.has_error():
            answers.failures[node] = _reason(reply.error.reason)
            if kind != "query":  # an introduction that failed is refused, and logged, by the registry
                warnings.add(f"node {node}", f"node {node} could not answer: {answers.failures[node]}")
        else:
            answers.replies[node] = reply.content


def _reason(text: Any) -> str:
    """Why a node failed; Flower writes an exception as <class 'module.Name'>:<'message'>."""
    found = re.fullmatch(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*)'>", str(text), re.DOTALL)
    return plain(f"{found[1]}: {found[2]}" if found else text, most=600)
