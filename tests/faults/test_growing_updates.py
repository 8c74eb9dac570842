"""Updates that are long for this run are shortened to a multiple of the running median, which a resumed run knows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import build
from strangers import Strangers

from consilience.core import tree
from consilience.core.exchange import Broadcast
from consilience.core.rounds import Round, run
from consilience.core.screening import Limits, median_length, running_median
from consilience.wire.admission import Arrival
from consilience.wire.arrays import from_bytes, to_bytes

pytestmark = pytest.mark.usefixtures("untraced")
ATTACKER = 3


def moved_far(times: float, since: int = 1) -> Any:
    """Client 3 sends a model that is far away, though finite and within `max_ratio`."""
    from dataclasses import replace

    def change(one: Arrival) -> Arrival:
        assert one.packed is not None
        packed = {}
        for path, item in one.packed.items():
            leaf = from_bytes(item.data, item.shape, item.dtype)
            packed[path] = to_bytes(leaf + times) if path.startswith("model/params") else item
        return replace(one, packed=packed, digest=None)

    def tamper(arrivals: list[Arrival], now: int) -> list[Arrival]:
        return [change(one) if now >= since and one.client == ATTACKER else one for one in arrivals]

    return tamper


def rounds_with(limits: Limits, times: float = 50.0, **options: Any) -> list[Round]:
    return list(run(build("fedavg"), Strangers(moved_far(times), dtype="float64"), rounds=4, seed=1, limits=limits))


def length_of(one: Round, before: Any, client: int) -> float:
    place = int(np.flatnonzero(one.cohort.ids == client)[0])
    pairs = zip(tree.flatten(one.cohort.reply["model"]["params"]).values(), tree.flatten(before["params"]).values())
    return float(torch.stack([(leaf[place] - start).square().sum() for leaf, start in pairs]).sum().sqrt())


def test_a_long_update_is_shortened_to_the_running_median_and_counted() -> None:
    free, bounded = rounds_with(Limits()), rounds_with(Limits(max_growth=2.0))
    assert tiny.same(free[0].model, bounded[0].model) and "clipped_updates" not in bounded[0].cohort.counts
    for before, one in itertools.pairwise(bounded):
        usual = running_median(before.snapshot.lengths)
        assert usual is not None and one.cohort.counts == {"clipped_updates": 1}
        assert length_of(one, before.model, ATTACKER) == pytest.approx(2 * usual)
    assert length_of(free[1], free[0].model, ATTACKER) > 20 * running_median(bounded[0].snapshot.lengths)  # type: ignore[operator]
    assert len(bounded[-1].snapshot.lengths) == 4


def test_an_honest_run_is_the_same_to_the_bit_and_a_resumed_one_too() -> None:
    engine = tiny.engine(dtype="float32")
    plain = list(run(build("fedavg"), engine, rounds=4, seed=1))
    limited = list(run(build("fedavg"), tiny.engine(dtype="float32"), rounds=4, seed=1, limits=Limits(max_growth=5.0)))
    assert all(tiny.same(one.model, other.model) for one, other in zip(plain, limited))
    again = list(
        run(
            build("fedavg"), tiny.engine(dtype="float32"), rounds=4, seed=1, limits=Limits(max_growth=5.0),
            resume=limited[1].snapshot,
        )
    )  # fmt: skip
    assert again[-1].snapshot.lengths == limited[-1].snapshot.lengths and plain[-1].snapshot.lengths == ()


def test_replies_without_a_model_are_left_alone() -> None:
    one = next(run(build("fedavg"), tiny.engine(), rounds=1, seed=1))
    assert median_length(one.cohort, None) is None and running_median([]) is None
    assert median_length(one.cohort, Broadcast(shared={"model": tiny.engine().start()})) == pytest.approx(
        float(np.sort([length_of(one, tiny.engine().start(), client) for client in range(5)])[2])
    )
    assert running_median([5.0, 1.0, 3.0]) == 3.0 and running_median([1.0] * 30 + [9.0] * 20) == 9.0
