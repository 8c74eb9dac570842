"""The gradient of a local objective, by the cheapest method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad
from torch.utils import _pytree as pytree

from consilience.core.tree import Tree, leaves, map_leaves

Objective = Callable[[Tree], tuple[Tensor, Any]]


def gradient(objective: Objective, params: Tree) -> tuple[Tree, Any]:
    """(gradient by the parameters, auxiliary output of the objective); unused parameters have gradient 0.

    Inside a transform such as vmap, or where this gradient is differentiated, it is `torch.func.grad`.
    Otherwise it is ordinary backpropagation: the same kernels without the transform's overhead.
    """
    if torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return grad(objective, has_aux=True)(params)
    with torch.enable_grad():
        inputs = map_leaves(lambda value: value.detach().requires_grad_(), params)
        value, extra = objective(inputs)
        flat = list(leaves(inputs))
        none = (None,) * len(flat)
        found = torch.autograd.grad(value, flat, allow_unused=True) if value.requires_grad else none
    grads = iter([torch.zeros_like(v) if g is None else g for v, g in zip(flat, found)])
    return map_leaves(lambda _: next(grads), params), pytree.tree_map_only(Tensor, Tensor.detach, extra)
