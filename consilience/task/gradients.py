"""The gradient of a local objective, by the cheapest method."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.func import grad
from torch.utils import _pytree as pytree

from consilience.core.tree import Tree, leaves, map_leaves

Objective = Callable[[Tree], tuple[Tensor, Any]]


def gradient(objective: Objective, params: Tree) -> tuple[Tree, Any]:
    """(gradient by the parameters, auxiliary output of the objective); unused parameters have gradient 0.

    Inside a transform such as vmap, or where this gradient is differentiated, it is that of `torch.func.grad`.
    Otherwise it is ordinary backpropagation: the same kernels without the transform's overhead.
    """
    if torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return _transformed(objective, params)
    with torch.enable_grad():
        inputs = map_leaves(lambda value: value.detach().requires_grad_(), params)
        value, extra = objective(inputs)
        flat = list(leaves(inputs))
        none = (None,) * len(flat)
        found = torch.autograd.grad(value, flat, allow_unused=True) if value.requires_grad else none
    grads = iter([torch.zeros_like(v) if g is None else g for v, g in zip(flat, found)])
    return map_leaves(lambda _: next(grads), params), pytree.tree_map_only(Tensor, Tensor.detach, extra)


def _transformed(objective: Objective, params: Tree) -> tuple[Tree, Any]:
    """What `torch.func.grad` computes, by the same operations.

    It imports PyTorch's compiler (0.8 s) only to switch off compiled backpropagation, which is off while nothing has
    imported the compiler.
    """
    if "torch._dynamo" in sys.modules:
        return grad(objective, has_aux=True)(params)
    hooks = torch.autograd.graph.disable_saved_tensors_hooks("saved tensors are not supported by transforms")
    with hooks, eager_transforms.grad_increment_nesting() as level, torch.enable_grad():
        inputs = eager_transforms._wrap_all_tensors(params, level)
        pytree.tree_map_only(Tensor, eager_transforms._create_differentiable, inputs)
        value, extra = objective(inputs)
        flat, form = pytree.tree_flatten(inputs)
        none = (None,) * len(flat)
        # create_graph, since this gradient may be differentiated by a transform around it
        found = torch.autograd.grad(value, flat, create_graph=True, allow_unused=True) if value.requires_grad else none
        grads = [torch.zeros_like(v) if g is None else g for v, g in zip(flat, found)]
        return eager_transforms._undo_create_differentiable((pytree.tree_unflatten(grads, form), extra), level)
