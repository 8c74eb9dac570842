"""Replies and memories that stay in Ray's object store, as tensors that are fetched when something reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.remote import RemoteRows, RemoteTensor
from consilience.core.tree import Tree
from consilience.engines.ray.transfer import RemoteLeaf, WorkerReplies, packed, unpacked
from consilience.engines.ray.worker import in_client_order

_CPU = torch.device("cpu")
Reduce = Callable[[int, tuple[Any, ...]], Callable[[], list[Any]]]
"""(worker, arguments of its `reduce`) -> how to wait for what it returns."""


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
    ) -> None:
        self.number, self._shards, self._device, self._reduce = number, shards, device, reduce
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
        held = dict(zip(wanted.tolist(), ray.get([self._shards[w][left.shard] for w in wanted])))
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
            arguments = (function, asked, given, self.number, self.back, *(some[shard] for some in self._shards))
            waiting.append((numbers, self._reduce(shard, arguments)))

        def finish() -> list[Any]:
            found: dict[int, Any] = {}
            for numbers, wait in waiting:
                found.update(zip(numbers, (unpacked(value, self._device) for value in wait())))
            return [found[number] for number in range(len(calls))]

        return finish


def _call(leaf: RemoteTensor, *others: Any, total: int) -> tuple[str, np.ndarray | None, tuple[Any, ...]]:
    source: Any = leaf.source
    everyone = len(leaf.rows) == total and bool((leaf.rows == np.arange(total)).all())
    return source.left.path, None if everyone else leaf.rows, tuple(packed(value) for value in others)


class _ReplyRows:
    """One tensor of an exchange's replies."""

    def __init__(self, place: RemoteReplies, left: RemoteLeaf, lengths: np.ndarray) -> None:
        self.place, self.left, self.lengths = place, left, lengths

    def fetch(self, rows: np.ndarray) -> Tensor:
        """[n, ...] these rows."""
        return self.place.fetch(self.left, rows)


class RemoteMemories:
    """Where every client's latest memory lies: the worker has it, and the object store a copy that outlives the worker.

    Objects belong to the driver; one that no client's latest memory lies in any more is freed.
    """

    def __init__(self, template: Tree, objects: Sequence[Any], rows: np.ndarray, device: torch.device) -> None:
        self._template, self._device = template, device  # [1, ...], for its structure
        self._objects, self._rows = list(objects), rows.copy()  # [K] which object, and which of its rows

    def keep(self, ids: np.ndarray, objects: Sequence[Any]) -> None:
        """New memories of these clients, in an object each."""
        for client, found in zip(ids.tolist(), objects):
            self._objects[client] = found
        self._rows[ids] = 0

    def of(self, ids: np.ndarray) -> tuple[np.ndarray, list[Any]]:
        """([k, 2] which object and which row, the objects) for some clients."""
        distinct = {id(self._objects[client]): self._objects[client] for client in ids.tolist()}
        number = {key: place for place, key in enumerate(distinct)}
        which = [number[id(self._objects[client])] for client in ids.tolist()]
        return np.stack([np.array(which, dtype=np.int64), self._rows[ids]], 1), list(distinct.values())

    def recall(self) -> Tree:
        """All memories as they are now, stacked [K, ...]; they are fetched when something reads them."""
        everyone = np.arange(len(self._objects))
        then = RemoteMemories(self._template, self._objects, self._rows, self._device)

        def leaf(path: str, one: Tensor) -> RemoteTensor:
            source: RemoteRows = _MemoryRows(then, path)
            return RemoteTensor(source, everyone, one.shape[1:], one.dtype, self._device)

        return tree.unflatten({path: leaf(path, one) for path, one in tree.flatten(self._template).items()})

    def fetch(self, path: str, clients: np.ndarray) -> Tensor:
        """[n, ...] one tensor of these clients' memories."""
        import ray

        places, objects = self.of(clients)
        held = [unpacked(tree.flatten(found)[path], _CPU) for found in ray.get(objects)]
        return torch.stack([held[which][row] for which, row in places.tolist()])


class _MemoryRows:
    """One tensor of all clients' memories."""

    place = None
    lengths = None

    def __init__(self, memories: RemoteMemories, path: str) -> None:
        self._memories, self._path = memories, path

    def fetch(self, rows: np.ndarray) -> Tensor:
        """[n, ...] these clients'."""
        return self._memories.fetch(self._path, rows)
