"""Finite replies that nothing can be computed with: the run goes on without them, and no spoilt model is saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from declared import build
from strangers import Strangers, nobody
from test_replies import watched

from consilience.core import tree
from consilience.core.conclusion import conclude
from consilience.core.exchange import Broadcast
from consilience.core.rounds import Diverged, Round, run
from consilience.core.screening import Limits
from consilience.wire.admission import Arrival
from consilience.wire.arrays import from_bytes, to_bytes

pytestmark = pytest.mark.usefixtures("untraced")

ATTACKER = 3


def filled(one: Arrival, value: float) -> Arrival:
    """The reply with this in place of every floating value of its model."""
    assert one.packed is not None
    changed = {}
    for path, item in one.packed.items():
        leaf = from_bytes(item.data, item.shape, item.dtype)
        large = leaf.is_floating_point() and path.startswith("model/")
        changed[path] = to_bytes(torch.full_like(leaf, value)) if large else item
    return replace(one, packed=changed, digest=None)


def sends(value: float, *clients: int, since: int = 1) -> Callable[[list[Arrival], int], list[Arrival]]:
    """These clients send the value for everything, from a round on."""

    def tamper(arrivals: list[Arrival], now: int) -> list[Arrival]:
        return [filled(one, value) if now >= since and one.client in clients else one for one in arrivals]

    return tamper


def silent(client: int) -> Callable[[list[Arrival], int], list[Arrival]]:
    return lambda arrivals, now: [
        sent for one in arrivals for sent in (nobody(one) if now and one.client == client else [one])
    ]


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "simprox", "scaffold", "fedamp"])
@pytest.mark.parametrize("value", [3e38, 1e30, 1e19, 1e8])
def test_a_client_that_sends_huge_values_in_every_round_is_as_good_as_silent(name: str, value: float) -> None:
    found = watched(build(name), Strangers(sends(value, ATTACKER), dtype="float32"), rounds=5)
    expected = watched(build(name), Strangers(silent(ATTACKER), dtype="float32"), rounds=5)
    for seen, other in zip(found, expected, strict=True):
        assert tiny.same(seen.round.model, other.round.model)
        assert tiny.same(seen.round.snapshot.server, other.round.snapshot.server)
    for one in found[1:]:
        assert one.row["rejected"] == {"too_large": 1} and one.round.cohort.ids.tolist() == [0, 1, 2, 4]
        assert [(r.client, r.reason) for r in one.round.cohort.refusals] == [(ATTACKER, "too_large")]
        assert one.row["refused"][0].startswith("client 3 refused: too_large in model/")
        assert tiny.finite(one.round.snapshot.server)


@pytest.mark.parametrize("value", [3e38, 1e19])
def test_when_all_send_huge_values_nothing_changes_until_the_run_ends(value: float) -> None:
    kept: list[Round] = []
    with pytest.raises(
        Diverged, match=r"3 rounds in a row, up to round 4, .*5 too_large.*The model is unchanged since"
    ):
        kept.extend(run(build("fedavg"), Strangers(sends(value, *range(5)), dtype="float32"), rounds=9, seed=1))
    rounds = []
    engine = Strangers(sends(value, *range(5)), dtype="float32")
    with pytest.raises(Diverged):
        for one in run(build("fedavg"), engine, rounds=9, seed=1):
            rounds.append(one)
    assert [one.snapshot.bad_rounds for one in rounds] == [0, 1, 2, 3]
    assert all(tiny.same(one.snapshot.server, rounds[0].snapshot.server) for one in rounds)
    again = list(run(build("fedavg"), tiny.engine(dtype="float32"), rounds=6, seed=1, resume=rounds[-1].snapshot))
    assert len(again) == 2 and tiny.finite(again[-1].model)  # honest again, it goes on


def test_one_client_alone_that_sends_huge_values() -> None:
    engine = Strangers(sends(1e30, 0), dtype="float32", data=tiny.federation([7]))
    rounds = []
    with pytest.raises(Diverged, match="1 too_large"):
        for one in run(build("fedavg"), engine, rounds=9, seed=1):
            rounds.append(one)
    assert tiny.same(rounds[-1].model, rounds[0].model) and tiny.finite(rounds[-1].model)


def test_a_model_of_zeros_at_the_start() -> None:
    def from_zero(tamper: Any) -> list[Round]:
        engine = Strangers(tamper, dtype="float32")
        start = tree.map_leaves(torch.zeros_like, engine.start())
        return list(run(build("fedavg"), engine, rounds=3, seed=1, start=start))

    found, expected = from_zero(sends(1e9, ATTACKER)), from_zero(silent(ATTACKER))
    assert found[0].cohort.ids.tolist() == list(range(5)) and not found[0].cohort.counts
    assert tiny.same(found[-1].model, expected[-1].model) and found[1].cohort.counts == {"too_large": 1}


@pytest.mark.parametrize("server_lr", [1e21, 1e30])
def test_a_model_that_overflows_is_not_saved_and_the_last_good_round_is_named(server_lr: float) -> None:
    """Every reply is in order; the server's own step is not."""
    algorithm = build("fedavgm", server_lr=server_lr)
    rounds, engine = [], tiny.engine(dtype="float32")
    calm = list(run(build("fedavgm"), engine, rounds=1, seed=1))
    with pytest.raises(Diverged, match=r"round 2: the new global model .* round 1 is the last good one"):
        for one in run(algorithm, tiny.engine(dtype="float32"), rounds=3, seed=1, resume=calm[0].snapshot):
            rounds.append(one)
    assert rounds == []
    with pytest.raises(Diverged, match=r"round 1: .*no good round before it"):
        next(run(algorithm, tiny.engine(dtype="float32"), rounds=3, seed=1))


def test_in_a_private_sum_nobody_is_refused_for_what_others_sent() -> None:
    algorithm, engine = build("dp_fedavg"), tiny.engine(dtype="float32")
    start = engine.start()
    state = algorithm.server.init(start, 5)
    received = Broadcast(shared={"model": start})
    one = next(run(build("fedavg"), engine, rounds=1, seed=1))
    stacked = one.cohort.reply["model"]
    far = tree.map_leaves(lambda leaf: leaf.index_fill(0, torch.tensor([3]), 1e9), stacked)
    cohort = replace(one.cohort, reply={"model": far})
    ended = conclude(algorithm, state, cohort, received, round=0, seed=1)
    assert ended.problem is None and ended.cohort.ids.tolist() == list(range(5))  # clipped by the rule itself
    plain = build("fedavg")
    judged = conclude(plain, plain.server.init(start, 5), cohort, received, round=0, seed=1)
    assert judged.cohort.ids.tolist() == [0, 1, 2, 4]
    huge = tree.map_leaves(lambda leaf: leaf.index_fill(0, torch.tensor([3]), 3e38), stacked)
    assert conclude(
        algorithm, state, replace(cohort, reply={"model": huge}), received, round=0, seed=1
    ).cohort.counts == {"too_large": 1}


def test_the_ratio_is_a_setting() -> None:
    tamper = sends(1e3, ATTACKER)
    assert watched(build("fedavg"), Strangers(tamper, dtype="float32"))[1].row["rejected"] == {"too_large": 1}
    for limits in (Limits(max_ratio=None), Limits(max_ratio=1e6)):
        engine = Strangers(tamper, dtype="float32")
        assert watched(build("fedavg"), engine, limits=limits)[1].row["rejected"] == {}
