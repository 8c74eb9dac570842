"""Replies whose stored objects are broken on purpose: whatever one node sends, the others' round goes on.

`python -m pytest tests/flower/engine/test_stored_objects.py -m slow` tries many more; a failure names its seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from declared import CLIENTS, build

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower_loopback import Loopback, apps
from flower_superlink import Objects, Superlink, made

from consilience.core.rounds import run
from consilience.flower.engine.engine import FlowerEngine
from consilience.flower.messages.mail import Waiting
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")

BAD = 3  # the client whose node lies
WAITING = Waiting(deadline=60, wait=60, retries=0, pause=0.01)
KINDS = ("Message", "RecordDict", "ArrayRecord", "ConfigRecord", "MetricRecord", "Array", "ArrayChunk", "Popen", "")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 1e308, float("nan"), "", "x" * 300, "\x00\u202e",
    [], {}, [[]], [None], {"a": 1}, "0" * 64,
)  # fmt: skip


def parted(content: bytes) -> tuple[str, list[str], bytes]:
    """(kind, the parts it names, body) of an object."""
    head, _, body = content.partition(b"\x00")
    kind, parts, _ = head.decode().split(" ")
    return kind, [part for part in parts.split(",") if part], body


def flipped(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 4, 32))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def longer(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] + draw.randbytes(draw.choice((1, 8, 200))) + content[at:]


def other_kind(draw: random.Random, content: bytes) -> bytes:
    _, parts, body = parted(content)
    return made(draw.choice(KINDS), parts, body)[1]


def other_parts(draw: random.Random, content: bytes) -> bytes:
    kind, parts, body = parted(content)
    choice = draw.randrange(4)
    if choice == 0:
        parts = parts[1:]
    elif choice == 1:
        parts = parts + parts
    elif choice == 2:
        parts = [*parts, "ab" * 32]
    else:
        draw.shuffle(parts)
    return made(kind, parts, body)[1]


def other_values(draw: random.Random, content: bytes) -> bytes:
    """JSON with something odd somewhere in it; objects without JSON get some in place of their body."""
    kind, parts, body = parted(content)
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    return made(kind, parts, json.dumps(_altered(draw, said)).encode())[1]


def _altered(draw: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(sorted(value))
        if draw.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _altered(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return [*value[:at], _altered(draw, value[at]), *value[at + 1 :]]
    return draw.choice(ODD)


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flipped, cut, longer, other_kind, other_parts, other_values, other_values,
)  # fmt: skip


def mutated(draw: random.Random, objects: Objects) -> Objects:
    """The objects under their old names, some of them changed: a SuperLink that checks nothing."""
    changed = dict(objects)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        name = draw.choice(sorted(changed))
        try:
            changed[name] = draw.choice(MUTATIONS)(draw, changed[name])
        except (ValueError, IndexError, UnicodeDecodeError):  # changed before, beyond recognition
            changed[name] = b""
        if draw.random() < 0.1:
            del changed[name]
        elif draw.random() < 0.1:
            changed[draw.choice(sorted(changed))] = changed[name]
    return changed


def fuzzed(seeds: range) -> dict[str, int]:
    """Rounds of training in which one node's stored reply is broken, and how many of these were refused for what."""
    clients = Loopback(apps(build("fedavg"), lambda: Task(tiny.MODELS["mlp"]()), tiny.federation(), NODES))
    link = Superlink(clients)
    engine = FlowerEngine(
        link.grid(), Task(tiny.MODELS["mlp"]()), build("fedavg"), clients=CLIENTS, run="a-run", dtype="float64",
        waiting=WAITING,
    )  # fmt: skip
    engine.meet()
    bad, found = sorted(clients.apps)[1], dict[str, int]()
    for seed in seeds:
        draw = random.Random(seed)
        link.forge = lambda node, root, objects, draw=draw: (
            (root, mutated(draw, objects)) if node == bad else (root, objects)
        )
        link.store.clear()
        try:
            (only,) = run(build("fedavg"), engine, rounds=1, seed=5)
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {type(problem).__name__}: {problem}") from problem
        assert {0, 1, 2, 4} <= set(only.cohort.ids.tolist()), f"seed {seed}"
        assert tiny.finite(only.model), f"seed {seed}"
        for refusal in only.cohort.refusals:
            assert refusal.client in (BAD, f"of node {bad}"), f"seed {seed}: {refusal}"
            found[refusal.reason] = found.get(refusal.reason, 0) + 1
    return found


NODES = ([0, 1, 2, 4], [BAD])


def test_broken_objects_of_one_node_are_refused_and_the_round_goes_on() -> None:
    found = fuzzed(range(60))
    assert sum(found.values()) > 30 and set(found) >= {"format"}


@pytest.mark.slow
def test_thousands_of_broken_objects() -> None:
    fuzzed(range(1000, 4000))
