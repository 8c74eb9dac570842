"""Replies and memories in Ray's object store, as tensors that are fetched on read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.remote import RemoteTensor
from consilience.core.tree import Tree
from consilience.engines.ray.transfer import RemoteLeaf, WorkerReplies, packed, unpacked
from consilience.engines.ray.worker import in_client_order
from consilience.stores.client_rows import NOWHERE, ClientRows

_CPU = torch.device("cpu")
Reduce = Callable[[int, Callable[[], tuple[Any, ...]]], Callable[[], list[Any]]]
"""(shard, the arguments of a worker's `reduce` as they are then) -> how to wait for what it returns."""
Repeat = Callable[[int], list[Any]]
"""Recomputes the shards of a worker, given its position among the replies."""
REPEATS = 10  # machine losses tolerated while the replies of one exchange are read


class RemoteReplies:
    """The replies of one exchange, in shards: object `shards[w][s]` holds worker w's rows of the tensors of shard s."""

    def __init__(
        self,
        number: int,
        replies: Sequence[WorkerReplies],
        ids: Sequence[np.ndarray],
        shards: Sequence[Sequence[Any]],
        device: torch.device,
        reduce: Reduce,
        repeat: Repeat,
    ) -> None:
        self.number, self._device, self._reduce, self._repeat = number, device, reduce, repeat
        self._shards = [list(some) for some in shards]
        joined = np.concatenate(list(ids))
        self.back = np.argsort(joined)  # from the order of workers to that of clients
        owner = np.repeat(np.arange(len(ids)), [len(some) for some in ids])
        row = np.concatenate([np.arange(len(some)) for some in ids])
        self.owner, self.row = owner[self.back], row[self.back]  # [m] by client
        self.tree: Tree = tree.map_leaves(self._leaf, *(some.reply for some in replies))

    def _leaf(self, *parts: Any) -> Tensor:
        """One tensor of the replies [m, ...], from each worker's part of it."""
        if not isinstance(parts[0], RemoteLeaf):
            return in_client_order([unpacked(part, self._device) for part in parts], self.back)
        lengths = np.concatenate([part.lengths for part in parts])[self.back]
        source = _ReplyRows(self, parts[0], lengths)
        return RemoteTensor(source, np.arange(len(self.back)), parts[0].shape, parts[0].dtype, self._device)

    def fetch(self, left: RemoteLeaf, rows: np.ndarray) -> Tensor:
        """[n, ...] some rows of a tensor, from the workers that made them."""
        import ray

        wanted = np.unique(self.owner[rows])
        read = self._again(lambda: ray.get([self._shards[w][left.shard] for w in wanted]))
        held = dict(zip(wanted.tolist(), read))
        parts, places = [], np.empty(len(rows), dtype=np.int64)
        for worker in wanted.tolist():
            mine = np.flatnonzero(self.owner[rows] == worker)
            parts.append(unpacked(held[worker][left.path], _CPU)[torch.from_numpy(self.row[rows[mine]])])
            places[mine] = sum(map(len, parts[:-1])) + np.arange(len(mine))
        return in_client_order(parts, places)

    def begin(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], given: tuple[Any, ...]
    ) -> Callable[[], list[Any]]:
        """Start the calls, each with the worker whose shard its tensor is in."""
        by_shard: dict[int, list[int]] = {}
        for number, (leaf, *_) in enumerate(calls):
            by_shard.setdefault(leaf.source.left.shard, []).append(number)
        given = tuple(packed(value) for value in given)
        waiting = []
        for shard, numbers in by_shard.items():
            asked = [_call(*calls[number], total=len(self.back)) for number in numbers]
            begin = functools.partial(self._begin, shard, function, asked, given)
            waiting.append((numbers, begin, begin()))

        def finish() -> list[Any]:
            found: dict[int, Any] = {}
            for numbers, begin, wait in waiting:
                values = self._again(wait, functools.partial(_finished, begin))
                found.update(zip(numbers, (unpacked(value, self._device) for value in values)))
            return [found[number] for number in range(len(calls))]

        return finish

    def _begin(self, shard: int, function: Any, asked: list[Any], given: tuple[Any, ...]) -> Callable[[], list[Any]]:
        def arguments() -> tuple[Any, ...]:
            return (function, asked, given, self.number, self.back, *(some[shard] for some in self._shards))

        return self._reduce(shard, arguments)

    def _again(self, first: Callable[[], Any], then: Callable[[], Any] | None = None) -> Any:
        """Read shards; those lost with a machine are recomputed, and `then` reads all again."""
        from ray.exceptions import ObjectLostError

        read = first
        for _ in range(REPEATS):
            try:
                return read()
            except ObjectLostError as problem:
                self._make_again(str(problem.object_ref_hex))
                read = then or first
        return read()

    def _make_again(self, lost: str) -> None:
        """The shards of the worker to whom an object belonged; of all, where that is not known."""
        mine = [place for place, some in enumerate(self._shards) if any(shard.hex() == lost for shard in some)]
        for place in mine or range(len(self._shards)):
            self._shards[place] = self._repeat(place)


def _finished(begin: Callable[[], Callable[[], list[Any]]]) -> list[Any]:
    return begin()()


def _call(leaf: RemoteTensor, *others: Any, total: int) -> tuple[str, np.ndarray | None, tuple[Any, ...]]:
    source: Any = leaf.source
    assert leaf.rows is not None
    everyone = len(leaf.rows) == total and bool((leaf.rows == np.arange(total)).all())
    return source.left.path, None if everyone else leaf.rows, tuple(packed(value) for value in others)


class _ReplyRows:
    """One tensor of an exchange's replies."""

    lasting = False  # they are dropped at the next exchange

    def __init__(self, place: RemoteReplies, left: RemoteLeaf, lengths: np.ndarray) -> None:
        self.place, self.left, self.lengths = place, left, lengths

    def fetch(self, rows: np.ndarray) -> Tensor:
        """[n, ...] these rows."""
        return self.place.fetch(self.left, rows)


class ObjectStorage:
    """Clients' memories in Ray's object store, as copies that outlive the workers: a slot is an object and a row of it.

    Objects belong to the driver; one that no slot refers to any more is freed.
    """

    def __init__(self, first: Tree, device: torch.device) -> None:
        self._first, self.device = first, device  # [1, ...], the initial memory
        self.initial: Tree = tree.rows(first, 0)
        self._held: dict[int, tuple[Any, int]] = {}
        self._next = 0

    @staticmethod
    def table(memory: Tree, device: torch.device) -> ClientRows:
        """Saved memories, in the object store."""
        known = ClientRows.of(memory)
        if known is None:
            first = tree.to(tree.take(memory, np.zeros(1, dtype=np.int64)), device)
            return ClientRows.dense(memory, ObjectStorage(first, device))
        if isinstance(known.storage, ObjectStorage):
            return known
        initial = tree.shaped_like(memory, tree.flatten(known.initial))  # with its empty subtrees
        return known.copied(ObjectStorage(tree.to(tree.repeat(initial, 1), device), device))

    def fresh(self) -> ObjectStorage:
        """An empty storage of this kind."""
        return ObjectStorage(self._first, self.device)

    def put(self, rows: Any, count: int) -> np.ndarray:
        """Refer to [m] (object, row), or store [m, ...] rows as one object."""
        if isinstance(rows, dict):
            import ray

            lying = ray.put(packed(rows))
            rows = [(lying, row) for row in range(count)]
        slots = np.arange(self._next, self._next + count)
        self._held.update(zip(slots.tolist(), rows))
        self._next += count
        return slots

    def get(self, slots: np.ndarray) -> Tree:
        """[m, ...] the rows of these slots."""
        flat = {path: self.column(slots, path) for path in tree.flatten(self.initial)}
        return tree.shaped_like(self.initial, flat)

    def column(self, slots: np.ndarray, path: str) -> Tensor:
        """[m, ...] one tensor of these rows."""
        import ray

        places, objects = self.places(slots)
        held = [unpacked(tree.flatten(found)[path], _CPU) for found in ray.get(objects)]
        initial = tree.flatten(self.initial)[path].cpu()
        rows = [initial if which < 0 else held[which][row] for which, row in places.tolist()]
        stacked = torch.stack(rows) if rows else initial.new_empty((0, *initial.shape))
        return stacked.to(self.device)

    def places(self, slots: np.ndarray) -> tuple[np.ndarray, list[Any]]:
        """([m, 2] which object and which row, the objects) of some slots; no object: -1."""
        found = [self._held.get(slot, (None, 0)) for slot in slots.tolist()]
        distinct = {id(lying): lying for lying, _ in found if lying is not None}
        number = {key: place for place, key in enumerate(distinct)}
        places = [(number.get(id(lying), NOWHERE), row) for lying, row in found]
        return np.array(places, dtype=np.int64).reshape(-1, 2), list(distinct.values())

    def release(self, slots: np.ndarray) -> None:
        """Free slots."""
        for slot in slots.tolist():
            self._held.pop(slot, None)
