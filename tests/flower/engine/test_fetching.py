"""Replies that drip, or never end, in front of a grid that waits for them as Flower's does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tiny
from declared import CLIENTS, build

from consilience.core.rounds import run
from consilience.flower.messages import fetching
from consilience.flower.messages.fetching import Fetching
from consilience.flower.messages.pulling import MessageLimit
from consilience.task.task import Task

ALONE = tuple([client] for client in range(CLIENTS))


class Dripping:
    """A grid that answers a message with its name, and waits inside for those that are held."""

    def __init__(self, *held: str) -> None:
        self.held = set(held)
        self.released, self.failing = threading.Event(), False
        self.asked: list[str] = []

    def pull_messages(self, names: Sequence[str]) -> list[str]:
        assert len(names) == 1  # with several in one question, those behind one that drips would wait with it
        self.asked += names
        if self.failing:
            raise ConnectionError("the SuperLink is gone")
        if names[0] in self.held:
            assert self.released.wait(30)
        return list(names)


def fetching_from(grid: Dripping, *names: str) -> Fetching:
    made = Fetching(grid)
    made.expect(dict.fromkeys(names, MessageLimit(0, 0)))
    return made


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "SLOW", 0.1)
    monkeypatch.setattr(fetching, "LAST", 0.3)


@pytest.fixture
def grid() -> Iterator[Dripping]:
    made = Dripping()
    yield made
    made.released.set()


def test_all_are_fetched_when_nobody_drips(grid: Dripping) -> None:
    assert fetching_from(grid, *"abc").look(["a", "b", "c"], time.monotonic() + 5) == ["a", "b", "c"]
    assert Fetching(grid).look([], time.monotonic() + 5) == []


def test_one_that_drips_holds_up_nobody_and_is_there_once_it_is_whole(grid: Dripping) -> None:
    fetched, began = fetching_from(grid, *"abcd"), time.monotonic()
    grid.held = {"a", "c"}
    assert fetched.look(["a", "b", "c", "d"], began + 20) == ["b", "d"]
    assert time.monotonic() - began < 2
    assert fetched.look(["a", "c"], began + 20) == []
    assert sorted(grid.asked) == ["a", "b", "c", "d"]  # who is being fetched is not asked for a second time
    grid.released.set()
    for thread in fetched._slow.values():
        thread.join(5)
    assert sorted(fetched.look(["a", "c"], began + 20)[:2]) == ["a", "c"]


def test_the_end_comes_whatever_drips(grid: Dripping) -> None:
    grid.held = {f"held-{k}" for k in range(40)}  # 40 x SLOW would be 4 seconds
    fetched, began = fetching_from(grid, *grid.held, "whole"), time.monotonic()
    assert fetched.look([*sorted(grid.held), "whole"], began + 0.2) == []
    assert 0.5 <= time.monotonic() - began < 1.5


def test_what_was_there_at_the_deadline_is_still_fetched(grid: Dripping) -> None:
    assert fetching_from(grid, "a", "b").look(["a", "b"], time.monotonic() - 0.01) == ["a", "b"]


def test_a_failure_reaches_the_server(grid: Dripping) -> None:
    grid.failing = True
    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        fetching_from(grid, "a").look(["a"], time.monotonic() + 5)


# --- through the engine ----------------------------------------------------------------------------------------------


class Slow:
    """A Loopback grid behind which some nodes' replies never end, and others take their time."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self.never: set[int] = set()
        self.seconds: dict[int, float] = {}
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def pull_messages(self, names: Sequence[str]) -> list[Any]:
        found = self._grid.pull_messages(names)
        for reply in found:
            node = reply.metadata.src_node_id
            self.released.wait(self.seconds.get(node, 60 if node in self.never else 0))
        return found


@pytest.fixture
def slow() -> Iterator[Slow]:
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
    from flower_loopback import Loopback, apps

    made = Slow(Loopback(apps(build("fedavg"), _task, tiny.federation(), ALONE)))
    yield made
    made.released.set()


def _task() -> Task:
    return Task(tiny.MODELS["mlp"]())


def _engine(grid: Slow, deadline: float) -> Any:
    from consilience.flower.engine.engine import FlowerEngine
    from consilience.flower.messages.mail import Waiting

    waiting = Waiting(deadline=deadline, wait=5.0, retries=0, pause=0.01)
    engine = FlowerEngine(
        grid, _task(), build("fedavg"), clients=CLIENTS, run="a-run", dtype="float64", min_available=1, waiting=waiting
    )
    engine.meet()
    return engine


@pytest.mark.usefixtures("untraced")
def test_row_34_a_reply_that_never_ends_is_cut_at_the_deadline_and_refused_later(slow: Slow) -> None:
    engine = _engine(slow, 1.5)
    nodes = sorted(slow.apps)
    slow.never = {nodes[0]}  # the first that is asked
    rounds = run(build("fedavg"), engine, rounds=2, seed=5)
    began = time.monotonic()
    first = next(rounds)
    took = time.monotonic() - began
    assert first.cohort.ids.tolist() == [1, 2, 3, 4] and first.cohort.counts["silent"] == 1
    assert 1.5 <= took < 1.5 + 0.3 + 1.0  # the deadline, LAST, and the round's own arithmetic

    slow.released.set()
    for thread in engine._mail._fetching._slow.values():
        thread.join(5)
    slow.never = set()
    second = next(rounds)
    assert second.cohort.ids.tolist() == list(range(CLIENTS))
    assert [refusal.reason for refusal in second.cohort.refusals] == ["stale_round"]


@pytest.mark.usefixtures("untraced")
def test_row_34_answers_that_trickle_in_do_not_move_the_deadline(slow: Slow) -> None:
    engine = _engine(slow, 1.5)
    for place, node in enumerate(sorted(slow.apps)):
        slow.seconds[node] = 0.7 * place  # one answer every 0.7 seconds: the last comes after 2.8
    began = time.monotonic()
    first = next(run(build("fedavg"), engine, rounds=1, seed=5))
    assert time.monotonic() - began < 1.5 + 0.3 + 1.0
    assert first.cohort.ids.tolist()[:2] == [0, 1] and 4 not in first.cohort.ids.tolist()
    assert first.cohort.counts["silent"] == CLIENTS - len(first.cohort)


@pytest.mark.usefixtures("untraced")
def test_a_node_that_never_says_who_it_is_holds_up_one_round_only(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    from consilience.flower.engine import node_registry

    monkeypatch.setattr(node_registry, "PATIENCE", 0.2)
    stranger = sorted(slow.apps)[2]
    slow.deaf.add(stranger)
    began = time.monotonic()
    engine = _engine(slow, 1.6)
    took = [time.monotonic() - began]
    for _ in range(4):
        began = time.monotonic()
        assert engine._registry.present().tolist() == [True, True, False, True, True]
        took.append(time.monotonic() - began)
    assert 0.2 <= took[0] < 1.6  # the others have answered
    assert all(seconds < 0.2 for seconds in took[1:])
    slow.deaf.clear()  # and its answer to the first question, which comes late, still counts
    assert engine._registry.present().all()  # and comes in as soon as it does


def test_a_node_that_holds_nobody_and_says_so_slowly_holds_up_one_round_only(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    from consilience.flower.engine import node_registry
    from consilience.flower.messages import wire

    monkeypatch.setattr(node_registry, "PATIENCE", 0.6)
    stranger = sorted(slow.apps)[2]
    none: dict[str, list[int]] = {key: [] for key in ("clients", *node_registry.SPLITS)}

    def nobody(node: int, reply: Any) -> Any:
        if node == stranger:
            said = wire.get_json(reply.content, "introduction")
            wire.put_json(reply.content, "introduction", {**said, **none})
        return reply

    slow._grid.tamper = nobody
    engine, took = _engine(slow, 1.6), []
    for number in range(6):
        slow._grid.online ^= {stranger} if number >= 4 else set()  # it leaves, and comes back
        slow.deaf.add(stranger)
        later = threading.Timer(0.5, slow.deaf.discard, [stranger])
        later.start()
        began = time.monotonic()
        assert engine._registry.present().tolist() == [True, True, False, True, True]
        took.append(time.monotonic() - began)
        later.join()
    assert all(seconds < 0.3 for seconds in took), took
