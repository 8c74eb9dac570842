"""What clients remember, and what becomes of those that break down."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import rules_for_tests as parts
import tiny
import torch
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.scaffold import scaffold
from consilience.core import tree
from consilience.core.algorithm import Plain
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast, Pool
from consilience.core.federation import Federation
from consilience.core.rounds import Diverged, Round, run
from consilience.engines.vectorised.client_memories import ClientMemories
from consilience.environments.environment import Environment
from consilience.selection import Uniform

pytestmark = pytest.mark.usefixtures("untraced")
each_lane = pytest.mark.parametrize("lane", ["serial", "batched", "streams"])
queued_or_not = pytest.mark.parametrize("queued", [False, True], ids=["at once", "queued"])
CLIENTS = len(tiny.SIZES)
LOUD = (1.0, 0.0, 1.0, 0.0, 1.0)  # clients 1 and 3 are never heard


class Squares(nn.Module):
    """A model whose output overflows on huge data, and on huge parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(36, tiny.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1)).square()


def squares() -> nn.Module:
    return tiny.seeded(Squares)


def overflowing(*clients: int, scale: float = 1e300) -> Federation:
    """Data of these clients are finite, but their squares are not; with scale 1e307 nor are their sums."""
    data = tiny.federation()
    x = data.train.x.clone()
    for client in clients:
        start, size = int(data.train.starts[client]), int(data.train.sizes[client])
        x[start : start + size] = scale * (1 + x[start : start + size].abs())
    return Federation(train=dataclasses.replace(data.train, x=x), test=data.test, classes=data.classes)


# --- memories --------------------------------------------------------------------------------------------------------


def visits(rounds: list[Round]) -> list[list[int]]:
    return [one.snapshot.memory["client"]["visits"].tolist() for one in rounds]


@each_lane
@pytest.mark.parametrize("at_once", [2, 64])
def test_memories_follow_their_clients(lane: str, at_once: int) -> None:
    engine = tiny.engine(lane=lane, clients_at_once=at_once)
    rounds = list(run(parts.remembering(selection=Uniform(count=3)), engine, rounds=5, seed=2))
    labels = [int(engine.federation.train.of(k)[1].sum()) for k in range(CLIENTS)]
    counted = np.zeros(CLIENTS, dtype=int)
    for one in rounds:
        counted[one.cohort.ids] += 1
        assert one.cohort.reply["visits"].tolist() == counted[one.cohort.ids].tolist()
        assert one.snapshot.memory["client"]["visits"].tolist() == counted.tolist()
        assert one.snapshot.memory["client"]["labels"].tolist() == (counted * labels).tolist()
    assert counted.sum() == 15 and counted.min() > 0


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_memories_of_whole_numbers_only(lane: str) -> None:
    rounds = list(run(parts.remembering(counters_only=True), tiny.engine(lane=lane), rounds=2))
    assert visits(rounds) == [[1] * 5, [2] * 5]


@each_lane
@pytest.mark.parametrize("silent", ["broadcast_model", "renormalise"])
def test_silent_clients_keep_their_memory(lane: str, silent: Any) -> None:
    engine = tiny.engine(lane=lane, environment=Environment(communication=LOUD, silent=silent))
    rounds = list(run(parts.remembering(), engine, rounds=2))
    assert visits(rounds) == [[1, 0, 1, 0, 1], [2, 0, 2, 0, 2]]
    labels = rounds[-1].snapshot.memory["client"]["labels"]
    assert labels[1] == labels[3] == 0 and float(labels[0]) > 0


@each_lane
@pytest.mark.parametrize("silent", ["broadcast_model", "renormalise"])
@pytest.mark.parametrize("at_once", [2, 64])
def test_personal_messages_reach_their_clients(lane: str, silent: Any, at_once: int) -> None:
    environment = Environment(steps=(2, 5, 1, 4, 3), communication=LOUD, silent=silent)
    engine = tiny.engine(lane=lane, environment=environment, clients_at_once=at_once)
    for one in run(parts.remembering(selection=Uniform(count=4)), engine, rounds=4, seed=1):
        # 100 x client + number of earlier replies; a client keeps being told what it was told last
        assert (one.cohort.reply["echo"] // 100).tolist() == one.cohort.ids.tolist()
        answered = one.snapshot.server["mine"][torch.from_numpy(one.cohort.ids)]
        assert (answered - one.cohort.reply["echo"]).tolist() == [1.0] * len(one.cohort)


def test_memories_resume_exactly() -> None:
    algorithm = parts.remembering(selection=Uniform(count=2))
    whole = list(run(algorithm, tiny.engine(), rounds=6, seed=3))
    held = whole[2].snapshot
    saved = dataclasses.replace(held, server=tree.clone(held.server), memory=tree.clone(held.memory))
    rest = list(run(algorithm, tiny.engine(), rounds=6, seed=3, resume=saved))
    assert visits(rest) == visits(whole[3:])
    assert all(tiny.same(a.snapshot.memory, b.snapshot.memory) for a, b in zip(rest, whole[3:]))


@dataclasses.dataclass(frozen=True)
class Late:
    """Nobody in the first round, then everybody."""

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        return pool.candidates if round else pool.candidates[:0]


def test_resume_before_anybody_took_part() -> None:
    algorithm = parts.remembering(selection=Late())
    whole = list(run(algorithm, tiny.engine(), rounds=3))
    assert visits(whole[1:]) == [[1] * 5, [2] * 5]
    rest = list(run(algorithm, tiny.engine(), rounds=3, resume=whole[0].snapshot))
    assert visits(rest) == [[1] * 5, [2] * 5]


def test_held_memories_do_not_change() -> None:
    rounds = []
    for one in run(parts.remembering(), tiny.engine(), rounds=3):
        rounds.append((one.snapshot.memory, tree.clone(one.snapshot.memory)))
    assert all(tiny.same(held, copied) for held, copied in rounds)


def test_a_second_run_starts_with_fresh_memories() -> None:
    engine = tiny.engine()
    first = list(run(parts.remembering(), engine, rounds=2))
    second = list(run(parts.remembering(), engine, rounds=2))
    assert visits(first) == visits(second) == [[1] * 5, [2] * 5]


def test_another_rule_on_the_same_engine_starts_with_its_own_memories() -> None:
    engine = tiny.engine()
    list(run(parts.remembering(), engine, rounds=1))
    (one,) = run(fedavg(batch_size=4), engine, rounds=1)
    assert one.snapshot.memory == {}


def test_evaluation_touches_no_memory() -> None:
    engine = tiny.engine()
    rounds = run(parts.remembering(), engine, rounds=2)
    next(rounds)
    before = tree.clone(engine.recall())
    shared = Broadcast(shared={"model": engine.start()})
    reply = engine.exchange(Evaluate(), Plain(), shared, np.arange(5), round=0, seed=0).reply
    assert tiny.same(engine.recall(), before) and reply["loss"]["count"].tolist() == [3] * 5
    assert visits([next(rounds)]) == [[2] * 5]


# --- clients that break down -----------------------------------------------------------------------------------------


@each_lane
def test_a_nonfinite_reply_is_screened_and_the_round_goes_on(lane: str) -> None:
    rounds = list(run(fedavg(batch_size=4), tiny.engine(squares, overflowing(2), lane=lane), rounds=2, seed=1))
    without = tiny.engine(squares, lane=lane, environment=Environment(communication=(1, 1, 0, 1, 1)))
    expected = list(run(fedavg(batch_size=4), without, rounds=2, seed=1))
    for one, other in zip(rounds, expected):
        assert one.cohort.counts == {"nonfinite": 1} and one.cohort.ids.tolist() == [0, 1, 3, 4]
        assert tiny.finite(one.model)
        assert tiny.gap(one.model, other.model) <= 1e-12  # as if it had not been there
        assert one.snapshot.bad_rounds == 0
    assert np.isnan(rounds[-1].snapshot.losses[2])


@each_lane
@queued_or_not
def test_a_broken_client_keeps_its_memory(lane: str, queued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientMemories, "_queues", queued)
    rounds = list(run(parts.remembering(), tiny.engine(data=overflowing(2, 3, scale=1e307), lane=lane), rounds=2))
    assert visits(rounds) == [[1, 1, 0, 0, 1], [2, 2, 0, 0, 2]]
    assert rounds[-1].cohort.counts == {"nonfinite": 2}


@queued_or_not
def test_a_client_that_breaks_later_keeps_what_it_had(queued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some clients are not heard, and after a resume from the round in which it broke."""
    monkeypatch.setattr(ClientMemories, "_queues", queued)
    data, quiet = overflowing(2, scale=1e307), Environment(communication=(1.0, 0.0, 1.0, 1.0, 1.0))
    sound = tiny.engine(environment=quiet)
    first = list(run(parts.remembering(), sound, rounds=3))[-1].snapshot
    whole = list(run(parts.remembering(), tiny.engine(data=data, environment=quiet), rounds=6, resume=first))
    assert visits(whole) == [[4, 0, 3, 4, 4], [5, 0, 3, 5, 5], [6, 0, 3, 6, 6]]
    rest = list(run(parts.remembering(), tiny.engine(data=data, environment=quiet), rounds=6, resume=whole[0].snapshot))
    assert visits(rest) == visits(whole[1:])


def test_a_queued_test_of_memories_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientMemories, "_queues", True)
    engine = tiny.engine()
    rule, ids = scaffold(lr=0.1), np.arange(CLIENTS)
    broadcast = rule.server.broadcast(rule.server.init(engine.start(), CLIENTS), ids)
    with monkeypatch.context() as patch:
        patch.setattr(tree, "all_finite", lambda *_: pytest.fail("this waits"))
        patch.setattr(Tensor, "__bool__", lambda *_: pytest.fail("this waits"))
        engine.exchange(rule.client, rule.channel, broadcast, ids, round=0, seed=0)
    assert any(bool(leaf.any()) for leaf in tree.leaves(tree.here(tree.take(engine.recall(), ids))))


@each_lane
def test_when_all_diverge_the_model_stays_and_the_run_stops(lane: str) -> None:
    engine = tiny.engine(squares, overflowing(0, 1, 2, 3, 4), lane=lane)
    start = engine.start()
    seen: list[Round] = []
    with pytest.raises(Diverged, match="5 nonfinite"):
        for one in run(fedavg(batch_size=4), engine, rounds=9, max_bad_rounds=2):
            seen.append(one)
    assert len(seen) == 2 and all(tiny.same(one.model, start) for one in seen)


def test_a_huge_rate_diverges_without_a_traceback() -> None:
    with pytest.raises(Diverged, match="lower the learning rate"):
        list(run(fedavg(batch_size=4, lr=1e300, epochs=5), tiny.engine(squares), rounds=9))


def test_replies_and_memories_are_tested_with_one_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[int] = []
    is_finite = tree.is_finite
    monkeypatch.setattr(tree, "is_finite", lambda values: tested.append(len(values)) or is_finite(values))
    engine = tiny.engine(environment=Environment(steps=(2,) * 5))
    for _ in run(scaffold(lr=0.1), engine, rounds=3):
        pass
    assert len(tested) == 3 and min(tested) > len(tiny.mlp().state_dict()), "replies and memories together"
