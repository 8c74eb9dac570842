"""Scaled dot-product attention of a whole group of clients in one kernel, forward and backward.

vmap has no rule for the backward pass of PyTorch's fused attention, and runs it client by client. Here the clients
become rows of one batch, which is what the kernel is made for: every row is computed on its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Heads = tuple[Tensor, Tensor, Tensor]


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """softmax(scale * query key' + mask) value, for [B, heads, T, size]; `mask` [B or 1, 1, T or 1, S] is true or
    additive. With dropout the weights of attention are drawn by `F.dropout`, which needs them in memory."""
    if mask is not None and mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
    elif mask is not None:
        mask = mask.to(query.dtype)
    if dropout > 0:
        return F.dropout(_weights(query, key, mask, scale), dropout, training=True) @ value
    if not _has_kernel(query, key, value):
        return _weights(query, key, mask, scale) @ value
    return _Forward.apply(query, key, value, mask, scale)[0]


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (query * scale) @ key.transpose(-2, -1)
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return False
    if not query.dtype == key.dtype == value.dtype or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cuda":
        return query.dtype != torch.float64 and query.shape[-1] % 8 == 0
    return query.device.type == "cpu"


class _Forward(torch.autograd.Function):
    """(output, logarithms of the sums of exponentials)."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        if query.device.type == "cpu":
            call = aten._scaled_dot_product_flash_attention_for_cpu
            return call(query, key, value, attn_mask=mask, scale=scale)
        call = aten._scaled_dot_product_efficient_attention
        return call(query, key, value, _aligned(mask, query, key), True, scale=scale)[:2]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        query, key, value, mask, ctx.scale = inputs
        ctx.save_for_backward(query, key, value, mask, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        query, key, value, mask, output, sums = ctx.saved_tensors
        return (*_Backward.apply(grad, query, key, value, mask, output, sums, ctx.scale), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _as_rows(_Forward, info.batch_size, in_dims, arguments, outputs=2)


class _Backward(torch.autograd.Function):
    """Gradients of query, key and value."""

    @staticmethod
    def forward(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        output: Tensor,
        sums: Tensor,
        scale: float,
    ) -> Heads:
        grad = grad.to(query.dtype)
        if query.device.type == "cpu":
            call = aten._scaled_dot_product_flash_attention_for_cpu_backward
            return call(
                grad, query, key, value, output, sums, 0.0, False, attn_mask=mask, scale=scale
            )
        call = aten._scaled_dot_product_efficient_attention_backward
        none = torch.zeros((), dtype=torch.int64, device=query.device)  # of a generator: there is no dropout
        mask = _aligned(mask, query, key)
        wanted = [True, True, True, False]
        return call(grad, query, key, value, mask, output, sums, none, none, 0.0, wanted, False, scale=scale)[:3]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, query, key, value, mask, _, _, ctx.scale = inputs
        ctx.save_for_backward(grad, query, key, value, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Second derivatives, by the formula."""
        *heads, mask = ctx.saved_tensors
        formula = functools.partial(_backward_formula, mask=mask, scale=ctx.scale)
        return (*torch.func.vjp(formula, *heads)[1](tuple(grads)), None, None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _as_rows(_Backward, info.batch_size, in_dims, arguments, outputs=3)


def _backward_formula(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *, mask: Any, scale: float) -> Heads:
    weights = _weights(query, key, mask, scale)
    along = grad @ value.transpose(-2, -1)
    scores = weights * (along - (along * weights).sum(-1, keepdim=True)) * scale
    return scores @ key, scores.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ grad


def _as_rows(function: Any, clients: int, in_dims: Any, arguments: Any, *, outputs: int) -> Any:
    """Call a function with the clients' axis merged into the rows'."""

    def merged(argument: Any, dim: int | None) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        if dim is None and argument.shape[0] == 1:
            return argument  # a mask for all rows is one for all clients
        stacked = argument.expand(clients, *argument.shape) if dim is None else argument.movedim(dim, 0)
        return stacked.flatten(0, 1)

    flat = [merged(argument, dim) for argument, dim in zip(arguments, in_dims)]
    rows = max(argument.shape[0] for argument in flat if isinstance(argument, Tensor))
    for place, argument in enumerate(flat):
        if isinstance(argument, Tensor) and argument.shape[0] not in (1, rows):  # one mask row for each client
            flat[place] = argument.repeat_interleave(rows // argument.shape[0], 0)
    found = function.apply(*flat)
    return tuple(part.unflatten(0, (clients, -1)) for part in found), (0,) * outputs




def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask for every head and place, in rows whose length the kernel accepts."""
    if mask is None:
        return None
    length = mask.shape[-1]
    if length % 16:
        mask = F.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
