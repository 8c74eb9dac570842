"""Randomness inside a module: torch's random operations, drawn from the batch's key instead of a global generator.

`KeyedDraws` is active while `Task` runs a module. Every random operation that the module calls (`torch.randn_like`,
`F.dropout`, `Tensor.bernoulli_`, the dropout inside an attention or an LSTM ...) is replaced by one that draws from the
key, the number of the call within the pass, and the position in the tensor: the same values in every lane, on every
device, in every repetition. `Guard` finds what was not replaced and refuses it by name.
"""

from __future__ import annotations

import functools
import random
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from consilience.core import rng
from consilience.core.settings import Invalid
from consilience.layers.exact import refuse_recomputing
from consilience.layers.random_operations import NESTED, REPLACED, name_of

CALL = 2**41  # apart from the numbers of dropout layers and of layers that vary pictures


class KeyedDraws(TorchFunctionMode):
    """Random operations draw from `key`; without one they are refused. `mask`: which rows of the batch are live."""

    def __init__(self, key: Tensor | None, mask: Tensor | None = None) -> None:
        super().__init__()
        self._key, self.mask, self._calls = key, mask, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here: saves the import of the compiler

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = REPLACED.get(func)
        if replacement is not None:
            if kwargs.get("generator") is not None:
                raise Invalid(
                    f"{name_of(func)} draws from a generator of the module's own, so no two runs would agree: leave "
                    "out generator=..., and the batch's key is used"
                )
            return replacement(self, func, *args, **kwargs)
        if func in NESTED:
            with self:  # the operations inside are seen, too
                return _unchecked(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def key(self, func: Any) -> Tensor:
        """The key of the next call."""
        if self._key is None:
            raise Invalid(
                f"a model that draws random numbers ({name_of(func)}) was trained without a key: "
                "pass Task.apply(..., key=batch.key)"
            )
        refuse_recomputing(name_of(func))
        self._calls += 1
        return rng.fold(self._key, CALL + self._calls)

    def permutation(self, func: Any, length: int) -> Tensor:
        """A random permutation of `length` items; for a padded batch, of its live rows only."""
        rows = self.mask is not None and self.mask.shape[0] == length
        key = self.key(func)
        live = self.mask.sum().to(torch.int64) if rows else torch.full((), length, device=key.device)  # type: ignore[union-attr]
        return rng.permutations(key, live, length)

    def spread(self, value: Tensor) -> Tensor:
        """A tensor with a copy for each client of a group, into which values of its own can be written."""
        if self._key is None or self._key.device != value.device:
            return value
        return torch.where(self._key == 0, value, value)


class Guard(TorchDispatchMode):
    """Refuses a module that draws from anything but the key: torch's, NumPy's or Python's global generators."""

    def __init__(self, module: str, device: torch.device) -> None:
        super().__init__()
        self._module, self._device, self._seen = module, device, dict[str, None]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Guard:
        self._before = _generators(self._device)
        super().__enter__()
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        moved = [name for name, state in _generators(self._device).items() if state != self._before[name]]
        if moved and kind is None:
            names = ", ".join(self._seen) or "by an operation that does not say so"
            raise Invalid(
                f"{self._module} draws from {' and '.join(moved)}'s global generator"
                + (f" ({names})" if moved == ["torch"] else "")
                + ", so no two runs would agree: use torch.rand, torch.randn, torch.bernoulli or F.dropout, "
                "which are drawn from the batch's key"
            )

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in op.tags:
            self._seen[str(op)] = None
        return op(*args, **(kwargs or {}))


def _generators(device: torch.device) -> dict[str, Any]:
    host: Any = np.random.get_state(legacy=True)
    with torch._C._DisableFuncTorch():
        torchs: Any = torch.default_generator.get_state().numpy().tobytes()
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torchs = (torchs, torch.cuda.default_generators[index].get_offset())
    return {"torch": torchs, "NumPy": (host[1].tobytes(), host[2]), "Python": random.getstate()}


@functools.cache
def _unchecked(func: Any) -> Any:
    """The function without its override check, which would call this mode again."""
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
    copy = types.FunctionType(func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False
