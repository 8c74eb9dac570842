"""CUDA graphs and streams simulated on a CPU: the lanes of a GPU run with the tests' usual tensors.

A captured block runs once, its operations are recorded, and what it changed is put back, since a capture does not run
anything. A replay repeats the operations at the recorded addresses. Streams run one after another: a missing wait
between two streams is not found, but whatever a capture does not allow (reading a value) is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from consilience.engines.compiler.trace import NORMS

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.nonzero.default)  # what waits for the device


class Stream:
    """A stream; `waits` lists what it waited for."""

    def __init__(self) -> None:
        self.waits: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        """Record it."""
        self.waits.append(other)


class Graph:
    """Recorded operations with their arguments and results."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self.replays = 0

    def replay(self) -> None:
        """Repeat the operations; results go to where the recorded ones lie."""
        self.replays += 1
        for operation, arguments, options, results in self.operations:
            found = pytree.tree_leaves(operation(*arguments, **options))
            for old, new in zip(results, found):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Capture(TorchDispatchMode):
    """Records operations, and keeps what they overwrite."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {op}")
        options = kwargs or {}
        for value in _written(op, args):
            memory = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
            self._before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        given = pytree.tree_map_only(Tensor, _as_it_is, (args, options))
        results = op(*args, **options)
        if torch.Tag.inplace_view not in op.tags:  # changes only how a tensor is seen: `given` shows it as it was
            kept = [_as_it_is(leaf) if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(results)]
            self._graph.operations.append((op, *given, kept))
        return results

    def put_back(self) -> None:
        for memory, before in self._before.values():
            memory.copy_(before)


def _as_it_is(value: Tensor) -> Tensor:
    """Another tensor of the same memory, which keeps its shape when the first is reshaped in place."""
    return value.as_strided(value.shape, value.stride(), value.storage_offset())


def _written(op: Any, args: Any) -> list[Tensor]:
    if op in NORMS:
        return [value for value in args[3:5] if value is not None]
    named = zip(op._schema.arguments, args)
    found = [value for one, value in named if one.alias_info is not None and one.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def capturing(graph: Graph, *, pool: Any, stream: Stream) -> Iterator[None]:
    """`torch.cuda.graph`."""
    capture = _Capture(graph)
    with capture:
        yield
    capture.put_back()


def simulate(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Simulate what the lanes use of `torch.cuda`; gives the main stream."""
    main = Stream()
    simulated = {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": capturing,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda: main,
        "graph_pool_handle": object,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda: 0,
        "memory_allocated": lambda: 0,
        "mem_get_info": lambda *_: (8 << 30, 8 << 30),
    }
    for name, value in simulated.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(type(torch.backends.cudnn), "deterministic", True, raising=False)
    return main
