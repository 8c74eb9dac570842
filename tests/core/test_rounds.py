"""The only loop, seen from outside, with parts small enough to follow by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from consilience.algorithms.fedavg import fedavg
from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.exchange import Broadcast, Cohort, Pool
from consilience.core.protocols import Channel, ClientRule, Selection, ServerRule
from consilience.core.rounds import Diverged, Round, run
from consilience.core.screening import screen_replies
from consilience.environments.environment import Environment
from consilience.selection import Everyone, SlidingWindow, Uniform


def cohort_of(values: list[float], **more: Any) -> Cohort:
    """One-number models."""
    count = len(values)
    return Cohort(
        reply={"model": {"params": {"w": torch.tensor(values).unsqueeze(1)}, "buffers": {}}},
        ids=np.arange(count),
        examples=torch.arange(1, count + 1, dtype=torch.float64),
        steps=np.ones(count, dtype=np.int64),
        round=0,
        **more,
    )


def test_screen_drops_and_counts() -> None:
    kept = screen_replies(cohort_of([1.0, float("nan"), 3.0, float("inf")], counts={"silent": 2}))
    assert kept.ids.tolist() == [0, 2] and kept.examples.tolist() == [1, 3] and kept.steps.tolist() == [1, 1]
    assert kept.reply["model"]["params"]["w"].flatten().tolist() == [1, 3]
    assert kept.counts == {"silent": 2, "nonfinite": 2}


def test_screen_of_a_sound_or_empty_cohort_changes_nothing() -> None:
    sound = cohort_of([1.0, 2.0])
    assert screen_replies(sound) is sound
    nobody = Cohort(
        reply={}, ids=np.array([], dtype=np.int64), examples=torch.zeros(0), steps=np.array([], dtype=np.int64), round=0
    )
    assert screen_replies(nobody) is nobody


def test_broadcast_bytes() -> None:
    sent = Broadcast(shared={"a": torch.zeros(3)}, personal={"b": torch.zeros(2, 4)})
    assert sent.nbytes(2) == 2 * 12 + 32


def test_pool_candidates() -> None:
    pool = Pool(sizes=np.array([3, 0, 5, 1]), losses=np.zeros(4), available=np.array([True, True, False, True]))
    assert pool.candidates.tolist() == [0, 3] and len(pool) == 4


def test_parts_are_what_the_protocols_ask_for() -> None:
    algorithm = fedavg()
    assert isinstance(algorithm.selection, Selection) and isinstance(algorithm.client, ClientRule)
    assert isinstance(algorithm.channel, Channel) and isinstance(algorithm.server, ServerRule)
    assert algorithm == fedavg() and algorithm != fedavg(lr=0.5)


def test_rounds_are_numbered_from_one_and_lazy() -> None:
    rounds = run(fedavg(batch_size=4), tiny.engine(), rounds=10**9)
    assert [next(rounds).number for _ in range(3)] == [1, 2, 3]


def test_a_given_start_model_is_used() -> None:
    start = tree.map_leaves(torch.ones_like, tiny.engine().start())
    (one,) = run(fedavg(batch_size=4), tiny.engine(environment=Environment(steps=(0,) * 5)), rounds=1, start=start)
    assert tiny.gap(one.model, start) <= 1e-12


def test_a_finished_run_resumes_to_nothing() -> None:
    *_, last = run(fedavg(batch_size=4), tiny.engine(), rounds=2)
    assert list(run(fedavg(batch_size=4), tiny.engine(), rounds=2, resume=last.snapshot)) == []


def test_losses_are_those_last_reported() -> None:
    """Not yet heard: NaN; chosen: the mean loss of its batches; not chosen: what it was."""
    rounds = list(run(fedavg(batch_size=4, selection=Uniform(count=2)), tiny.engine(), rounds=3, seed=5))
    known = np.full(5, np.nan)
    for one in rounds:
        known[one.cohort.ids] = one.cohort.reply["loss"].numpy()
        np.testing.assert_array_equal(one.snapshot.losses, known)
    assert np.isnan(rounds[0].snapshot.losses).sum() == 3


def test_the_first_loss_of_a_full_batch_is_the_start_models() -> None:
    data = tiny.federation((6, 3))
    engine = tiny.engine(data=data)
    (one,) = run(fedavg(batch_size=None), engine, rounds=1)
    for client in range(2):
        x, y = data.train.of(client)
        expected = torch.nn.functional.cross_entropy(tiny.mlp().double()(x), y).item()
        assert one.snapshot.losses[client] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "environment",
    [
        Environment(communication=(1.0, 0.0, 1.0, 1.0, 1.0), silent="broadcast_model"),
        Environment(steps=(2, 0, 2, 2, 2)),
    ],
    ids=["broadcast_model", "no steps"],
)
def test_a_client_that_did_not_train_reports_no_loss(environment: Environment) -> None:
    (one,) = run(fedavg(batch_size=4), tiny.engine(environment=environment), rounds=1)
    assert np.isnan(one.snapshot.losses[1]) and np.isfinite(one.snapshot.losses[[0, 2, 3, 4]]).all()


def test_broadcast_models_of_silent_clients_are_not_counted_as_bytes_sent() -> None:
    dead = Environment(communication=0.0, silent="broadcast_model")
    (one,) = run(fedavg(batch_size=4), tiny.engine(environment=dead), rounds=1)
    assert one.cohort.counts == {"silent": 5} and one.bytes_up == 0


# --- a run that goes wrong -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spoil:
    """A channel that turns the replies of some rounds into NaN."""

    rounds: tuple[int, ...] = field(default=())

    def init(self, start: tree.Tree) -> tree.Tree:
        return {}

    def encode(
        self, reply: tree.Tree, message: tree.Tree, memory: tree.Tree, key: Tensor
    ) -> tuple[tree.Tree, tree.Tree]:
        bad = torch.isin(message["round"], torch.tensor(self.rounds, dtype=torch.int64))
        spoilt = tree.map_leaves(lambda v: torch.where(bad, torch.nan, v) if v.is_floating_point() else v, reply)
        return spoilt, memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        return cohort


def test_bad_rounds_in_a_row_stop_the_run_with_the_model_unchanged() -> None:
    seen: list[Round] = []
    with pytest.raises(Diverged, match=r"3 rounds in a row, up to round 5, .*5 nonfinite.*lower the learning rate"):
        for one in run(fedavg(batch_size=4, channel=Spoil(rounds=(2, 3, 4))), tiny.engine(), rounds=9):
            seen.append(one)
    assert [one.number for one in seen] == [1, 2, 3, 4, 5]  # the bad rounds are reported, too
    assert [one.snapshot.bad_rounds for one in seen] == [0, 0, 1, 2, 3]
    for one in seen[2:]:
        assert tiny.same(one.snapshot.server, seen[1].snapshot.server)
        assert one.cohort.counts == {"nonfinite": 5} and one.notes == {}


def test_a_good_round_forgives() -> None:
    spoilt = fedavg(batch_size=4, channel=Spoil(rounds=(0, 1, 3, 4)))
    rounds = list(run(spoilt, tiny.engine(), rounds=6))
    assert [one.snapshot.bad_rounds for one in rounds] == [1, 2, 0, 1, 2, 0]


def test_max_bad_rounds_counts_over_a_resume() -> None:
    spoilt = fedavg(batch_size=4, channel=Spoil(rounds=(1, 2, 3)))
    rounds = run(spoilt, tiny.engine(), rounds=9)
    held = [next(rounds) for _ in range(3)][-1].snapshot
    assert held.bad_rounds == 2
    with pytest.raises(Diverged, match="up to round 4"):
        list(run(spoilt, tiny.engine(), rounds=9, resume=held))
    with pytest.raises(Diverged, match="1 rounds in a row, up to round 2"):
        list(run(spoilt, tiny.engine(), rounds=9, max_bad_rounds=1))


def test_nobody_available_is_explained() -> None:
    engine = tiny.engine(environment=Environment(availability=0.0))
    for selection in (Everyone(), Uniform(count=2), SlidingWindow()):
        with pytest.raises(Diverged, match="no client was available"):
            list(run(fedavg(batch_size=4, selection=selection), engine, rounds=9))


def test_silence_is_explained() -> None:
    engine = tiny.engine(environment=Environment(communication=0.0))
    with pytest.raises(Diverged, match=r"\(5 silent\).*check the environment"):
        list(run(fedavg(batch_size=4), engine, rounds=9))


# --- a selection that does not keep to the rules ---------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """Always these ids, in this order."""

    ids: tuple[int, ...]

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        return np.array(self.ids)


def run_with(ids: tuple[int, ...]) -> Round:
    algorithm = Algorithm(
        selection=Fixed(ids), client=fedavg(batch_size=4).client, server=fedavg().server, channel=Plain()
    )
    (one,) = run(algorithm, tiny.engine(), rounds=1)
    return one


def test_a_selection_that_forgets_to_sort_gives_the_same_bits() -> None:
    expected = run_with((0, 1, 3, 4))
    for order in ((4, 3, 1, 0), (3, 0, 4, 1)):
        got = run_with(order)
        assert got.cohort.ids.tolist() == [0, 1, 3, 4]
        assert tiny.same(got.model, expected.model)


def test_a_client_chosen_twice_counts_once() -> None:
    got = run_with((0, 1, 1))
    assert got.cohort.ids.tolist() == [0, 1]
    assert tiny.same(got.model, run_with((0, 1)).model)
