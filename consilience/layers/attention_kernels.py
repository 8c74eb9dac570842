"""Triton kernels for the attention of short sequences: each program computes one head of one row in registers.

The kernels in PyTorch's library work on blocks of 128 positions and read and write their sums in several passes, which
is most of their time where a sequence has 64 positions, as pictures cut into patches do. Nothing is added up by several
programs, so that results repeat bit for bit. Imported where Triton is there, like `convolution_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
BLOCK = 64  # positions; shorter sequences leave a part of it empty


@triton.jit
def _tile(source, row, head, place, unit, inside, s_row, s_head, s_place):
    """One head of one row: [position, unit]."""
    return tl.load(source + row * s_row + head * s_head + place[:, None] * s_place + unit[None, :], inside, other=0.0)


@triton.jit
def _weights(query, key, place, length, scale):
    """Softmax over the keys of a block: [query, key]."""
    allowed = (place < length)[None, :]
    scores = tl.where(allowed, tl.dot(query, tl.trans(key), input_precision="ieee") * scale, float("-inf"))
    powers = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return powers / tl.sum(powers, 1)[:, None]


@triton.jit
def _attend(
    query, key, value, out, heads, length, scale,
    q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place, o_row, o_head, o_place,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """out = softmax(query key^T) value for one head of one row; `scale` includes the logarithm's base 2."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place, unit = tl.arange(0, PLACES), tl.arange(0, UNITS)
    inside = (place < length)[:, None] & (unit < WIDTH)[None, :]
    q = _tile(query, row, head, place, unit, inside, q_row, q_head, q_place)
    k = _tile(key, row, head, place, unit, inside, k_row, k_head, k_place)
    v = _tile(value, row, head, place, unit, inside, v_row, v_head, v_place)
    attended = tl.dot(_weights(q, k, place, length, scale).to(v.dtype), v, input_precision="ieee")
    to = out + row * o_row + head * o_head + place[:, None] * o_place + unit[None, :]
    tl.store(to, attended.to(out.dtype.element_ty), inside)


@triton.jit
def _attend_backward(
    grad, query, key, value, by_query, by_key, by_value, heads, length, scale, plain_scale,
    g_row, g_head, g_place, q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place,
    o_row, o_head, o_place,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The gradients by query, key and value, from the weights computed again; all three have one layout."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place, unit = tl.arange(0, PLACES), tl.arange(0, UNITS)
    inside = (place < length)[:, None] & (unit < WIDTH)[None, :]
    q = _tile(query, row, head, place, unit, inside, q_row, q_head, q_place)
    k = _tile(key, row, head, place, unit, inside, k_row, k_head, k_place)
    v = _tile(value, row, head, place, unit, inside, v_row, v_head, v_place)
    g = _tile(grad, row, head, place, unit, inside, g_row, g_head, g_place)
    weights = _weights(q, k, place, length, scale)
    to = row * o_row + head * o_head + place[:, None] * o_place + unit[None, :]
    found = tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision="ieee")
    tl.store(by_value + to, found.to(by_value.dtype.element_ty), inside)
    by_weights = tl.dot(g, tl.trans(v), input_precision="ieee")
    by_scores = weights * (by_weights - tl.sum(weights * by_weights, 1)[:, None]) * plain_scale
    by_scores = by_scores.to(q.dtype)
    found = tl.dot(by_scores, k, input_precision="ieee")
    tl.store(by_query + to, found.to(by_query.dtype.element_ty), inside)
    found = tl.dot(tl.trans(by_scores), q, input_precision="ieee")
    tl.store(by_key + to, found.to(by_key.dtype.element_ty), inside)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[N, H, L, E] each -> [N, H, L, E], of which the heads lie beside each other."""
    query, key, value = (_rows(part) for part in (query, key, value))
    rows, heads, length, width = query.shape
    out = query.new_empty(rows, length, heads, width).transpose(1, 2)
    _attend[(rows * heads,)](
        query, key, value, out, heads, length, scale * LOG2_E,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        **_blocks(width),
    )  # fmt: skip
    return out


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by query, key and value, laid out as the output is."""
    grad, query, key, value = (_rows(part) for part in (grad, query, key, value))
    rows, heads, length, width = query.shape
    found = tuple(query.new_empty(rows, length, heads, width).transpose(1, 2) for _ in range(3))
    _attend_backward[(rows * heads,)](
        grad, query, key, value, *found, heads, length, scale * LOG2_E, scale,
        *grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *found[0].stride()[:3],
        **_blocks(width),
    )  # fmt: skip
    return found[0], found[1], found[2]


def _rows(part: Tensor) -> Tensor:
    """With the values of one head and position beside each other."""
    return part if part.stride(-1) == 1 else part.contiguous()


def _blocks(width: int) -> dict[str, int]:
    return {"WIDTH": width, "PLACES": BLOCK, "UNITS": max(16, triton.next_power_of_2(width)), "num_warps": 4}
