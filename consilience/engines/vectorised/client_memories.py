"""What clients remember between rounds, as rows of one store."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.protocols import Channel, ClientRule
from consilience.core.tree import Tree
from consilience.engines.vectorised.program import memories
from consilience.engines.workload import Workload
from consilience.stores.block_storage import BlockStorage
from consilience.stores.client_rows import ClientRows
from consilience.stores.row_blocks import RowPlace


class Untested(NamedTuple):
    """What was stored before the device had computed whether it is finite."""

    finite: Tensor  # [] whether all of it is
    values: Tree  # stacked [m, ...], with the replies
    before: ClientRows
    ids: np.ndarray  # [m] places of the clients
    heard: np.ndarray  # those among them whose values were stored


class ClientMemories:
    """The memories of `clients` clients, made when a rule first trains.

    start: returns the initial model. hosts: these clients of a larger federation, in ascending order; None: all.
    """

    def __init__(
        self,
        clients: int,
        device: torch.device,
        place: RowPlace,
        start: Callable[[], Tree],
        hosts: np.ndarray | None,
    ) -> None:
        self._clients, self._device, self._place, self._start, self._hosts = clients, device, place, start, hosts
        self._rows: ClientRows | None = None  # None until a rule trains
        self._untested: Untested | None = None
        self._without: set[tuple[ClientRule, Channel]] = set()  # rules that keep none

    def tree(self) -> Tree:
        """Every client's memory, stacked [K, ...], read when something asks; later rounds do not change it."""
        if self._untested is not None:
            self._put_back(self._untested)
        return {} if self._rows is None else self._rows.tree()

    def restore(self, memory: Tree) -> None:
        """Restore saved memories; {} clears all."""
        self._rows = self._untested = None
        if not any(True for _ in tree.leaves(memory)):
            return
        known = ClientRows.of(memory)
        if known is None:
            self._rows = ClientRows.dense(memory, self._storage(tree.here(tree.take(memory, np.zeros(1, int)))))
        elif isinstance(known.storage, BlockStorage) and known.storage.device == self._device:
            self._rows = known
        else:
            initial = tree.shaped_like(memory, tree.flatten(known.initial))  # with its empty subtrees
            self._rows = known.copied(self._storage(tree.repeat(initial, 1)))

    def forget(self, first: Tree) -> None:
        """Give every client the memory `first`, [1, ...]."""
        self._untested = None
        self._rows = ClientRows(self._storage(first), self._clients)

    def write(self, ids: np.ndarray, rows: Tree) -> None:
        """Give these clients other memories, [m, ...]."""
        if self._untested is not None:
            self._put_back(self._untested)
        assert self._rows is not None
        self._rows = self._rows.write(self.where(ids), tree.to(rows, self._device))

    def read(self, client: ClientRule, channel: Channel, ids: np.ndarray) -> Tree:
        """What these clients remember, stacked [m, ...]."""
        rows = self._of(client, channel)
        return {} if rows is None else rows.read(self.where(ids))

    def remember(self, client: ClientRule, channel: Channel, workload: Workload, new: Tree, reply: Tree) -> None:
        """Store the clients' new memories; one whose reply did not arrive, or is not finite, keeps the old."""
        rows = self._of(client, channel)
        if rows is None or not any(True for _ in tree.leaves(rows.initial)):
            return
        ids, kept, values = self.where(workload.ids), np.flatnonzero(workload.heard), {"reply": reply, "memory": new}
        if not self._queues:
            kept = kept[tree.all_finite(values)[kept]]
        self._rows = rows.write(ids[kept], new if len(kept) == len(ids) else tree.take(new, kept))
        if self._queues:
            self._untested = Untested(tree.is_finite(list(tree.leaves(values))), values, rows, ids, kept)

    @property
    def _queues(self) -> bool:
        """Whether the host would wait for the device to know which values are finite."""
        return self._device.type == "cuda"

    def _put_back(self, last: Untested) -> None:
        """Give clients whose last values turn out not to be finite their old ones again."""
        self._untested = None
        if self._rows is not None and not bool(last.finite):
            broken = last.ids[last.heard[~tree.all_finite(last.values)[last.heard]]]
            self._rows = self._rows.write(broken, last.before.read(broken))

    def where(self, ids: np.ndarray) -> np.ndarray:
        """The clients' places among those held here."""
        return ids if self._hosts is None else np.searchsorted(self._hosts, ids)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes on the device, in host memory and in a file."""
        storage = None if self._rows is None else self._rows.storage
        return storage.nbytes if isinstance(storage, BlockStorage) else {}

    def _of(self, client: ClientRule, channel: Channel) -> ClientRows | None:
        """The rows, made when a rule first trains; None where clients keep no memory."""
        if self._untested is not None:
            self._put_back(self._untested)
        if self._rows is None and client.work.trains and (client, channel) not in self._without:
            start = self._start()
            initial = memories(client.init(start), channel.init(start))
            if initial:
                self._rows = ClientRows(self._storage(tree.repeat(initial, 1)), self._clients)
            else:
                self._without.add((client, channel))
        return self._rows

    def _storage(self, first: Tree) -> BlockStorage:
        """A storage for rows like the first of `first`, which is the initial one."""
        initial = tree.to(tree.rows(first, 0), self._device)
        return BlockStorage(initial, self._device, self._place, clients=self._clients)
