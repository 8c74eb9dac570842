"""A traced step run by PyTorch's own interpreter, so that threads do not compete for Python's global lock.

It pays: with the lock, two threads together did 1.4 times the work of one on the small MLP; without it, twice the work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from consilience.engines.compiler.trace import Flat, recurrent_layer


def without_lock(module: fx.GraphModule, *arguments: Flat) -> Callable[..., Any] | None:
    """The module's function of all tensors among the arguments; None if it cannot be converted.

    The arguments are examples; they are not changed.
    """
    if any(node.target is recurrent_layer for node in module.graph.nodes):  # its mode would be lost
        return None
    values = [leaf for flat in arguments for leaf in flat]
    given = tuple(value.clone() for value in values if value is not None)

    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            convertible = _OfTensors(module, values)
            script: Any = torch.jit.trace(convertible, given, check_trace=False, strict=False)
            torch._C._jit_pass_inline(script.graph)  # before the functions for operations with flags are gone
    except Exception:
        return None
    return lambda *flat: script(*(leaf for leaf in flat if leaf is not None))


class _OfTensors(nn.Module):
    """The module as a function of tensors alone, since the conversion takes nothing else."""

    def __init__(self, module: fx.GraphModule, arguments: Flat) -> None:
        super().__init__()
        self.module, self._given = module, [argument is not None for argument in arguments]
        self.functions: list[Any] = []

    def forward(self, *tensors: Tensor) -> Any:
        """The module's value."""
        rest = iter(tensors)
        return _Convertible(self.module, self.functions).run(*(next(rest) if given else None for given in self._given))


class _Convertible(fx.Interpreter):
    """The operations one by one, those that the conversion refuses as functions that it accepts."""

    def __init__(self, module: fx.GraphModule, functions: list[Any]) -> None:
        super().__init__(module)
        self._functions = functions  # which last as long as the list

    def run_node(self, node: fx.Node) -> Any:
        """One operation's value."""
        if node.op != "call_function" or not any(map(_is_flags, node.args)):
            return super().run_node(node)
        inputs, _ = self.fetch_args_kwargs_from_env(node)
        return _with_flags(node, inputs, self._functions)


def _is_flags(argument: Any) -> bool:
    """Flags say which gradients are wanted: of a convolution's picture, weight and bias."""
    return isinstance(argument, (list, tuple)) and any(isinstance(value, bool) for value in argument)


def _with_flags(node: fx.Node, inputs: tuple[Any, ...], functions: list[Any]) -> dict[int, Any]:
    """The results that are used, by position: the others are undefined."""
    positions: list[Any] = [user.args[1] for user in node.users]
    wanted = sorted(set(positions))
    names = [f"t{at}" if isinstance(part, fx.Node) else repr(part) for at, part in enumerate(node.args)]
    tensors = {name: value for name, value, part in zip(names, inputs, node.args) if isinstance(part, fx.Node)}
    name = str(node.target).split(".")[1]
    source = f"""
def {node.name}({", ".join(f"{name}: Tensor" for name in tensors)}):
    found = torch.ops.aten.{name}({", ".join(names)})
    return [{", ".join(f"found[{at}]" for at in wanted)}]
"""
    functions.append(torch.jit.CompilationUnit(source))
    return dict(zip(wanted, getattr(functions[-1], node.name)(*tensors.values())))
