"""Row plans: every epoch covers every row once, and a client's plan depends on nobody else."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from consilience.core import plans, rng
from consilience.core.federation import Rows
from consilience.core.plans import Work
from consilience.core.settings import Invalid


def store_of(sizes: list[int]) -> Rows:
    """Row r of the store holds the number r."""
    counts = torch.tensor(sizes)
    numbers = torch.arange(int(counts.sum()))
    return Rows(x=numbers.double().unsqueeze(1), y=numbers, starts=torch.cumsum(counts, 0) - counts, sizes=counts)


def drawn(
    sizes: list[int], work: Work, *, epochs: int = 1, ids: list[int] | None = None, seed: int = 0, round: int = 0
) -> tuple[plans.Plan, Rows]:
    """A plan for whole epochs, clients with most steps first."""
    store = store_of(sizes)
    chosen = np.arange(len(sizes)) if ids is None else np.array(ids)
    steps = epochs * work.steps_per_epoch(store.sizes.numpy()[chosen])
    order = np.lexsort((chosen, -steps))
    return plans.draw(work, store, chosen[order], steps[order], seed=seed, round=round), store


def batches_of(plan: plans.Plan, store: Rows, client: int) -> list[list[int]]:
    """The rows of each of a client's batches."""
    return [plan.single(step, client, store).y.tolist() for step in range(int(plan.steps[client]))]


@given(
    st.lists(st.integers(1, 23), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 1000),
)
def test_every_epoch_covers_every_row_once(
    sizes: list[int], batch_size: int | None, epochs: int, shuffle: bool, seed: int
) -> None:
    work = Work(epochs=epochs, batch_size=batch_size, shuffle=shuffle)
    plan, store = drawn(sizes, work, epochs=epochs, seed=seed)
    ids = sorted(range(len(sizes)), key=lambda k: (-int(work.steps_per_epoch(np.array(sizes))[k]), k))
    for place, client in enumerate(ids):
        start, size = int(store.starts[client]), sizes[client]
        batches = batches_of(plan, store, place)
        per_epoch = len(batches) // epochs
        assert per_epoch == (1 if batch_size is None else -(-size // batch_size))
        for epoch in range(epochs):
            mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert sorted(itertools.chain(*mine)) == list(range(start, start + size))
            width = batch_size or size
            assert [len(b) for b in mine[:-1]] == [width] * (per_epoch - 1)  # only the last batch may be short
            assert len(mine[-1]) == (size - 1) % width + 1


def test_rows_in_order_without_shuffling() -> None:
    plan, store = drawn([3, 5], Work(batch_size=2, shuffle=False))
    assert batches_of(plan, store, 0) == [[3, 4], [5, 6], [7]]
    assert batches_of(plan, store, 1) == [[0, 1], [2]]


def test_full_batch() -> None:
    plan, store = drawn([3, 5], Work(batch_size=None), epochs=2)
    assert plan.steps.tolist() == [2, 2] and plan.width == 5
    assert [sorted(b) for b in batches_of(plan, store, 0)] == [[0, 1, 2]] * 2
    assert plan.live.tolist() == [[3, 5], [3, 5]]


@pytest.mark.parametrize("read", [1, 100, 2**20])
@pytest.mark.parametrize("weighted", [False, True])
def test_batches_read_together_are_those_read_one_by_one(
    read: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "READ_BYTES", read)
    plan, store = drawn([7, 4, 1, 9], Work(batch_size=4), epochs=3)
    store = dataclasses.replace(store, x={"a": store.x, "b": {"c": -store.x}})
    store = dataclasses.replace(store, weight=store.y.double() / 2 if weighted else None)
    for client, steps in enumerate(plan.steps):
        padded = [plan.padded(step, client, store, torch.float64) for step in range(steps)]
        single = [plan.single(step, client, store) for step in range(steps)]
        for cut, expected in ((False, padded), (True, single)):
            found = list(plan.batches(client, store, torch.float64, cut=cut))
            assert len(found) == len(expected)
            for got, wanted in zip(found, expected):
                (ours, form), (theirs, other) = pytree.tree_flatten(got), pytree.tree_flatten(wanted)
                assert form == other
                assert all((a is b is None) or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(ours, theirs))


def test_group_batches_are_the_single_ones_padded() -> None:
    plan, store = drawn([7, 4, 1, 9], Work(batch_size=4), epochs=2)
    for step in range(int(plan.steps.max())):
        active = plan.active(step)
        group = plan.group(step, active, store, torch.float64)
        for client in range(active):
            single = plan.single(step, client, store)
            live = len(single.y)
            assert torch.equal(group.y[client, :live], single.y)
            assert torch.equal(group.x[client, :live], single.x)
            assert int(group.key[client]) == int(single.key)
            assert bool(group.first[client]) == bool(single.first)
            if group.mask is not None:
                assert group.mask[client].tolist() == [1.0] * live + [0.0] * (plan.width - live)
                assert group.mask.dtype == torch.float64
            # padding repeats a row of the same client, so that no foreign row is ever touched
            owner = int(single.y[0])
            assert all(_owner(row, [7, 4, 1, 9]) == _owner(owner, [7, 4, 1, 9]) for row in group.y[client].tolist())


def _owner(row: int, sizes: list[int]) -> int:
    return int(np.searchsorted(np.cumsum(sizes), row, side="right"))


def test_mask_is_left_out_when_every_slot_is_live() -> None:
    plan, store = drawn([8, 4], Work(batch_size=4))
    assert plan.group(0, 2, store, torch.float32).mask is None
    assert plan.full(1, 1) and plan.active(1) == 1
    plan, store = drawn([8, 3], Work(batch_size=4))
    assert plan.group(0, 2, store, torch.float32).mask is not None
    assert plan.group(1, 1, store, torch.float32).mask is None


def test_step_budgets_are_kept() -> None:
    store = store_of([5, 8, 3])
    work = Work(batch_size=2)
    plan = plans.draw(work, store, np.array([1, 2, 0]), np.array([11, 2, 0]), seed=0, round=0)
    assert [plan.active(s) for s in range(11)] == [2, 2] + [1] * 9
    first = batches_of(plan, store, 0)
    assert [len(b) for b in first] == [2] * 11
    assert sorted(itertools.chain(*first[0:4])) == sorted(itertools.chain(*first[4:8])) == list(range(5, 13))
    assert first[0:4] != first[4:8]
    assert batches_of(plan, store, 2) == []


@pytest.mark.parametrize(("clients", "most"), [(3, None), (2, None), (3, 4), (2, 1), (1, 3)])
def test_a_part_of_a_plan_is_the_plan_of_less_work(clients: int, most: int | None) -> None:
    work, ids, steps = Work(batch_size=2), np.array([1, 0, 2]), np.array([8, 6, 3])
    whole = plans.draw(work, store_of([5, 8, 3]), ids, steps, seed=0, round=0)
    less = steps[:clients] if most is None else np.minimum(steps[:clients], most)
    expected = plans.draw(work, store_of([5, 8, 3]), ids[:clients], less, seed=0, round=0)
    part = whole.head(clients, most)
    for field in dataclasses.fields(plans.Plan):
        got, wanted = getattr(part, field.name), getattr(expected, field.name)
        assert got.shape == wanted.shape and (got == wanted).all(), field.name


def test_first_marks_the_start_of_every_epoch() -> None:
    plan, _ = drawn([5, 2], Work(batch_size=2), epochs=2)
    assert plan.first[:, 0].tolist() == [True, False, False, True, False, False]
    assert plan.first[:2, 1].tolist() == [True, True]


def test_epochs_rounds_seeds_and_clients_have_their_own_order() -> None:
    orders = set()
    for seed in range(3):
        for round in range(3):
            plan, store = drawn([12, 12], Work(batch_size=12), epochs=2, seed=seed, round=round)
            for client in range(2):
                for batch in batches_of(plan, store, client):
                    orders.add(tuple(row - client * 12 for row in batch))
    assert len(orders) == 3 * 3 * 2 * 2


def test_keys_differ_per_seed_round_client_and_step() -> None:
    keys: list[int] = []
    for seed in range(3):
        for round in range(3):
            plan, _ = drawn([6, 6, 6], Work(batch_size=2), epochs=2, seed=seed, round=round)
            keys += plan.keys.flatten().tolist()
    assert len(set(keys)) == len(keys) == 3 * 3 * 3 * 6


@given(st.sets(st.integers(0, 5)), st.integers(0, 5), st.one_of(st.none(), st.integers(1, 8)), st.integers(0, 99))
def test_a_clients_plan_depends_on_nobody_else(others: set[int], me: int, batch_size: int | None, seed: int) -> None:
    sizes = [9, 4, 1, 12, 6, 17]
    work = Work(batch_size=batch_size)
    alone, store = drawn(sizes, work, epochs=2, ids=[me], seed=seed, round=4)
    group_ids = sorted(others | {me})
    group, _ = drawn(sizes, work, epochs=2, ids=group_ids, seed=seed, round=4)
    steps = work.steps_per_epoch(np.array(sizes)[group_ids])
    place = [group_ids[i] for i in np.lexsort((np.array(group_ids), -steps))].index(me)
    assert batches_of(group, store, place) == batches_of(alone, store, 0)
    todo = int(alone.steps[0])
    assert torch.equal(group.keys[:todo, place], alone.keys[:todo, 0])
    assert torch.equal(group.first[:todo, place], alone.first[:todo, 0])


def test_golden_plan() -> None:
    """The batches of a recorded run must stay what they were."""
    plan, store = drawn([7, 5], Work(batch_size=3), seed=11, round=2)
    assert batches_of(plan, store, 0) == [[4, 3, 1], [2, 6, 0], [5]]
    expected = rng.fold(rng.fold(rng.key(11, "plan", 2), torch.tensor(0)), 2**32 + 1)
    assert int(plan.keys[1, 0]) == int(expected)


def test_empty_clients_have_no_steps() -> None:
    work = Work(batch_size=4)
    assert work.steps_per_epoch(np.array([0, 1, 4, 5])).tolist() == [0, 1, 1, 2]
    assert Work(batch_size=None).steps_per_epoch(np.array([0, 7])).tolist() == [0, 1]
    plan, store = drawn([0, 3], work)
    assert plan.steps.tolist() == [1, 0] and batches_of(plan, store, 1) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "Work.batch_size = 0 is out of range: it must be >= 1"),
        ({"epochs": 0}, "Work.epochs = 0.0 is out of range: it must be > 0"),
        ({"batch_size": 2.5}, "Work.batch_size = 2.5 must be a whole number, not float"),
        ({"shuffle": 1}, "Work.shuffle = 1 must be true or false, not int"),
        ({"rows": "tset"}, r"Work.rows = 'tset' is not one of train, test, validation \(did you mean 'test'\?\)"),
    ],
)
def test_bad_work_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Work(**wrong)  # type: ignore[arg-type]
