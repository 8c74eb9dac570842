"""Replies from a SuperLink, bounded in size: each part is counted before it is fetched and joined.

A reply is a tree of objects that name each other by their digests: message, records, arrays, chunks of arrays. An array
may name one chunk any number of times, and Flower's `pull_messages` joins them before any check: 5 MB became
4.3 GB. Here every object is fetched once, and a reply is refused as soon as its declared or actual size is too large.
"""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from consilience.core.refusal import Refused, contained, plain
from consilience.core.settings import Invalid
from consilience.wire import arrays

TEXT = 2**16  # bytes of a reply beside its arrays: names, digests, counts
TEXT_EACH = 2**12  # more of them for each client's reply in a message
NAMED = 2**10  # and for each array, which is named, described and referred to
PAUSES = (0.2, 10.0)  # seconds between two tries for an object that has not arrived: first, and longest
PATIENCE = 7200.0  # seconds for all of a reply, as in Flower
FRAME = 1024  # bytes of a response around an object
_PARTS = {  # the kinds of objects
    "Message": ("RecordDict",),
    "RecordDict": ("ArrayRecord", "ConfigRecord", "MetricRecord"),
    "ArrayRecord": ("Array",),
    "Array": ("ArrayChunk",),
}


class MessageLimit(NamedTuple):
    """What one message may hold at most, in bytes: its arrays once they are joined, and all else."""

    arrays: int
    text: int

    @staticmethod
    def of(nbytes: int, leaves: int, replies: int = 1) -> MessageLimit:
        """For so many replies of `nbytes` in `leaves` arrays each."""
        chunks = nbytes // 2**10  # digests of 64 characters, for chunks of 64 KiB or more
        return MessageLimit(replies * nbytes, TEXT + replies * (TEXT_EACH + leaves * NAMED + chunks))


@dataclass(frozen=True, kw_only=True)
class UnreadReply:
    """A reply that was refused before it was assembled."""

    metadata: Any  # Flower's, as the SuperLink has it
    problem: Refused


Pull = Callable[[str, MessageLimit], list[Any]]
"""From a message and the reply's size limit to the reply (or `UnreadReply`), if it has arrived."""


def puller(grid: Any) -> Pull:
    """How to fetch replies from this grid; only those that come over a network have to be assembled."""
    return _Bounded(grid).pull if _over_network(grid) else functools.partial(_pulled, grid)


def _pulled(grid: Any, message: str, bound: MessageLimit) -> list[Any]:
    """The reply that a grid has assembled itself; one that it cannot assemble is refused."""
    try:
        return list(grid.pull_messages([message]))
    except ConnectionError:  # an error of the server itself, not of a node
        raise
    except Exception as found:
        problem = Refused("format", detail=f"{type(found).__name__}: {plain(found, most=80)}")
        return [UnreadReply(metadata=SimpleNamespace(reply_to_message_id=message, src_node_id=0), problem=problem)]


def _over_network(grid: Any) -> bool:
    """Whether it is Flower's HttpGrid; `Invalid` for another grid of Flower's, whose replies would be unbounded."""
    try:
        from flwr.serverapp.grid import Grid
        from flwr.superlink.grid import HttpGrid, InMemoryGrid
    except ImportError as problem:
        raise Invalid(f"this version of Flower has other grids than flwr 1.41 ({problem}): install that") from problem
    if isinstance(grid, Grid) and not isinstance(grid, (HttpGrid, InMemoryGrid)):
        raise Invalid(
            f"replies of Flower's {type(grid).__name__} cannot be bounded before they are read: use flwr 1.41, whose "
            "ServerApps have an HttpGrid"
        )
    return isinstance(grid, HttpGrid)


class _Bounded:
    """Fetches over the connection of an HttpGrid."""

    def __init__(self, grid: Any) -> None:
        self._grid, self._most = grid, threading.local()
        self._runtime()

    def pull(self, message: str, bound: MessageLimit) -> list[Any]:
        """The reply to a message; [] while there is none."""
        from flwr.common.serde_utils import metadata_from_proto
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        found: list[Any] = []
        runtime, run = self._runtime(), self._grid.run.run_id
        for reply in runtime.PullMessages(PullAppMessagesRequest(message_ids=[message])).messages_list:
            name, metadata = reply.metadata.message_id, metadata_from_proto(reply.metadata)
            try:
                read: Any = assembled(name, self._fetch, bound)
                with contained():
                    read.__dict__["_metadata"] = metadata  # by the SuperLink's record, not by the sender's claim
            except Refused as problem:
                read = UnreadReply(metadata=metadata, problem=problem)
            # the SuperLink need not keep it
            runtime.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self._grid.node, run_id=run, message_object_id=name)
            )
            found.append(read)
        return found

    def _runtime(self) -> Any:
        """Flower's client, which calls `_look`."""
        try:
            # private: Flower has no public way to fetch the parts of a message; without them the run is refused
            found, _ = self._grid._runtime_client, self._grid.run.run_id
            hooks = found._client.event_hooks
        except (AttributeError, TypeError) as problem:
            raise Invalid(f"this version of Flower is not known here ({problem}): use flwr 1.41") from problem
        if self._look not in hooks["response"]:
            found._client.event_hooks = {**hooks, "response": [*hooks["response"], self._look]}
        return found

    def _fetch(self, name: str, most: int) -> bytes:
        """One object, once it has arrived; `Refused` if it never does, or before more than `most` bytes are read."""
        from flwr.proto.message_pb2 import PullObjectRequest

        pause, end = PAUSES[0], time.monotonic() + PATIENCE
        request = PullObjectRequest(node=self._grid.node, run_id=self._grid.run.run_id, object_id=name)
        while True:
            self._most.now = most + FRAME
            try:
                answer = self._runtime().PullObject(request)
            finally:
                self._most.now = None
            if answer.object_found and answer.object_available:
                return answer.object_content
            if not answer.object_found or time.monotonic() >= end:
                raise Refused("missing_part", detail="not all of it was sent")
            time.sleep(pause)
            pause = min(pause * 2, PAUSES[1])

    def _look(self, response: Any) -> None:
        """Called by httpx with a response's header, before its body is read."""
        most = getattr(self._most, "now", None)
        if most is not None and int(response.headers.get("content-length", 0)) > most:
            raise _too_large(f"a part of {response.headers['content-length']} bytes")


@dataclass(eq=False)
class _Counted:
    """The part of its size limit that a reply has used."""

    bound: MessageLimit
    text: int = 0
    stored: int = 0  # bytes of chunks, each once
    said: int = 0  # bytes of arrays, by their shapes
    joined: int = 0  # bytes of arrays, by their chunks
    named: Counter[str] = field(default_factory=Counter)  # chunk -> how often arrays name it

    def left(self, kind: str) -> int:
        """The maximal size of the next object."""
        return self.bound.arrays - self.stored + FRAME if kind == "ArrayChunk" else self.bound.text - self.text

    def add(self, kind: str, name: str, size: int) -> None:
        """One object was fetched."""
        if kind != "ArrayChunk":
            self.text += size
        else:
            self.stored += size
            self.joined += size * self.named[name]
        if self.text > self.bound.text:
            raise _too_large(f"more than {self.bound.text:,} bytes beside its arrays")
        self._arrays(self.joined)

    def add_array(self, body: Any, parts: list[str]) -> None:
        """Count one array by its header."""
        shape, chunks = body["shape"], body["arraychunk_ids"]
        if not all(type(n) is int and n >= 0 for n in shape) or not all(type(n) is int and n >= 0 for n in chunks):
            raise Refused("format", detail="an array whose shape or chunks are no whole numbers")
        self.said += math.prod(shape) * arrays.dtype_of(body["dtype"]).itemsize
        self._arrays(self.said)
        self.named.update(parts[number] for number in chunks)

    def _arrays(self, nbytes: int) -> None:
        if nbytes > self.bound.arrays:
            raise _too_large(
                f"arrays of {plain(nbytes)} bytes or more, when at most {self.bound.arrays:,} are expected"
            )


def assembled(root: str, fetch: Callable[[str, int], bytes], bound: MessageLimit) -> Any:
    """The Message of this name; `Refused` if it is too large or not well-formed, before anything is joined.

    fetch: (name, most bytes) -> an object. Parts are fetched once each, those that describe others first.
    """
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    counted, contents, level = _Counted(bound), dict[str, bytes](), [root]
    kinds: tuple[str, ...] = ("Message",)
    while level:
        parts: dict[str, None] = {}
        for name in level:
            content = fetch(name, counted.left(kinds[0]))
            with contained():
                kind, named, body = _head(content)
                if kind not in kinds:
                    raise Refused("format", detail=f"{plain(kind, most=40)} where {' or '.join(kinds)} is expected")
                counted.add(kind, name, len(content) - (body if kind == "ArrayChunk" else 0))
                if kind == "Array":
                    counted.add_array(json.loads(content[body:]), named)
            contents[name] = content
            parts |= dict.fromkeys(named)
        level = [name for name in parts if name not in contents]
        kinds = tuple(part for kind in kinds for part in _PARTS.get(kind, ()))
        if level and not kinds:
            raise Refused("format", detail="a part that is made of others")
    with contained():
        return inflate_object_from_contents(root, contents)


def _head(content: bytes) -> tuple[str, list[str], int]:
    """(kind, the parts it names, where its body begins) of an object."""
    from flwr.supercore.constant import HEAD_BODY_DIVIDER
    from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content

    kind, named, _ = get_object_head_values_from_object_content(content)
    return kind, named, content.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER)


def _too_large(what: str) -> Refused:
    return Refused("size", detail=f"{what}: refused before it was assembled")


class BoundedGrid:
    """A grid with bounded replies for Flower's own round loop; refused replies become errors, and are stored here."""

    def __init__(self, grid: Any, bound: Callable[[], MessageLimit]) -> None:
        self._grid, self._bound, self._pull = grid, bound, puller(grid)
        self.refused: list[tuple[int, Refused]] = []  # (node, reason) since they were last read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """The replies that have arrived."""
        found = [reply for message in message_ids for reply in self._pull(message, self._bound())]
        return [self._failed(reply) if isinstance(reply, UnreadReply) else reply for reply in found]

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        """Send, and wait for all replies or until the timeout."""
        waiting = {message for message in self._grid.push_messages(messages) if message}
        end = math.inf if timeout is None else time.monotonic() + timeout
        found: list[Any] = []
        while waiting and time.monotonic() < end:
            replies = self.pull_messages(sorted(waiting))
            found += replies
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            if waiting:
                time.sleep(min(3.0, max(0.0, end - time.monotonic())))
        return found

    def _failed(self, reply: UnreadReply) -> Any:
        from flwr.app import Error
        from flwr.app.message import make_message
        from flwr.common.constant import ErrorCode

        self.refused.append((reply.metadata.src_node_id, reply.problem))
        return make_message(reply.metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, str(reply.problem)))
