"""Rows that a plan names, brought to the device: exactly those, and the next group's while this one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.stored_rows import HostSource, has_stored, is_stored, stored, stored_bytes, stored_values

Where = Literal["auto", "device", "host"]
GROUP_BYTES = 64 << 20  # of stored rows in one group, where the size of groups does not change results
Draw = Callable[[np.ndarray], Plan]


def placed_rows(rows: Rows, device: torch.device, dtype: torch.dtype, where: Where) -> Rows:
    """Rows for an engine: "auto" leaves stored ones where they lie, and moves others to the device.

    "device" and "host" bring all into the memory of the device or of the host, with stored values as they are.
    """
    if where == "host" and device.type != "cpu":
        rows = replace(rows, x=tree.map_leaves(lambda leaf: leaf if is_stored(leaf) else _in_host(leaf, dtype), rows.x))
    placed = rows.to(device, dtype)
    if where == "auto" or not has_stored(placed.x):
        return placed

    def load(leaf: Tensor) -> Tensor:
        if not is_stored(leaf) or (where == "host" and isinstance(leaf.source.source, HostSource)):  # type: ignore[attr-defined]
            return leaf
        values = stored_values(leaf, np.arange(len(leaf)))
        if where == "device" or device.type == "cpu":
            return values.to(device)
        return stored(HostSource(values), leaf.source.preparation.scaling)  # type: ignore[attr-defined]

    return replace(placed, x=tree.map_leaves(load, placed.x))


def _in_host(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    return stored(HostSource(leaf.to(dtype) if leaf.is_floating_point() else leaf))


class Stager:
    """Reads rows for one engine; on a GPU they lie in memory that stays the same from group to group, for graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._buffers: dict[Any, Tensor] = {}

    def stage(self, plan: Plan, store: Rows) -> tuple[Plan, Rows]:
        """The plan and a store with the rows that it names; both as they are where no row is stored elsewhere."""
        if not has_stored(store.x):
            return plan, store
        needed, places = _needed(plan)
        return self._staged(plan, store, needed, places, self._read(store.x, needed))

    def ahead(self, groups: Sequence[np.ndarray], draw: Draw, store: Rows) -> Iterator[tuple[np.ndarray, Plan, Rows]]:
        """Each group with its plan and rows; the next group's rows are read while the caller works on this one."""
        if not has_stored(store.x):
            yield from ((group, draw(group), store) for group in groups)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rows")
        coming: list[tuple[np.ndarray, Plan, np.ndarray, np.ndarray, Future[Any]]] = []
        waiting = iter(groups)

        def begin() -> None:
            group = next(waiting, None)
            if group is not None:
                plan = draw(group)
                needed, places = _needed(plan)
                assert self._pool is not None
                coming.append((group, plan, needed, places, self._pool.submit(self._read, store.x, needed)))

        begin()
        while coming:
            group, plan, needed, places, reading = coming.pop()
            values = reading.result()
            begin()
            yield group, *self._staged(plan, store, needed, places, values)

    def split(self, groups: Sequence[np.ndarray], steps_alone: int, store: Rows, rows: Callable[..., int]) -> list[Any]:
        """Groups of clients whose rows take at most `GROUP_BYTES`, of a multiple of `steps_alone` clients."""
        length, found = stored_bytes(store.x), []
        for group in groups:
            most = max(1, rows(group)) * length / max(1, len(group))  # bytes of a client
            size = max(2 * steps_alone, int(GROUP_BYTES // max(most, 1)) // steps_alone * steps_alone)
            found += [group[begin : begin + size] for begin in range(0, len(group), size)]
        return found

    def _read(self, x: Any, needed: np.ndarray) -> Any:
        """The stored values of some rows, in host memory; None for leaves that are on the device."""
        pinned = self._device.type == "cuda"
        return tree.map_leaves(lambda leaf: stored_values(leaf, needed, pinned=pinned) if is_stored(leaf) else None, x)

    def _staged(
        self, plan: Plan, store: Rows, needed: np.ndarray, places: np.ndarray, values: Any
    ) -> tuple[Plan, Rows]:
        where = torch.from_numpy(needed).to(self._device)
        names = iter(range(1_000_000))

        def near(leaf: Tensor, value: Tensor | None) -> Tensor:
            return self._kept(next(names), leaf[where] if value is None else value)

        x = tree.map_leaves(near, store.x, values)
        y = self._kept("y", store.y[where])
        weight = None if store.weight is None else self._kept("weight", store.weight[where])
        rows = torch.from_numpy(places.reshape(plan.rows.shape)).to(self._device)
        return replace(plan, rows=rows), replace(store, x=x, y=y, weight=weight)

    def _kept(self, name: Any, values: Tensor) -> Tensor:
        """Values on the device; of a GPU, in a buffer that is as long as the longest so far, to a power of two."""
        if self._device.type != "cuda":
            return values
        key = (name, values.shape[1:], values.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < len(values):
            length = 1 << max(0, len(values) - 1).bit_length()
            buffer = torch.zeros((length, *values.shape[1:]), dtype=values.dtype, device=self._device)
            self._buffers[key] = buffer
        buffer[: len(values)].copy_(values, non_blocking=True)
        return buffer


def _needed(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """(ascending numbers of the rows that a plan names, the place of each of its slots among them)."""
    return np.unique(plan.rows.cpu().numpy(), return_inverse=True)
