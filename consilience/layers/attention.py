"""Scaled dot-product attention for a group of clients as one larger batch, and with dropout drawn from a key.

vmap has no rule for the gradient of PyTorch's attention kernels and calls them once for every client. Attention has no
parameters, so that clients are only more rows: `folded` calls the kernel once for all of them. Where sequences are
short, on a GPU and in bfloat16, the kernel is one of ours (`attention_kernels`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.layers import grouped

SHORT = 64  # positions: PyTorch's kernels work on blocks of 128
WIDEST = 128  # values of a head


def folded(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **options: Any
) -> Tensor:
    """PyTorch's attention; for a group of clients, of all rows of all clients at once."""
    with _repeatable(query, key):
        if not grouped.grouped():
            return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, **options)
        plain = attn_mask is None and not is_causal and not options.get("enable_gqa")
        if plain and _is_short(query, key, value):
            return grouped.apply(_ShortCall(options.get("scale")), query, key, value)
        return grouped.apply(_Call(is_causal=is_causal, **options), query, key, value, attn_mask)


@contextlib.contextmanager
def _repeatable(query: Tensor, key: Tensor) -> Iterator[None]:
    """Without the flash kernel where its gradient would be added up in any order, and runs must repeat.

    It adds the parts of a query's gradient from blocks of keys; torch has it do so in order only where every operation
    without a deterministic kernel is an error. One block is one part.
    """
    block = 128 if query.shape[-1] <= 64 else 64
    enabled = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(
        enabled and (key.shape[-2] <= block or not torch.are_deterministic_algorithms_enabled())
    )
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(enabled)


def with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    kept: Tensor,
    rate: float,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose weights are kept where `kept` [..., L, S] says so: torch's definition, in matrix products."""
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
        else:
            scores = scores + attn_mask
        none = (scores == -math.inf).all(-1, keepdim=True)  # fully masked positions
        weights = scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)
    weights = weights * kept.to(weights.dtype) / (1 - rate) if rate < 1 else weights * 0
    return weights.to(value.dtype) @ value


class _Call:
    """One call of attention, and the graph by which its gradient is found."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def forward(self, clients: int | None, *given: Tensor | None) -> Tensor:
        """The output; with a number of clients, all are stacked in front."""
        self._leaves = [None if part is None else part.detach() for part in given]
        with torch.enable_grad():
            for leaf in self._leaves:
                if leaf is not None and leaf.is_floating_point():
                    leaf.requires_grad_()
            query, key, value, mask = self._leaves
            assert query is not None and key is not None and value is not None
            fold = clients is not None and query.dim() > 3  # with fewer, the clients are the rows
            if fold:
                mask = _rows(mask, query)
                query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
            out = F.scaled_dot_product_attention(query, key, value, mask, **self._options)
            self._out = out.unflatten(0, (clients, -1)) if fold else out
        return self._out.detach()

    def backward(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients by query, key, value and mask."""
        inputs = [leaf for leaf in self._leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(self._out, inputs, grad))
        return tuple(next(found) if leaf is not None and leaf.requires_grad else None for leaf in self._leaves)


def _is_short(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attention_kernels` compute this: one block of positions, in bfloat16, on a GPU with Triton."""
    fits = query.shape == key.shape == value.shape and query.dim() == 4
    small = query.shape[-2] <= SHORT and query.shape[-1] <= WIDEST
    half = query.dtype == key.dtype == value.dtype == torch.bfloat16
    return fits and small and half and grouped.runs_kernels(query)


class _ShortCall:
    """One call of attention over short sequences."""

    def __init__(self, scale: float | None) -> None:
        self._scale = scale

    def forward(self, clients: int | None, *given: Tensor) -> Tensor:
        """The output; with a number of clients, all are stacked in front."""
        self._given = given if clients is None else tuple(part.flatten(0, 1) for part in given)
        self._factor = 1 / math.sqrt(given[0].shape[-1]) if self._scale is None else self._scale
        out: Tensor = _operations().attend(*self._given, self._factor)
        return out if clients is None else out.unflatten(0, (clients, -1))

    def backward(self, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradients by query, key and value."""
        found = _operations().attend_backward(grad.reshape(self._given[0].shape), *self._given, self._factor)
        return tuple(part.view(grad.shape) for part in found)


@functools.cache
def _operations() -> Any:
    """The two operations, registered at their first use: traces and PyTorch's compiler see each as one."""
    from consilience.layers import attention_kernels as kernels

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        with torch.cuda.device_of(query), grouped.kernel_errors():
            return kernels.attend(query, key, value, scale)

    def attend_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.cuda.device_of(query), grouped.kernel_errors():
            return kernels.attend_backward(grad, query, key, value, scale)

    def like(query: Tensor) -> Tensor:
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3]).transpose(1, 2)

    given = "Tensor query, Tensor key, Tensor value, float scale"
    made = torch.library.custom_op("consilience::attend", attend, mutates_args=(), schema=f"({given}) -> Tensor")
    made.register_fake(lambda query, *_: like(query))
    made = torch.library.custom_op(
        "consilience::attend_backward",
        attend_backward,
        mutates_args=(),
        schema=f"(Tensor grad, {given}) -> (Tensor, Tensor, Tensor)",
    )
    made.register_fake(lambda _, query, *rest: (like(query), like(query), like(query)))
    return torch.ops.consilience


def _rows(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask [clients, ...] that broadcasts to [clients x rows, heads, L, S]."""
    if mask is None:
        return None
    missing = query.dim() - mask.dim()
    mask = mask.reshape(mask.shape[0], *(1,) * missing, *mask.shape[1:])
    return mask.expand(-1, query.shape[1], *mask.shape[2:]).flatten(0, 1)
