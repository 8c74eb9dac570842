"""Stacked tensors whose rows are stored in other processes: shape and dtype are local, values are fetched on read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Work = Callable[..., Any]


class RemoteStore(Protocol):
    """Processes that store rows and can compute on them."""

    def begin(
        self, function: Work, calls: Sequence[tuple[Any, ...]], given: tuple[Any, ...]
    ) -> Callable[[], list[Any]]:
        """Start `function(*call, *given)` for every call, whose first argument is remote; returns how to wait."""
        ...


class RemoteRows(Protocol):
    """The source of the rows of one stacked tensor."""

    @property
    def place(self) -> RemoteStore | None:
        """The processes that can compute on the rows; None if none can."""
        ...

    @property
    def lengths(self) -> np.ndarray | None:
        """[m] the norm of each row, if known: infinite if it overflows, NaN if a value is not finite."""
        ...

    @property
    def lasting(self) -> bool:
        """Whether the rows can be fetched as long as the tensor exists, so that a state may keep the tensor."""
        ...

    def fetch(self, rows: np.ndarray) -> Tensor:
        """[n, ...] these rows, in this process."""
        ...


class RemoteTensor(Tensor):
    """A stacked tensor [m, ...] with remote rows; any operation on it fetches them first and does not cache them.

    `leaf[3]` or `leaf[[1, 4]]` fetches only those rows; `each` and `tree.map_rows` compute where the rows are stored.
    """

    source: RemoteRows
    rows: np.ndarray | None  # which rows of the source; None: all, in order

    @staticmethod
    def __new__(
        cls, source: RemoteRows, rows: np.ndarray, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> RemoteTensor:
        made: Any = Tensor._make_wrapper_subclass(cls, (len(rows), *shape), dtype=dtype, device=device)
        made.source, made.rows = source, rows
        return made

    @staticmethod
    def whole(
        source: RemoteRows, count: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> RemoteTensor:
        """All rows of a source, without a list of indices."""
        made: Any = Tensor._make_wrapper_subclass(RemoteTensor, (count, *shape), dtype=dtype, device=device)
        made.source, made.rows = source, None
        return made

    def __init__(self, *_: Any) -> None:
        """Nothing: `__new__` does all the work."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle without copying rows that another process can read."""
        if not getattr(self.source, "portable", False):
            return super().__reduce_ex__(protocol)
        return _rebuilt, (self.source, self.rows, tuple(self.shape), self.dtype, self.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RemoteTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def here(self) -> Tensor:
        """All rows, as an ordinary tensor."""
        return self.source.fetch(self._numbers()).to(self.device)

    def take(self, index: np.ndarray) -> RemoteTensor:  # type: ignore[override]
        """Some of the rows, without fetching them."""
        return RemoteTensor(self.source, self._numbers(index), self.shape[1:], self.dtype, self.device)

    @property
    def lengths(self) -> np.ndarray | None:
        """[m] the norm of each row, if known without fetching."""
        known = self.source.lengths
        return None if known is None else known[self._numbers()]

    @property
    def finite(self) -> np.ndarray | None:
        """[m] whether each row is finite, if known without fetching."""
        return None if self.lengths is None else ~np.isnan(self.lengths)

    def _rows_at(self, index: Any) -> Tensor:
        """`self[index]`, fetching only the indexed rows if the index is over rows only."""
        known = index.cpu().numpy() if isinstance(index, Tensor) else index
        if isinstance(known, (tuple, list)) or known is None or np.ndim(known) > 1:
            return self.here()[index]
        plain = np.ndim(known) == 1 and not isinstance(known, slice) and known.dtype != np.bool_
        chosen = known if plain else np.arange(len(self))[known]
        found = self.source.fetch(self._numbers(np.atleast_1d(chosen))).to(self.device)
        return found if np.ndim(chosen) else found[0]

    def _numbers(self, index: np.ndarray | None = None) -> np.ndarray:
        """Indices in the source of all rows, or of those at `index`."""
        if self.rows is None:
            return np.arange(len(self)) if index is None else np.where(index < 0, index + len(self), index)
        return self.rows if index is None else self.rows[index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Metadata without fetching; every other operation on the fetched values."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            if func is Tensor.__getitem__ and isinstance(args[0], RemoteTensor):
                return args[0]._rows_at(args[1])
            return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The operation on the fetched values."""
        args, kwargs = pytree.tree_map_only(RemoteTensor, RemoteTensor.here, (args, kwargs or {}))
        return func(*args, **kwargs)


_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_quantized", "requires_grad", "itemsize")
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "__len__"),
    *("is_floating_point", "is_complex"),
)
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}


def _rebuilt(
    source: RemoteRows, rows: np.ndarray | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> RemoteTensor:
    if rows is None:
        return RemoteTensor.whole(source, shape[0], shape[1:], dtype, device)
    return RemoteTensor(source, rows, shape[1:], dtype, device)


def each(function: Work, stacked: Sequence[Tensor], *others: Sequence[Any], given: tuple[Any, ...] = ()) -> list[Any]:
    """`function(leaf, *others, *given)` for every stacked leaf, computed where its rows are stored.

    The function is sent by name, so it must be importable; its result (a tensor) is returned.
    """
    calls = list(zip(stacked, *others))
    by_place: dict[int, list[int]] = {}
    for number, leaf in enumerate(stacked):
        if isinstance(leaf, RemoteTensor) and leaf.source.place is not None:
            by_place.setdefault(id(leaf.source.place), []).append(number)
    waiting = []
    for numbers in by_place.values():
        place = stacked[numbers[0]].source.place  # type: ignore[attr-defined]
        waiting.append((numbers, place.begin(function, [calls[number] for number in numbers], given)))
    away = {number for numbers in by_place.values() for number in numbers}
    found = {number: function(*call, *given) for number, call in enumerate(calls) if number not in away}
    for numbers, finish in waiting:
        found.update(zip(numbers, finish()))
    return [found[number] for number in range(len(calls))]
