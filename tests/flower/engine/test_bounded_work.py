"""What one node can cost the server: time and memory are bounded, and the others' round keeps its time."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
from declared import CLIENTS, build

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower_loopback import Loopback, apps
from flower_superlink import Objects, Superlink, array, made, message_of

from consilience.core.rounds import run
from consilience.flower.engine.engine import FlowerEngine
from consilience.flower.messages import wire
from consilience.flower.messages.mail import Waiting
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
BAD = 3
WAITING = Waiting(deadline=60, wait=60, retries=0, pause=0.01)


def task() -> Task:
    return Task(tiny.MODELS["mlp"]())


def superlink() -> tuple[Superlink, int]:
    clients = Loopback(apps(build("fedavg"), task, tiny.federation(), [[k] for k in range(CLIENTS)]))
    return Superlink(clients), sorted(clients.apps)[BAD]


def engine_on(link: Superlink, **settings: Any) -> FlowerEngine:
    options = {"dtype": "float64", "waiting": WAITING, "min_available": 4, **settings}
    return FlowerEngine(link.grid(), task(), build("fedavg"), clients=CLIENTS, run="a-run", **options)


@contextmanager
def within(memory: float, seconds: float) -> Iterator[None]:
    tracemalloc.start()
    began = time.monotonic()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        rise, took = tracemalloc.get_traced_memory()[1] - before, time.monotonic() - began
    finally:
        tracemalloc.stop()
    assert rise < memory, f"{rise:,} bytes"
    assert took < seconds, f"{took:.1f} seconds"


def large_arrays(root: str, objects: Objects) -> tuple[str, Objects]:
    """2 GB, as the array says."""
    chunk = made("ArrayChunk", [], bytes(1000))
    return message_of(root, objects, dict([array([chunk[0]], [0], shape=[500_000_000])]), dict([chunk]), "reply.3")


def large_chunks(root: str, objects: Objects) -> tuple[str, Objects]:
    """A small array, of 400 different chunks of 5 MB; all have one content here, which only its name distinguishes."""
    content = made("ArrayChunk", [], bytes(5 * 2**20))[1]
    names = [f"{number:064x}" for number in range(400)]
    one = array(names, list(range(400)), shape=[2])
    return message_of(root, objects, dict([one]), dict.fromkeys(names, content), "reply.3")


def large_text(root: str, objects: Objects) -> tuple[str, Objects]:
    """A configuration of a million keys in place of the answer."""
    keys = b",".join(b'"k%07d":1' % number for number in range(1_000_000))
    record = made("ConfigRecord", [], b"{" + keys + b"}")
    changed = dict(objects)
    for name, content in objects.items():
        if content.startswith(b"ConfigRecord"):
            changed[name] = record[1]
    return root, changed


@pytest.mark.parametrize("forge", [large_arrays, large_chunks, large_text])
def test_a_reply_of_gigabytes_or_a_million_keys_costs_next_to_nothing(forge: Any) -> None:
    link, bad = superlink()
    engine = engine_on(link, min_available=None)
    engine.meet()
    made_before: dict[str, Any] = {}

    def once(node: int, root: str, objects: Objects) -> tuple[str, Objects]:
        if node == bad and "it" not in made_before:
            made_before["it"] = forge(root, objects)
        return made_before["it"] if node == bad else (root, objects)

    link.forge = once
    list(run(build("fedavg"), engine, rounds=1, seed=5))  # the attack's own objects are made and stored here
    link.read = 0
    with within(memory=30e6 + 1.1 * sum(map(len, made_before["it"][1].values())) / 400, seconds=20):
        (only,) = run(build("fedavg"), engine, rounds=1, seed=5)
    assert only.cohort.ids.tolist() == [0, 1, 2, 4] and only.cohort.counts["size"] == 1
    assert link.read < 1_000_000


def test_an_introduction_of_megabytes_is_refused_unread() -> None:
    link, bad = superlink()
    assert link.clients is not None

    def talk(node: int, reply: Any) -> Any:
        if node == bad and "introduction" in reply.content:
            said = wire.get_json(reply.content, "introduction")
            wire.put_json(reply.content, "introduction", {**said, "more": "x" * 4_000_000})
        return reply

    link.clients.tamper = talk
    engine = engine_on(link)
    engine.meet()
    assert engine._registry.present().tolist() == [True, True, True, False, True]
    assert "size" in engine._registry._refused[bad] and link.read < 1_000_000


@pytest.mark.parametrize("number", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_strangers_delay_a_run_by_seconds(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """Registered nodes that answer nonsense, where no list of members keeps them out."""
    link, _ = superlink()
    clients = link.clients
    assert clients is not None

    def nonsense(message: Any, context: Any) -> Any:
        raise ValueError("nonsense " * 100)

    true = set(clients.apps)
    for node in range(1, number + 1):  # before the true clients, by their ids
        clients.apps[node], clients.contexts[node] = nonsense, clients.contexts[min(true)]
        clients.online.add(node)
    engine = engine_on(link, min_available=None)
    began = time.monotonic()
    with caplog.at_level("INFO", logger="consilience.flower"):
        engine.meet()
        first = time.monotonic() - began
        (only,) = run(build("fedavg"), engine, rounds=1, seed=5)
    assert only.cohort.ids.tolist() == list(range(CLIENTS))
    assert first < 60 and time.monotonic() - began - first < 30
    assert len(clients.kinds) == number + 2 * CLIENTS  # each stranger was asked once
    assert len(caplog.records) < 60 + number // 3  # at most 20 lines, and one more, for each 69 that are asked


def test_silent_strangers_are_not_waited_for_once_others_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    from consilience.flower.engine import node_registry

    monkeypatch.setattr(node_registry, "PATIENCE", 0.5)
    link, _ = superlink()
    clients = link.clients
    assert clients is not None
    for node in range(1, 21):
        clients.online.add(node)
        clients.deaf.add(node)
    engine = engine_on(link, min_available=None)
    began = time.monotonic()
    engine.meet()
    assert time.monotonic() - began < 20
