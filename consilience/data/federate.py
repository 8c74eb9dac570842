"""From a data set and a partition to a federation: each client's test rows follow its training distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from consilience.core import tree
from consilience.core.federation import Federation, Rows, numbered_names
from consilience.core.rng import host
from consilience.core.settings import Invalid
from consilience.data.dataset import Dataset, Texts
from consilience.data.partition.apportion import by_owner
from consilience.data.partition.assignment import Partition, assign
from consilience.data.partition.shifts import Shift, apply


def federate(dataset: Dataset, partition: Partition, *, seed: int) -> tuple[Federation, list[np.ndarray]]:
    """Partition a data set over clients; also returns the training rows of each, for the record.

    Test rows go to clients of the same natural group where the partition keeps groups, and otherwise class by
    class in proportion to the clients' training rows. Test rows that match no client come last, without feature shift.
    """
    if isinstance(dataset.x, Texts):
        raise Invalid(
            f"the rows of {dataset.name!r} are texts: tokenise them first, with "
            "cs.tokenized(data, model.tokenization), or load the data with features='words' or 'ngrams'"
        )
    labels = dataset.y.numpy(force=True)
    groups = None if dataset.groups is None else dataset.groups.numpy(force=True)
    assigned = assign(partition, labels, groups=groups, seed=seed)
    owners = _all_known(assigned.owners)
    train = Rows.gather(dataset.x, dataset.y, assigned.parts, weight=dataset.weights)
    test = None
    if len(dataset.test_y):
        alike = _test_parts(dataset, assigned.parts, owners, host(seed, "test rows"))
        test = Rows.gather(dataset.test_x, dataset.test_y, alike, keep_rest=True)
        test = _shifted(test, assigned.shifts, seed, "test shift")
    federation = Federation(
        train=_shifted(train, assigned.shifts, seed, "training shift"),
        test=test,
        names=_names(owners, dataset.group_names, len(assigned.parts)),
        classes=dataset.classes,
        label_names=dataset.label_names,
    )
    return federation, assigned.parts


def _all_known(owners: Sequence[int | None]) -> np.ndarray | None:
    """The natural group of every client, [K], or None when some client has no one group."""
    known = [owner for owner in owners if owner is not None]
    return np.array(known, dtype=np.int64) if len(known) == len(owners) else None


def _names(owners: np.ndarray | None, group_names: tuple[str, ...], clients: int) -> Sequence[str]:
    """Group names, numbered where several clients share a group; without groups 0, 1, 2, ..."""
    if owners is None:
        return numbered_names(clients)
    sharing = {int(group): int(count) for group, count in zip(*np.unique(owners, return_counts=True))}
    seen: dict[int, int] = {}
    names = []
    for group in map(int, owners):
        name = group_names[group] if 0 <= group < len(group_names) else str(group)
        names.append(f"{name}-{seen.get(group, 0)}" if sharing[group] > 1 else name)
        seen[group] = seen.get(group, 0) + 1
    return tuple(names)


def _test_parts(
    dataset: Dataset, parts: list[np.ndarray], owners: np.ndarray | None, rng: np.random.Generator
) -> list[np.ndarray]:
    """Test rows per client: by group where both clients and test rows have one, else by class alone."""
    train_classes, test_classes = _class_numbers(dataset)
    clients = len(parts)
    owner = np.full(len(test_classes), -1, dtype=np.int64)
    if owners is None or dataset.test_groups is None:
        owner = _owners_alike(train_classes, parts, test_classes, rng)
    else:
        test_groups = dataset.test_groups.numpy(force=True)
        by_group = by_owner(*_compact(test_groups, owners))
        for rows, members in zip(by_group, _members(owners)):
            of_members = [parts[k] for k in members]
            local = _owners_alike(train_classes, of_members, test_classes[rows], rng, fallback=True)
            owner[rows] = np.where(local < 0, -1, members[local])
    return by_owner(owner, np.arange(len(owner)), clients)


def _compact(test_groups: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """For `by_owner`: the index of each test row's group among the clients' groups (-1: not among them)."""
    groups = np.unique(owners)
    place = np.searchsorted(groups, test_groups)
    known = groups[np.minimum(place, len(groups) - 1)] == test_groups
    return np.where(known, place, -1), np.arange(len(test_groups)), len(groups)


def _members(owners: np.ndarray) -> list[np.ndarray]:
    """The clients of each group, groups ascending."""
    _, counts = np.unique(owners, return_counts=True)
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])


def _class_numbers(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Training and test classes numbered from 0; one class for all when targets are not class numbers."""
    if dataset.classes is None or dataset.y.dim() != 1:
        return np.zeros(len(dataset.y), dtype=np.int64), np.zeros(len(dataset.test_y), dtype=np.int64)
    train, test = dataset.y.numpy(force=True), dataset.test_y.numpy(force=True)
    _, numbers = np.unique(np.concatenate([train, test]), return_inverse=True)
    return numbers[: len(train)], numbers[len(train) :]


def _owners_alike(
    train: np.ndarray,
    parts: list[np.ndarray],
    test: np.ndarray,
    rng: np.random.Generator,
    *,
    fallback: bool = False,
) -> np.ndarray:
    """The client of each test row: class c is cut in proportion to training rows of class c.

    A class that no client trains on gets -1 or, with `fallback`, is cut in proportion to client sizes.
    """
    sizes = np.array([len(part) for part in parts])
    holder = np.repeat(np.arange(len(parts)), sizes)
    held_classes = train[np.concatenate(parts)]
    owner = np.full(len(test), -1, dtype=np.int64)
    for c in np.unique(test):
        held = np.bincount(holder[held_classes == c], minlength=len(parts))
        if fallback and held.sum() == 0:
            held = sizes
        if held.sum() > 0:
            rows = rng.permutation(np.flatnonzero(test == c))
            owner[rows] = np.repeat(np.arange(len(parts)), _cut(len(rows), held, rng))
    return owner


def _cut(rows: int, held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Split `rows` in proportion to `held`: each share rounded up or down, and exact in expectation.

    All cuts are shifted by one random offset: with many small clients, rounding to the nearest would leave the same
    clients without test rows in every class.
    """
    total = int(held.sum())
    edges = (np.cumsum(held, dtype=np.int64) * rows + int(rng.integers(total))) // total
    return np.diff(edges, prepend=0)


def _shifted(rows: Rows, shifts: Sequence[tuple[Shift, ...]], seed: int, purpose: str) -> Rows:
    """The features after each client's feature shifts."""
    if not any(shifts):
        return rows
    if rows.is_stored:
        raise Invalid("the partition changes features, and these stay in files: read them all, data.rows = 'memory'")
    x = rows.x  # indexing has copied the rows already: changed in place
    for client, todo in enumerate(shifts):
        start, size = int(rows.starts[client]), int(rows.sizes[client])
        own = slice(start, start + size)
        for i, shift in enumerate(todo if size else ()):
            changed = apply(shift, tree.rows(x, own), host(seed, purpose, client, i))
            tree.map_leaves(lambda leaf, new, own=own: leaf[own].copy_(new), x, changed)
    return replace(rows, x=x)
