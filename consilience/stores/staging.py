"""Loads the rows of a batch plan to the device, reading the next group's rows while the current one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.stored_rows import HostSource, is_stored, stored, stored_values

Where = Literal["auto", "device", "host"]
GROUP_BYTES = 64 << 20  # of stored rows per group, where group size does not change results
Draw = Callable[[np.ndarray], Plan]


def placed_rows(rows: Rows, device: torch.device, dtype: torch.dtype, where: Where) -> Rows:
    """Rows for an engine: "auto" leaves stored rows in their source and moves others to the device.

    "device" and "host" load all rows into that memory, in their stored type.
    """
    if where == "host" and device.type != "cpu":
        rows = replace(rows, x=tree.map_leaves(lambda leaf: leaf if is_stored(leaf) else _in_host(leaf, dtype), rows.x))
    placed = rows.to(device, dtype)
    if where == "auto" or not placed.is_stored:
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


class Reading(NamedTuple):
    """Rows that are being read."""

    needed: np.ndarray  # ascending indices of the rows that a plan needs
    places: np.ndarray  # index into `needed` of each slot
    values: Future[Any]


class Stager:
    """Reads rows for one engine; on a GPU into buffers with fixed addresses, which CUDA graphs need."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[int, tuple[Plan, Reading]] = {}
        self._buffers: dict[Any, Tensor] = {}

    def begin(self, plan: Plan, store: Rows) -> None:
        """Start reading the rows of a plan, for `stage`."""
        if not store.is_stored:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rows")
        needed, places = _needed(plan)
        self._begun[id(plan)] = plan, Reading(needed, places, self._pool.submit(self._read, store.x, needed))

    def stage(self, plan: Plan, store: Rows) -> tuple[Plan, Rows]:
        """(plan, store) with only the rows that the plan needs; both unchanged if no row is stored elsewhere."""
        if not store.is_stored:
            return plan, store
        if id(plan) in self._begun:
            needed, places, reading = self._begun.pop(id(plan))[1]
            return self._staged(plan, store, needed, places, reading.result())
        needed, places = _needed(plan)
        return self._staged(plan, store, needed, places, self._read(store.x, needed))

    def forget(self) -> None:
        """Drop rows that were read for unused plans."""
        self._begun.clear()

    def ahead(self, groups: Sequence[np.ndarray], draw: Draw, store: Rows) -> Iterator[tuple[np.ndarray, Plan, Rows]]:
        """Each group with its plan and rows; the next group's rows are read while the caller works on this one."""
        if not store.is_stored:
            yield from ((group, draw(group), store) for group in groups)
            return
        coming: list[tuple[np.ndarray, Plan]] = []
        for group in groups:
            coming.append((group, plan := draw(group)))
            if id(plan) not in self._begun:
                self.begin(plan, store)
            if len(coming) > 1:
                first, drawn = coming.pop(0)
                yield first, *self.stage(drawn, store)
        for group, plan in coming:
            yield group, *self.stage(plan, store)

    def _read(self, x: Any, needed: np.ndarray) -> Any:
        """The stored values of some rows, in host memory; None for leaves on the device."""
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
        """Values on the device; on a GPU in a reused buffer that grows to the next power of two."""
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


def smaller_groups(groups: Iterable[np.ndarray], each: np.ndarray, cores: int) -> list[np.ndarray]:
    """Groups whose rows (`each` bytes per client) take at most `GROUP_BYTES`, with at least one client per core."""
    found = []
    for group in groups:
        size = max(2 * cores, GROUP_BYTES // max(1, int(each[group].max())) // cores * cores)
        found += [group[begin : begin + size] for begin in range(0, len(group), size)]
    return found


def _needed(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """(ascending indices of the rows that a plan needs, the index into these of each slot)."""
    return np.unique(plan.rows.cpu().numpy(), return_inverse=True)
