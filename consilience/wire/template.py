"""Templates of valid replies: every tensor's path, shape and dtype, known before any reply is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.refusal import Refused
from consilience.core.tree import SEPARATOR, Tree
from consilience.wire import arrays
from consilience.wire.arrays import Packed, dtype_name

DEEPEST = 32  # levels of nesting: far more than any reply, far less than Python's recursion limit


class Leaf(NamedTuple):
    """One tensor of a reply."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Template:
    """One client's reply without its values: path -> (shape, dtype), in the server's order."""

    leaves: Mapping[str, Leaf]
    empty: tuple[str, ...] = field(default=())  # empty subtrees (a model without buffers)

    @staticmethod
    def of(reply: Tree) -> Template:
        """The template of replies like this one; meta and fake tensors are enough."""
        found = dict(_walk(reply))
        leaves = {path: Leaf(tuple(leaf.shape), leaf.dtype) for path, leaf in found.items() if leaf is not None}
        return Template(leaves, tuple(path for path, leaf in found.items() if leaf is None))

    @property
    def nbytes(self) -> int:
        """Bytes of a reply's values."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def most(self, castable: Collection[str] = (), *, slack: int = 0) -> int:
        """Largest accepted message in bytes: the widest castable types, one header per tensor, and `slack`."""
        widest = max((arrays.dtype_of(name).itemsize for name in castable), default=0)
        values = sum(
            math.prod(leaf.shape) * max(leaf.dtype.itemsize, widest if leaf.dtype.is_floating_point else 0)
            for leaf in self.leaves.values()
        )
        return values + arrays.USUAL_HEADER * len(self.leaves) + slack

    def check(self, reply: Any, castable: Collection[str] = ()) -> Tree:
        """The reply in the template's order; `Refused` where it differs, or holds NaN or infinite values.

        Types named in `castable` are cast to the expected one if both are floating.
        """
        return self.check_casting(reply, castable)[0]

    def check_casting(self, reply: Any, castable: Collection[str] = ()) -> tuple[Tree, tuple[str, ...]]:
        """`check`, and the paths of the tensors that were cast."""
        return self.cast(self.compare(reply, castable))

    def cast(self, flat: Mapping[str, Tensor]) -> tuple[Tree, tuple[str, ...]]:
        """A reply of compared tensors in the expected types, and the paths of those cast; `Refused` if not finite."""
        casts = tuple(path for path, leaf in self.leaves.items() if flat[path].dtype != leaf.dtype)
        values = {path: flat[path].detach().to(leaf.dtype) for path, leaf in self.leaves.items()}
        if not tree.is_finite(list(values.values())):
            raise _nonfinite(values)
        return self._build(values), casts

    def compare(self, reply: Any, castable: Collection[str] = ()) -> dict[str, Tensor]:
        """The reply's tensors by path, after `check` without the values."""
        flat = {path: leaf for path, leaf in _walk(reply) if leaf is not None}
        self._compare_keys(flat)
        for path, leaf in flat.items():
            if leaf.layout != torch.strided or leaf.is_quantized or leaf.device.type == "meta":
                raise Refused("format", key=path, detail="a tensor that is sparse, quantised or without values")
            self._compare(path, tuple(leaf.shape), leaf.dtype, castable)
        return flat

    def read(self, packed: Any, castable: Collection[str] = (), *, slack: int = 0) -> Tree:
        """A reply from bytes: names, sizes, shapes and types are checked before it is parsed.

        In total, `slack` bytes more than the expected values and their headers are accepted.
        """
        if not isinstance(packed, Mapping):
            raise Refused("format", detail=f"{type(packed).__name__} instead of bytes by name")
        self._compare_keys(packed)
        kinds = {path: _declared(path, item) for path, item in packed.items()}
        for path, item in packed.items():
            self._compare(path, item[2], kinds[path], castable)
        self._compare_size(packed, kinds, slack)
        return self._build({path: _parsed(path, packed[path], kinds[path]) for path in self.leaves})

    def pack(self, reply: Tree) -> dict[str, Packed]:
        """A reply as bytes, by path, for sending."""
        flat = {path: leaf for path, leaf in _walk(reply) if leaf is not None}
        return {path: arrays.to_bytes(flat[path]) for path in self.leaves}

    def _compare_keys(self, found: Collection[str]) -> None:
        for path in self.leaves:
            if path not in found:
                raise Refused("missing_key", key=path, detail="expected, but not in the reply")
        for path in found:
            if not isinstance(path, str) or path not in self.leaves:
                raise Refused("unknown_key", key=str(path), detail="in the reply, but not expected")

    def _compare(self, path: str, shape: Any, dtype: torch.dtype, castable: Collection[str]) -> None:
        expected = self.leaves[path]
        if not isinstance(shape, tuple) or any(type(n) is not int for n in shape) or shape != expected.shape:
            raise Refused("shape", key=path, detail=f"expected {expected.shape}, received {shape}")
        both = dtype.is_floating_point and expected.dtype.is_floating_point
        if dtype != expected.dtype and not (both and dtype_name(dtype) in castable):
            raise Refused(
                "dtype", key=path, detail=f"expected {dtype_name(expected.dtype)}, received {dtype_name(dtype)}"
            )

    def _compare_size(self, packed: Mapping[str, Packed], kinds: Mapping[str, torch.dtype], slack: int) -> None:
        sent = sum(len(item[0]) for item in packed.values())
        values = sum(math.prod(leaf.shape) * kinds[path].itemsize for path, leaf in self.leaves.items())
        most = values + arrays.USUAL_HEADER * len(self.leaves) + slack
        if sent > most:
            raise Refused("size", detail=f"a reply of {sent:,} bytes, when at most {most:,} are expected")

    def _build(self, flat: Mapping[str, Tensor]) -> Tree:
        built: Tree = {}
        for path in (*self.leaves, *self.empty):
            *parents, name = path.split(SEPARATOR)
            node = built
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = flat.get(path, {})
        return built


def _walk(reply: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor | None]]:
    """(path, tensor) depth first; an empty subtree is (path, None)."""
    if not isinstance(reply, dict):
        raise Refused("format", key=prefix.rstrip(SEPARATOR), detail=f"{type(reply).__name__} is no tree of tensors")
    if depth > DEEPEST:
        raise Refused("format", detail=f"nested more than {DEEPEST} deep")
    for key, value in reply.items():
        if not isinstance(key, str) or not key or SEPARATOR in key:
            raise Refused("unknown_key", key=f"{prefix}{key!r}", detail=f"keys are text without {SEPARATOR!r}")
        if isinstance(value, Tensor):
            yield prefix + key, value
        elif isinstance(value, dict) and not value:
            yield prefix + key, None
        else:
            yield from _walk(value, prefix + key + SEPARATOR, depth + 1)


def _nonfinite(values: Mapping[str, Tensor]) -> Refused:
    """Which tensor is not finite, and how many of its values."""
    floating = {path: value for path, value in values.items() if value.is_floating_point()}
    path = next(path for path, value in floating.items() if not bool(value.isfinite().all()))
    bad, kind = ~values[path].isfinite(), "NaN" if bool(values[path].isnan().any()) else "infinite"
    detail = f"{int(bad.sum()):,} of {bad.numel():,} values, {kind} among them"
    return Refused("nonfinite", key=path, detail=detail)


def _declared(path: str, item: Any) -> torch.dtype:
    if not (isinstance(item, tuple) and len(item) == 3 and isinstance(item[0], (bytes, bytearray, memoryview))):
        raise Refused("format", key=path, detail="not (bytes, dtype, shape)")
    try:
        return arrays.dtype_of(item[1])
    except Refused as problem:
        raise problem.at(path) from None


def _parsed(path: str, item: Packed, kind: torch.dtype) -> Tensor:
    try:
        return arrays.from_bytes(item[0], item[2], kind)
    except Refused as problem:
        raise problem.at(path) from None
