"""A worker of the Ray engine: a vectorised engine over the clients that are pinned to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from consilience.core import task as contract
from consilience.core import tree
from consilience.core.exchange import Broadcast
from consilience.core.federation import Federation, Rows
from consilience.core.kind import Kind
from consilience.core.lengths import quick
from consilience.core.metrics import Loss, Metric
from consilience.core.protocols import Channel, ClientRule
from consilience.core.tree import Tree
from consilience.engines.ray.node_data import NodeFederation, NodeShare
from consilience.engines.ray.transfer import (
    RemoteLeaf,
    WorkerReplies,
    balanced_owners,
    packed,
    unpacked,
    with_frozen,
)
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.tuning import LaneChoice
from consilience.engines.workload import Workload
from consilience.stores.client_rows import ClientRows
from consilience.task.task import Task


class WorkerSetup(NamedTuple):
    """A worker's configuration: its clients and their rows, the model, and engine settings."""

    ids: np.ndarray
    weight: float  # rows, by which work is balanced
    rows: dict[str, Any] | NodeShare  # arrays of the training and test rows, or what to read where they lie
    classes: int | None
    module: nn.Module  # without its frozen parameters, which are stored once for all workers of a machine
    kind: Kind
    loss: Loss
    metrics: tuple[Metric, ...]
    settings: dict[str, Any]  # of the vectorised engine
    threads: int
    shards: int  # objects over which the large tensors of its replies are spread
    large: int  # bytes of a client's tensor from which on it is left in the object store
    machines: frozenset[str] | None = None  # that have the rows, by Ray's ids; None: all

    @staticmethod
    def of(
        federation: Federation | NodeFederation,
        task: contract.Task,
        module: nn.Module,
        settings: dict[str, Any],
        ids: np.ndarray,
        machines: frozenset[str] | None,
        *,
        threads: int,
        shards: int,
        large: int,
    ) -> WorkerSetup:
        """The setup for the worker of these clients, whose rows are on these machines."""
        return WorkerSetup(
            ids=ids,
            weight=float(federation.train.sizes[torch.from_numpy(ids)].sum()),
            rows=federation.share(ids) if isinstance(federation, NodeFederation) else _arrays(federation.among(ids)),
            classes=federation.classes,
            module=module,
            kind=task.kind,
            loss=task.losses,
            metrics=task.added,
            settings=settings,
            threads=threads,
            shards=shards,
            large=large,
            machines=machines,
        )

    def federation(self) -> Federation:
        """The clients' rows; those that came from the driver stay in the object store, where they are used on a CPU."""
        if isinstance(self.rows, NodeShare):
            return self.rows.federation()
        rows = {split: Rows(**unpacked(arrays, _CPU)) for split, arrays in self.rows.items()}
        return Federation(train=rows["train"], test=rows.get("test"), classes=self.classes)


def _arrays(federation: Federation) -> dict[str, Any]:
    splits = {"train": federation.train, "test": federation.test}
    return {split: packed(vars(rows)) for split, rows in splits.items() if rows is not None}


_CPU = torch.device("cpu")
AT_ONCE = 64  # memories that are restored together
Rules = tuple[ClientRule, Channel]


class Worker:
    """Runs in a process on one of the machines; every method returns arrays."""

    def __init__(self, setup: WorkerSetup, frozen: Tree) -> None:
        torch.set_num_threads(setup.threads)  # Ray's own default is one, and the last bits depend on it
        task = Task(with_frozen(setup.module, frozen), setup.kind, loss=setup.loss, metrics=setup.metrics)
        self._engine = Vectorised(task, setup.federation(), hosts=setup.ids, **setup.settings)
        self._setup = setup
        self._whole: tuple[int, dict[str, Tensor]] = (-1, {})  # of an exchange, tensors put together from all workers

    def use_lane(self, choice: LaneChoice) -> None:
        """Take the lane that another worker measured."""
        self._engine.use_lane(choice)

    def restore(self, first: Tree | None, ids: np.ndarray, places: np.ndarray, *kept: Tree) -> None:
        """Remember for these clients what lies at `places` ([k, 2]: which object, which row), `first` for the others.

        Without a first memory, [1, ...], all is forgotten.
        """
        if first is None:
            self._engine.memories.restore({})
            return
        held = [unpacked(one, _CPU) for one in kept]
        self._engine.memories.forget(unpacked(first, _CPU))
        for begin in range(0, len(ids), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            rows = tree.stack([tree.rows(held[which], int(row)) for which, row in places[some].tolist()])
            self._engine.memories.write(ids[some], rows)

    def measure_lanes(
        self, rules: Rules, shared: Tree, personal: Tree, workload: Workload, *, round: int, seed: int
    ) -> LaneChoice:
        """Choose a lane by trials on this work, without doing it."""
        broadcast = self._received(shared, personal)
        return self._engine.measure_lanes(*rules, broadcast, workload, round=round, seed=seed)

    def run_clients(
        self, rules: Rules, shared: Tree, personal: Tree, workload: Workload, remembers: bool, *, round: int, seed: int
    ) -> tuple[Any, ...]:
        """The replies, the shards of those that are large, and the memory of each client where they have any."""
        self._whole = (-1, {})
        broadcast = self._received(shared, personal)
        reply = self._engine.run_clients(*rules, broadcast, workload, round=round, seed=seed)
        small, shards = self._leave_large(reply)
        kept = self._memories(workload.ids) if remembers else ()
        return (WorkerReplies(small, self._engine.choice), *shards, *kept)

    def reduce(
        self,
        function: Callable[..., Any],
        calls: list[tuple[str, np.ndarray | None, tuple[Any, ...]]],
        given: tuple[Any, ...],
        exchange: int,
        back: np.ndarray,
        *shards: Tree,
    ) -> list[Any]:
        """`function(leaf, *others, *given)` for each (path, rows, others) of a shard, put together from all workers."""
        if self._whole[0] != exchange:
            self._whole = (exchange, {})
        device = self._engine.device
        found = []
        with torch.no_grad():
            for path, rows, others in calls:
                leaf = self._put_together(path, back, shards)
                leaf = leaf if rows is None else leaf[torch.from_numpy(rows).to(device)]
                arguments = [unpacked(value, device) for value in (*others, *given)]
                found.append(packed(function(leaf, *arguments)))
        return found

    def _put_together(self, path: str, back: np.ndarray, shards: tuple[Tree, ...]) -> Tensor:
        """One tensor of all replies [m, ...], in client order."""
        whole = self._whole[1]
        if path not in whole:
            whole[path] = in_client_order([unpacked(shard[path], self._engine.device) for shard in shards], back)
        return whole[path]

    def _received(self, shared: Tree, personal: Tree) -> Broadcast:
        device = self._engine.device
        return Broadcast(shared=unpacked(shared, device), personal=unpacked(personal, device))

    def _memories(self, ids: np.ndarray) -> list[Tree]:
        table = ClientRows.of(self._engine.recall())
        assert table is not None
        rows = table.read(np.searchsorted(self._setup.ids, ids))
        return [packed(tree.rows(rows, slice(place, place + 1))) for place in range(len(ids))]

    def _leave_large(self, reply: Tree) -> tuple[Tree, list[Tree]]:
        """(the replies with `RemoteLeaf` in place of what is large, the shards that hold it)."""
        flat = tree.flatten(reply)
        size = {path: leaf[0].numel() * leaf.element_size() for path, leaf in flat.items()}
        large = [path for path in flat if size[path] >= self._setup.large]
        owner = balanced_owners(np.array([size[path] for path in large], dtype=np.float64), self._setup.shards)
        shards: list[Tree] = [{} for _ in range(self._setup.shards)]
        left: dict[str, RemoteLeaf] = {}
        for path, shard in zip(large, owner.tolist()):
            leaf = flat[path]
            left[path] = RemoteLeaf(path, shard, tuple(leaf.shape[1:]), leaf.dtype, _lengths(leaf))
            shards[shard][path] = packed(leaf)
        return _replaced(reply, left), shards


def _lengths(leaf: Tensor) -> np.ndarray:
    """[m] the length of each row: infinite if it overflows, NaN if a value is not finite."""
    found = quick(leaf).double().cpu().numpy() if leaf.is_floating_point() else np.zeros(len(leaf))
    if np.isfinite(found).all():
        return found
    finite = tree.all_finite({"leaf": leaf})
    return np.where(finite, np.where(np.isfinite(found), found, np.inf), np.nan)


def in_client_order(parts: list[Tensor], back: np.ndarray) -> Tensor:
    """Rows of several workers as one stack [m, ...] in ascending client order."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[torch.from_numpy(back).to(whole.device)] if (np.diff(back) < 0).any() else whole


def _replaced(value: Any, left: dict[str, RemoteLeaf], path: str = "") -> Any:
    if not isinstance(value, dict):
        return left[path] if path in left else packed(value)
    front = f"{path}{tree.SEPARATOR}" if path else ""
    return {key: _replaced(inner, left, front + key) for key, inner in value.items()}
