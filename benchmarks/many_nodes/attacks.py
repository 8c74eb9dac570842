"""What a hostile or slow node does instead of answering: each takes the honest answer and says what is sent."""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from consilience.core import tree
from consilience.flower.messages import wire
from consilience.wire import arrays
from consilience.wire.admission import Arrival

Objects = dict[str, bytes]


class Sending(NamedTuple):
    """A reply as objects, and how it is sent."""

    root: str  # the message's own object
    objects: Objects
    wait: float = 0.0  # seconds before the header is sent
    each: float = 0.0  # seconds before each object


Attack = Callable[[Any, float], "Sending | None"]
"""From the honest reply (a Flower message) and the round's deadline to what is sent; None: nothing is."""


def deflated(message: Any) -> Sending:
    """A message as the objects in which it crosses the network."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return Sending(message.object_id, {name: part.deflate() for name, part in get_all_nested_objects(message).items()})


def silent(reply: Any, deadline: float) -> Sending | None:
    """Takes the message and never answers."""
    return None


def late(reply: Any, deadline: float) -> Sending | None:
    """Answers ten seconds after the deadline."""
    return deflated(reply)._replace(wait=deadline + 10)


def dripping(reply: Any, deadline: float) -> Sending | None:
    """Sends the header at once, and then a piece from time to time."""
    return deflated(reply)._replace(each=deadline / 6)


def wrong_kind(reply: Any, deadline: float) -> Sending | None:
    """A ConfigRecord where arrays are expected."""
    for name in list(reply.content):
        if name.startswith("reply"):
            reply.content[name] = wire.records().ConfigRecord({"stype": 3})
    return deflated(reply)


def scalar(reply: Any, deadline: float) -> Sending | None:
    """Single numbers where tensors are expected."""
    for name, record in list(reply.content.items()):
        if name.startswith("reply"):
            reply.content[name] = wire.array_record({path: arrays.Packed(_npy(1.0), "float32", ()) for path in record})
    return deflated(reply)


def huge(reply: Any, deadline: float) -> Sending | None:
    """32 MB of true zeros."""
    for name, record in list(reply.content.items()):
        if name.startswith("reply"):
            data = _npy(np.zeros(2**23, dtype=np.float32))
            reply.content[name] = wire.array_record({next(iter(record)): arrays.Packed(data, "float32", (2**23,))})
    return deflated(reply)


def declared_huge(reply: Any, deadline: float) -> Sending | None:
    """An array that says it has 2 GB."""
    made = deflated(reply)
    changed = {
        name: _altered(content, shape=[500_000_000]) if content.startswith(b"Array ") else content
        for name, content in made.objects.items()
    }
    return _renamed(made.root, changed)


def broken_array(reply: Any, deadline: float) -> Sending | None:
    """Arrays whose description is no JSON."""
    made = deflated(reply)
    changed = {
        name: _object(*_parts(content)[:2], b"{broken") if content.startswith(b"Array ") else content
        for name, content in made.objects.items()
    }
    return _renamed(made.root, changed)


def million_keys(reply: Any, deadline: float) -> Sending | None:
    """A configuration of a million keys in place of the answer's words."""
    made = deflated(reply)
    changed = {
        name: _object("ConfigRecord", [], _million()) if content.startswith(b"ConfigRecord") else content
        for name, content in made.objects.items()
    }
    return _renamed(made.root, changed)


def many_examples(reply: Any, deadline: float) -> Sending | None:
    """Says that it has ten million rows."""
    return _said(reply, examples=10_000_000)


def another_client(reply: Any, deadline: float) -> Sending | None:
    """Says that it is client 0, when it introduces itself and after."""
    if "introduction" in reply.content:
        wire.put_json(reply.content, "introduction", {**wire.get_json(reply.content, "introduction"), "clients": [0]})
        return deflated(reply)
    return _said(reply, client=0)


def million_times(reply: Any, deadline: float) -> Sending | None:
    """An update that is finite and a million times too long, with the digest that belongs to it."""
    return _scaled(reply, 1e6)


def reversed_sign(reply: Any, deadline: float) -> Sending | None:
    """The model with its sign reversed: of a usual length."""
    return _scaled(reply, -1.0)


def good_result(reply: Any, deadline: float) -> Sending | None:
    """A billion right answers in every evaluation."""
    if reply.metadata.message_type != "evaluate":
        return deflated(reply)
    return _scaled(reply, 1e9)


ATTACKS: tuple[Attack, ...] = (
    *(silent, late, dripping, wrong_kind, scalar, huge, declared_huge, broken_array, million_keys),
    *(many_examples, another_client, million_times, reversed_sign, good_result),
)


def _said(reply: Any, **lies: Any) -> Sending:
    """The reply with other words about it, sealed again."""
    if "introduction" in reply.content:
        return deflated(reply)
    _sealed(reply, lambda value: value, lies)
    return deflated(reply)


def _scaled(reply: Any, factor: float) -> Sending:
    if "introduction" not in reply.content:
        _sealed(reply, lambda value: value * factor if value.is_floating_point() else value, {})
    return deflated(reply)


def _sealed(reply: Any, change: Callable[[Any], Any], lies: dict[str, Any]) -> None:
    """Other values and words under a digest that belongs to them: a liar computes it, too."""
    said = wire.get_json(reply.content, "answer")
    for words in said:
        name = wire.reply_name(words["client"])
        flat = {
            path: arrays.from_bytes(one.data, one.shape, one.dtype)
            for path, one in wire.packed(reply.content[name]).items()
        }
        flat = {path: change(value) for path, value in flat.items()}
        del reply.content[name]
        words.update(lies)
        kept = {key: words[key] for key in ("client", "run", "round", "examples", "steps")}
        words["digest"] = arrays.digest(tree.unflatten(flat), *Arrival(**kept).facts)
        reply.content[wire.reply_name(words["client"])] = wire.array_record(
            {path: arrays.to_bytes(value) for path, value in flat.items()}
        )
    wire.put_json(reply.content, "answer", said)


def _npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(value, dtype=np.float32), allow_pickle=False)
    return file.getvalue()


def _parts(content: bytes) -> tuple[str, list[str], bytes]:
    """(kind, the parts it names, body) of an object."""
    head, _, body = content.partition(b"\x00")
    kind, parts, _ = head.decode().split(" ")
    return kind, [part for part in parts.split(",") if part], body


def _object(kind: str, parts: list[str], body: bytes) -> bytes:
    return f"{kind} {','.join(parts)} {len(body)}".encode() + b"\x00" + body


def _altered(content: bytes, **more: Any) -> bytes:
    kind, parts, body = _parts(content)
    return _object(kind, parts, json.dumps({**json.loads(body), **more}).encode())


def _renamed(root: str, objects: Objects) -> Sending:
    """The objects under the names that their changed contents have, from the leaves up to the message."""
    names: dict[str, str] = {}
    made: Objects = {}

    def named(old: str) -> str:
        if old not in names:
            kind, parts, body = _parts(objects[old])
            new = [named(part) for part in parts]
            for part, other in zip(parts, new):
                body = body.replace(part.encode(), other.encode())
            content = _object(kind, new, body)
            names[old] = hashlib.sha256(content).hexdigest()
            made[names[old]] = content
        return names[old]

    return Sending(named(root), made)


@functools.cache
def _million() -> bytes:
    return b"{" + b",".join(b'"k%07d":1' % number for number in range(1_000_000)) + b"}"
