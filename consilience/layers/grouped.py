"""Operations that treat a group of clients as a whole where vmap has no rule, or would call a kernel for each client.

A call gets its inputs with the clients stacked in front, and gives its gradient in the same form:

    call.forward(clients, *inputs) -> outputs           clients: how many, or None for one client without that dimension
    call.backward(*gradients) -> gradients by the inputs
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack


TRITON_SINCE = (8, 0)  # compute capability of the oldest GPUs for which Triton compiles


def runs_kernels(x: Tensor) -> bool:
    """Whether kernels of ours can run where x is: PyTorch's builds for CUDA bring Triton along."""
    return x.is_cuda and _compiles_for(x.device)


@functools.cache
def _compiles_for(device: torch.device) -> bool:
    able = torch.cuda.get_device_capability(device) >= TRITON_SINCE
    return able and importlib.util.find_spec("triton") is not None


@contextlib.contextmanager
def kernel_errors() -> Iterator[None]:
    """A kernel that this GPU cannot run is an error like those of torch, after which `auto` takes another lane."""
    import triton

    try:
        yield
    except triton.TritonError as problem:
        raise RuntimeError(f"a Triton kernel cannot run on this GPU: {problem}") from problem


def grouped() -> bool:
    """Whether this is a group of clients: one vmap, and inside it at most one gradient."""
    levels = [level.key() for level in get_interpreter_stack() or ()]
    return levels in ([TransformType.Vmap], [TransformType.Vmap, TransformType.Grad])


def apply(call: Any, *inputs: Tensor | None) -> Any:
    """The call's outputs, differentiable by its inputs."""
    return _Operation.apply(call, *inputs)


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(call: Any, *inputs: Tensor | None) -> Any:
        return call.forward(None, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Any, *inputs: Any) -> tuple[Any, Any]:
        found = call.forward(info.batch_size, *_stacked(inputs, in_dims[1:], info.batch_size))
        return found, (0,) * len(found) if isinstance(found, tuple) else 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, *_Gradient.apply(ctx.call, *grads))


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(call: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return call.backward(*grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Any, *grads: Any) -> tuple[Any, Any]:
        found = call.backward(*_stacked(grads, in_dims[1:], info.batch_size))
        return found, tuple(None if part is None else 0 for part in found)


def _stacked(parts: tuple[Any, ...], dims: tuple[Any, ...], clients: int) -> list[Any]:
    """[clients, ...] of a value per client, or of one shared by all."""
    return [
        None if part is None else part.expand(clients, *part.shape) if dim is None else part.movedim(dim, 0)
        for part, dim in zip(parts, dims)
    ]
