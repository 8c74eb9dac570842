"""One tree as one safetensors file, and a layout beside it for what safetensors cannot hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from consilience.core.settings import Invalid
from consilience.core.tree import SEPARATOR, Tree
from consilience.runs.names import plain

DEEPEST = 64  # levels of nesting: far more than any model, far less than Python's recursion limit

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class TreeLayout:
    """The order of a tree's paths (a last slash: an empty subtree), and strides that are not row-major."""

    entries: tuple[str, ...]
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def describe(tree: Tree, name: str) -> tuple[dict[str, Tensor], TreeLayout]:
    """A tree's tensors by path and its layout; `Invalid`, before any writing, if it cannot be stored."""
    if sys.byteorder != "little":
        raise Invalid("checkpoints are written in little-endian order, which this machine does not use")
    if not isinstance(tree, dict):
        raise Invalid(f"tree {name!r} is {type(tree).__name__}: a checkpoint holds nested dicts of tensors")
    found = dict(_walk(tree, name, "", 0))
    flat = {path: leaf for path, leaf in found.items() if leaf is not None}
    strides = {path: tuple(leaf.stride()) for path, leaf in flat.items() if _is_reordered(leaf.shape, leaf.stride())}
    return flat, TreeLayout(entries=tuple(found), strides=strides)


def chunks(flat: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, one tensor in host memory at a time; equal trees give equal bytes."""
    # Wide types first: every tensor then starts at a multiple of its element size.
    order = sorted(flat, key=lambda path: (-flat[path].element_size(), path))
    header, end = {}, 0
    for path in order:
        begin, end = end, end + flat[path].numel() * flat[path].element_size()
        shape = list(flat[path].shape)
        header[path] = {"dtype": CODES[flat[path].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for path in order:
        if flat[path].numel():
            row_major = flat[path].detach().cpu().resolve_neg().contiguous()
            # One value with an odd stride also counts as contiguous: say (1,), or it cannot be viewed as bytes.
            yield row_major.as_strided((row_major.numel(),), (1,)).view(torch.uint8).numpy().data


def restore(data: bytes, layout: TreeLayout, elsewhere: Mapping[str, Tensor] | None = None) -> Tree:
    """The tree that was described, in its order and strides; `ValueError` if data and layout disagree.

    elsewhere: the tensors that were stored in another file.
    """
    others = dict(elsewhere or {})
    try:
        flat = safetensors.torch.load(data)
    except Exception as problem:  # the parser has its own error types, which differ between versions
        raise ValueError(f"not a safetensors file: {plain(problem)}") from problem
    tree: Tree = {}
    for entry in layout.entries:
        path = entry.removesuffix(SEPARATOR)
        if path != entry:
            _insert(tree, path, {})
        elif path in others:
            _insert(tree, path, others.pop(path))
        elif path in flat:
            _insert(tree, path, _own_memory(flat.pop(path), layout.strides.get(path)))
        else:
            raise ValueError(f"{plain(path)} is missing, or listed twice")
    if others:
        raise ValueError(f"{plain(next(iter(others)))} belongs to no place in the tree")
    if flat:
        raise ValueError(f"{plain(next(iter(flat)))} is in the file but not in the manifest")
    return tree


def _walk(tree: Tree, name: str, prefix: str, depth: int) -> Iterator[tuple[str, Tensor | None]]:
    """(path, tensor) depth first; an empty subtree is (path + slash, None)."""
    if depth > DEEPEST:
        raise Invalid(f"tree {name!r} is nested more than {DEEPEST} deep at {plain(prefix)}")
    for key, value in tree.items():
        _check_key(key, name, prefix)
        path = prefix + key
        if isinstance(value, dict):
            if not value:
                yield path + SEPARATOR, None
            yield from _walk(value, name, path + SEPARATOR, depth + 1)
        else:
            _check_leaf(value, name, path)
            yield path, value


def _check_key(key: Any, name: str, prefix: str) -> None:
    if not isinstance(key, str) or not key or SEPARATOR in key:
        wrong = f"keys are non-empty text without {SEPARATOR!r}"
    elif not prefix and key == "__metadata__":
        wrong = "safetensors keeps that name for itself, use another"
    elif any("\ud800" <= character <= "\udfff" for character in key):
        wrong = "it is not valid Unicode"
    else:
        return
    raise Invalid(f"tree {name!r} has the key {plain(repr(key))} at {plain(prefix) or 'the top'}: {wrong}")


def _check_leaf(leaf: Any, name: str, path: str) -> None:
    if not isinstance(leaf, Tensor):
        wrong = f"{type(leaf).__name__}: a checkpoint holds tensors (other things go into `facts`)"
    elif leaf.layout != torch.strided or leaf.is_quantized or leaf.device.type == "meta":
        wrong = "sparse, quantised or without data: store a dense tensor"
    elif leaf.dtype not in CODES:
        wrong = f"{leaf.dtype}, which safetensors cannot hold: store its real parts"
    else:
        return
    raise Invalid(f"tree {name!r} at {plain(path)} is {wrong}")


def _insert(tree: Tree, path: str, value: Any) -> None:
    *parents, key = path.split(SEPARATOR)
    if len(parents) > DEEPEST:
        raise ValueError(f"{plain(path)} is nested more than {DEEPEST} deep")
    node: Any = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not parent or not isinstance(node, dict):
            raise ValueError(f"{plain(path)} lies inside a tensor or an unnamed subtree")
    if not key or key in node:
        raise ValueError(f"{plain(path)} is unnamed or listed twice")
    node[key] = value


def _own_memory(tensor: Tensor, strides: Sequence[int] | None) -> Tensor:
    """A copy in torch's memory: the parser's is not aligned, and kernels round by alignment and strides."""
    if strides is None:
        return tensor.clone()
    if not _is_dense(tensor.shape, strides):
        raise ValueError(f"strides {plain(list(strides))} do not fit the shape {list(tensor.shape)}")
    return torch.empty_strided(tensor.shape, tuple(strides), dtype=tensor.dtype).copy_(tensor)


def _is_reordered(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor fills its memory gaplessly, but not in row-major order (channels-last, transposed)."""
    row_major = torch.empty(tuple(shape), device="meta").stride()
    return tuple(strides) != row_major and _is_dense(shape, strides)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these strides visit every element of one gapless block exactly once."""
    if len(shape) != len(strides) or 0 in shape or any(not 0 <= s < 2**62 for s in strides):
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
