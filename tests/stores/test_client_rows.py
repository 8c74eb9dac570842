"""Rows of clients in versions: equal to a plain array that is copied at every change, wherever the rows lie."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from consilience.core import tree
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector
from consilience.stores.block_storage import BlockStorage, placed, table_of
from consilience.stores.client_rows import ClientRows
from consilience.stores.row_blocks import RowPlace

CPU = torch.device("cpu")
CLIENTS = 40


def row() -> Tree:
    """Several types, an empty tensor, an empty subtree, and a length that is no multiple of a word."""
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "flags": torch.tensor([True, False, True])},
        "none": {},
        "count": torch.tensor(7),
        "half": torch.ones(5, dtype=torch.float16),
        "empty": torch.empty(0, 4),
    }


def rows_of(chance: np.random.Generator, count: int) -> Tree:
    def drawn(leaf: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(chance.integers(0, 9, (count, *leaf.shape))).to(leaf.dtype)

    return tree.map_leaves(drawn, row())


@pytest.mark.parametrize("kind", ["auto", "device", "host", "file"])
def test_every_version_is_what_a_copied_array_would_be(
    kind: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consilience.stores.block_storage.BLOCK_BYTES", 7 * 96)  # several blocks
    storage = BlockStorage(row(), CPU, RowPlace(kind, tmp_path), CLIENTS)  # type: ignore[arg-type]
    table, dense = ClientRows(storage, CLIENTS), tree.repeat(row(), CLIENTS)
    kept, chance = [(table, dense)], np.random.default_rng(0)
    for step in range(60):
        ids = np.sort(chance.choice(CLIENTS, chance.integers(0, 9), replace=False))
        new = rows_of(chance, len(ids))
        table = table.write(ids, new)
        where = torch.from_numpy(ids)
        dense = tree.map_leaves(lambda old, fresh, where=where: old.index_copy(0, where, fresh), dense, new)
        kept = [*kept[-6:], (table, dense)] if step % 3 else [*kept[:2], (table, dense)]
        for then, expected in kept:
            some = chance.choice(CLIENTS, 11)
            assert tiny.same(then.read(some), tree.take(expected, some))
        assert tiny.same(tree.clone(table.tree()), dense) and list(table.tree()) == list(row())
    assert storage.nbytes.keys() == {"host" if kind == "auto" else kind}


def test_rows_that_no_version_needs_are_taken_again() -> None:
    storage = BlockStorage(row(), CPU, clients=CLIENTS)
    table, chance = ClientRows(storage, CLIENTS), np.random.default_rng(1)
    for _ in range(200):
        table = table.write(np.arange(20), rows_of(chance, 20))
        assert len(table.tree()["count"]) == CLIENTS  # which keeps nothing alive
        assert set(np.unique(table.slots(np.arange(20)))) <= set(range(40))  # this version's, and those of the last
    assert len(storage._free) == len(storage.kinds) * storage._rows_per_block - 20


def test_writing_to_an_older_version_leaves_the_newer_ones_alone() -> None:
    chance = np.random.default_rng(2)
    first = ClientRows(BlockStorage(row(), CPU, clients=5), 5).write(np.array([1, 3]), rows_of(chance, 2))
    before = tree.clone(first.tree())
    second = first.write(np.array([3]), rows_of(chance, 1))
    after = tree.clone(second.tree())
    branch = first.write(np.array([0]), rows_of(chance, 1))
    assert tiny.same(tree.clone(first.tree()), before) and tiny.same(tree.clone(second.tree()), after)
    assert tiny.same(branch.read(np.array([1, 3])), first.read(np.array([1, 3])))
    assert branch.written().tolist() == [0, 1, 3]


def test_rows_that_are_not_like_the_first_are_refused_and_change_nothing() -> None:
    table = ClientRows(BlockStorage({"w": torch.zeros(3)}, CPU, clients=4), 4)
    for wrong in ({"w": torch.zeros(2, 4)}, {"w": torch.zeros(2, 3).double()}, {"v": torch.zeros(2, 3)}):
        with pytest.raises(TypeError):
            table.write(np.array([0, 1]), wrong)
    assert not len(table.written()) and not table.read(np.arange(4))["w"].any()


def test_a_tree_finds_its_rows_again_and_moves_with_them() -> None:
    chance = np.random.default_rng(3)
    table = ClientRows(BlockStorage(row(), CPU, clients=6), 6).write(np.array([2]), rows_of(chance, 1))
    assert ClientRows.of(table.tree()) is table and table_of(table.tree()) is table
    assert ClientRows.of({}) is None and ClientRows.of(tree.clone(table.tree())) is None
    copy = table_of(tree.clone(table.tree())).write(np.array([0]), rows_of(chance, 1))
    assert tiny.same(copy.read(np.array([2])), table.read(np.array([2])))
    assert placed({"z": table.tree(), "w": torch.ones(2)}, CPU)["z"]["count"][2] == table.read(np.array([2]))["count"]


def test_a_vector_is_what_a_copied_array_would_be() -> None:
    chance = np.random.default_rng(4)
    vector, dense = ClientVector.filled(30, np.nan, np.float64), np.full(30, np.nan)
    kept, marks = [], []
    for _ in range(50):
        ids = chance.choice(30, chance.integers(0, 6), replace=False)
        values = chance.random(len(ids))
        marks.append((vector.mark, dense))
        vector, dense = vector.write(ids, values), dense.copy()
        dense[ids] = values
        kept.append((vector, dense))
    for then, expected in kept:
        some = chance.choice(30, 12)
        np.testing.assert_array_equal(then[some], expected[some])
        np.testing.assert_array_equal(then, expected)
        np.testing.assert_array_equal(then[3:9], expected[3:9])
        assert then.written().tolist() == np.flatnonzero(np.isfinite(expected)).tolist()
    for mark, before in marks:
        changed = vector.changed_since(mark)
        assert changed is not None
        differing = ~((before == dense) | (np.isnan(before) & np.isnan(dense)))
        assert set(np.flatnonzero(differing)) <= set(changed.tolist())
    assert ClientVector(dense, np.nan).changed_since(vector.mark) is None
