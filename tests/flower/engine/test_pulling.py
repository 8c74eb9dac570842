"""Replies that would grow in the server's memory, refused before they do; through Flower's own grid and HTTP client."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tiny
from declared import CLIENTS, build

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower_loopback import Loopback, apps
from flower_superlink import Objects, Superlink, array, deflated, made, message_of

from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.flower.engine.engine import FlowerEngine
from consilience.flower.messages.mail import Waiting
from consilience.flower.messages.pulling import BoundedGrid, MessageLimit, UnreadReply, puller
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")

ALLOWED = MessageLimit.of(6_000_000, 2)
CHUNK = 5 * 2**20  # bytes: as large as Flower makes them


def reply(values: np.ndarray | None = None) -> Any:
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    asked = Message(RecordDict(), dst_node_id=7, message_type="train")
    asked.metadata.__dict__["_message_id"] = "asked"
    value = np.arange(12, dtype=np.float32).reshape(3, 4) if values is None else values
    content = RecordDict({"arrays": ArrayRecord({"w": Array(value)}), "metrics": MetricRecord({"n": 3})})
    return Message(content, reply_to=asked)


def sent(change: Callable[[str, Objects], tuple[str, Objects]] | None = None, message: Any = None) -> Superlink:
    """A SuperLink that has got a reply."""
    link = Superlink()
    header, root, objects = deflated(message or reply())
    if change is not None:
        root, objects = change(root, objects)
        header.metadata.message_id = root
    link.add("asked", header, root, objects)
    return link


def with_arrays(*arrays: tuple[str, bytes], more: Objects | None = None) -> Callable[[str, Objects], Any]:
    return lambda root, objects: message_of(root, objects, dict(arrays), more or {}, "arrays")


def pulled(link: Superlink, bound: MessageLimit = ALLOWED) -> Any:
    (found,) = puller(link.grid())("asked", bound)
    return found


@contextmanager
def peak(most: float) -> Iterator[None]:
    """Fail if memory rises by more than `most` bytes meanwhile."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        rise = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert rise < most, f"{rise:,} bytes"


def bomb(times: int) -> tuple[tuple[str, bytes], Objects]:
    """An array that names one chunk so many times."""
    name, content = made("ArrayChunk", [], bytes(CHUNK))
    return array([name], [0] * times), {name: content}


def test_an_honest_reply_comes_through_whole_and_is_taken_from_the_superlink() -> None:
    values = np.zeros(2_900_000 // 4, np.float32)  # chunks that are alike are no crime
    values[-1] = 3
    message = reply(values)
    link = sent(message=message)
    found = pulled(link, MessageLimit.of(values.nbytes + 256, 1))
    np.testing.assert_array_equal(found.content["arrays"]["w"].numpy(), values)
    assert found.content["metrics"]["n"] == 3 and found.metadata.reply_to_message_id == "asked"
    assert len(link.fetched) == len(set(link.fetched)) and link.confirmed == [message.object_id]
    assert puller(link.grid())("asked", ALLOWED) == []  # nothing left


def test_chunks_of_zeros_are_fetched_once_and_joined_as_often_as_they_are_named() -> None:
    values = np.zeros(4 * CHUNK, np.uint8)
    link = sent(message=reply(values))
    found = pulled(link, MessageLimit.of(values.nbytes + 256, 1))
    assert found.content["arrays"]["w"].numpy().shape == values.shape
    assert link.read < 3 * CHUNK  # the first chunk has a header in front, the last is short, the two between are one


def test_the_superlinks_word_counts_and_not_the_senders() -> None:
    from flwr.app.message import make_message

    message = reply()
    link = sent(message=message)
    header, _ = link.replies["asked"]
    forged = make_message(message.metadata, message.content)
    forged.metadata.__dict__["_src_node_id"], forged.metadata.__dict__["_reply_to_message_id"] = 8, "another"
    _, name, objects = deflated(forged)
    header.metadata.message_id = name
    link.add("asked", header, name, objects)
    found = pulled(link)
    assert (found.metadata.src_node_id, found.metadata.reply_to_message_id) == (7, "asked")


@pytest.mark.parametrize("times", [2, 400])
def test_one_chunk_named_many_times_is_refused_before_it_is_joined(times: int) -> None:
    one, chunks = bomb(times)
    link = sent(with_arrays(one, more=chunks))
    with peak(2 * ALLOWED.arrays + 2 * CHUNK):  # the test's own SuperLink packs the chunk as well
        found = pulled(link)
    assert isinstance(found, UnreadReply) and found.problem.reason == "size"
    assert f"arrays of {times * CHUNK} bytes or more" in str(found.problem)
    assert found.metadata.src_node_id == 7 and len(link.confirmed) == 1


def test_many_arrays_of_one_chunk_are_counted_together() -> None:
    name, content = made("ArrayChunk", [], bytes(CHUNK))
    arrays = [array([name], [0], shape=(k,)) for k in range(3)]
    found = pulled(sent(with_arrays(*arrays, more={name: content})))
    assert isinstance(found, UnreadReply) and "size" in str(found.problem)


def test_an_array_that_says_it_is_too_large_is_refused_before_its_chunks_are_fetched() -> None:
    name, content = made("ArrayChunk", [], bytes(100))
    link = sent(with_arrays(array([name], [0], shape=[10**9, 10**9]), more={name: content}))
    found = pulled(link)
    assert isinstance(found, UnreadReply) and found.problem.reason == "size" and name not in link.fetched


def test_a_part_that_is_too_large_alone_is_never_read() -> None:
    name, content = made("ArrayChunk", [], bytes(50_000_000))
    link = sent(with_arrays(array([name], [0]), more={name: content}))
    found = pulled(link)
    assert isinstance(found, UnreadReply) and found.problem.reason == "size" and name in link.fetched
    assert link.read < 100_000


def test_names_and_texts_are_bounded_too() -> None:
    from flwr.app import ConfigRecord

    message = reply()
    message.content["text"] = ConfigRecord({"json": "x" * 2_000_000})
    link = sent(message=message)
    found = pulled(link)
    assert isinstance(found, UnreadReply) and found.problem.reason == "size" and link.read < 100_000
    many = [array([], [], shape=(k, 0)) for k in range(3000)]
    assert pulled(sent(with_arrays(*many))).problem.reason == "size"


CHUNKS = made("ArrayChunk", [], b"12345678")
BROKEN: dict[str, tuple[tuple[str, bytes], ...]] = {
    "a chunk that is not there": (array([CHUNKS[0]], [0, 1]),),
    "a chunk counted from the end": (array([CHUNKS[0]], [-1]),),
    "a chunk of no number": (array([CHUNKS[0]], ["0"]),),
    "chunks that are one": (array([CHUNKS[0]], 5),),
    "a chunk that is never named": (array([CHUNKS[0]], []),),
    "a shape that is none": (array([CHUNKS[0]], [0], shape="wide"),),
    "a shape below zero": (array([CHUNKS[0]], [0], shape=[-4, -2]),),
    "a type that is none": (array([CHUNKS[0]], [0], dtype=["float32"]),),
    "no JSON": (made("Array", [CHUNKS[0]], b"{"),),
    "JSON of another kind": (made("Array", [CHUNKS[0]], b"[1]"),),
    "deep JSON": (made("Array", [], b"[" * 20_000),),
    "a chunk in place of an array": (CHUNKS,),
    "a stranger's class": (made("Popen", [], b""),),
    "no head": (("0" * 64, b"nothing"),),
    "a head of other words": (("1" * 64, b"Array 5\x00{}"),),
    "a chunk of chunks": (array([made("ArrayChunk", [CHUNKS[0]], b"")[0]], [0]),),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_whatever_is_broken_is_a_refusal(what: str) -> None:
    odd = made("ArrayChunk", [CHUNKS[0]], b"")
    found = pulled(sent(with_arrays(*BROKEN[what], more=dict([CHUNKS, odd]))))
    assert isinstance(found, UnreadReply) and found.problem.reason in ("format", "dtype")


def test_a_part_that_was_never_sent_is_a_refusal() -> None:
    found = pulled(sent(with_arrays(array(["ab" * 32], [0]))))
    assert isinstance(found, UnreadReply) and found.problem.reason == "missing_part"


def test_records_that_are_no_messages_are_refusals() -> None:
    for body in (b"\xff\xff\xff", b""):
        link = sent(lambda root, objects, body=body: (lambda one: (one[0], dict([one])))(made("Message", [], body)))
        found = pulled(link)
        assert isinstance(found, UnreadReply) or not found.has_content()
    link = sent(lambda root, objects: (lambda one: (one[0], {**objects, **dict([one])}))(made("Message", [root], b"")))
    assert isinstance(pulled(link), UnreadReply)


def test_other_grids_of_flowers_are_refused_and_those_in_memory_need_no_bound() -> None:
    from flwr.serverapp.grid import Grid
    from flwr.superlink.grid import HttpGrid, InMemoryGrid

    class Newer(Grid):
        create_message = get_node_ids = get_nodes = pull_messages = push_messages = None
        send_and_receive = set_run = run = None

    with pytest.raises(Invalid, match="Newer cannot be bounded"):
        puller(Newer())
    grid = Superlink().grid()
    del grid._client._client
    with pytest.raises(Invalid, match=r"not known here.*use flwr 1\.41"):
        puller(grid)
    assert issubclass(HttpGrid, Grid) and issubclass(InMemoryGrid, Grid)


# --- through the engine and the strategies ---------------------------------------------------------------------------


def task() -> Task:
    return Task(tiny.MODELS["mlp"]())


def test_the_engine_refuses_the_bomb_by_name_and_the_round_goes_on() -> None:
    clients = Loopback(apps(build("fedavg"), task, tiny.federation(), [[k] for k in range(CLIENTS)]))
    link = Superlink(clients)
    waiting = Waiting(deadline=20, wait=20, retries=0, pause=0.01)
    engine = FlowerEngine(
        link.grid(), task(), build("fedavg"), clients=CLIENTS, run="a-run", dtype="float64", waiting=waiting
    )
    engine.meet()
    one, chunks = bomb(400)
    bad = sorted(clients.apps)[3]

    def forge(node: int, root: str, objects: Objects) -> tuple[str, Objects]:
        return message_of(root, objects, dict([one]), chunks, "reply.3") if node == bad else (root, objects)

    rounds = run(build("fedavg"), engine, rounds=3, seed=5)
    assert next(rounds).cohort.ids.tolist() == list(range(CLIENTS))
    link.forge = forge
    with peak(20_000_000):  # of 2 GB; the chunk is not even read, since no reply is that large
        second = next(rounds)
    assert second.cohort.ids.tolist() == [0, 1, 2, 4] and second.cohort.counts == {"size": 1}
    (refusal,) = second.cohort.refusals
    assert (refusal.client, refusal.reason) == (3, "size")
    link.forge = None
    assert next(rounds).cohort.ids.tolist() == list(range(CLIENTS))


def test_an_introduction_that_is_too_long_keeps_its_node_out() -> None:
    clients = Loopback(apps(build("fedavg"), task, tiny.federation(), [[k] for k in range(CLIENTS)]))
    link, (one, chunks) = Superlink(clients), bomb(3)
    bad = sorted(clients.apps)[3]
    link.forge = lambda node, root, objects: (
        message_of(root, objects, dict([one]), chunks, "more") if node == bad else (root, objects)
    )
    waiting = Waiting(deadline=20, wait=20, retries=0, pause=0.01)
    engine = FlowerEngine(
        link.grid(),
        task(),
        build("fedavg"),
        clients=CLIENTS,
        run="a-run",
        dtype="float64",
        min_available=4,
        waiting=waiting,
    )
    engine.meet()
    assert engine._registry.present().tolist() == [True, True, True, False, True]
    assert "size" in engine._registry._refused[bad]


def test_a_bounded_grid_gives_flowers_loop_an_error_and_keeps_the_name() -> None:
    one, chunks = bomb(400)
    link = sent(with_arrays(one, more=chunks))
    grid = BoundedGrid(link.grid(), lambda: ALLOWED)
    (found,) = grid.pull_messages(["asked"])
    assert found.has_error() and "size" in found.error.reason and found.metadata.reply_to_message_id == "asked"
    assert [(node, problem.reason) for node, problem in grid.refused] == [(7, "size")]
    assert grid.run.run_id == 1


def test_a_strategy_names_the_node_and_averages_the_others() -> None:
    import flower_messages as fm
    import torch
    from flwr.app import ArrayRecord

    from consilience.flower.strategies.strategy import strategy

    start = {name: value.detach() for name, value in tiny.mlp().state_dict().items()}

    def client(move: float) -> Any:
        def app(message: Any, context: Any) -> Any:
            values = {name: torch.from_numpy(a.numpy() + move) for name, a in message.content["arrays"].items()}
            return fm.reply(message, {"arrays": values}, {"num-examples": 1})

        return app

    clients = Loopback([client(move) for move in (1.0, 2.0, 9.0)])
    link, (one, chunks) = Superlink(clients), bomb(400)
    bad = sorted(clients.apps)[2]
    link.forge = lambda node, root, objects: (
        message_of(root, objects, dict([one]), chunks, "arrays") if node == bad else (root, objects)
    )
    mine = strategy("FedAvg")(fraction_evaluate=0.0)
    result = mine.start(link.grid(), ArrayRecord(start), num_rounds=1, timeout=20)
    for name, value in fm.values_of(result.arrays).items():
        torch.testing.assert_close(value, start[name] + 1.5)
    assert [(round, r.client, r.reason) for round, r in mine.refusals] == [(1, f"node {bad}", "size")]
    assert result.train_metrics_clientapp[1]["refused-replies"] == 1
