"""How numbers are computed on the device: precision and determinism, set for the time of an exchange only."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch
import torch.utils.deterministic

_memory: Any = torch.utils.deterministic  # its switch is a property that type stubs do not know


class Arithmetic:
    """A context in which PyTorch's global switches stand as the run wants them; afterwards they are as before.

    "full" is IEEE single (or double) precision, "tf32" lets matrix units round factors to 10 bits, "bf16" computes
    activations in bfloat16 with master weights in full. Deterministic runs repeat bit for bit on the same machine.
    """

    def __init__(self, device: torch.device, precision: str, deterministic: bool) -> None:
        self._cuda, self._fast, self._deterministic = device.type == "cuda", precision != "full", deterministic
        self._before: list[tuple[bool, bool, bool, bool, bool, bool]] = []
        if self._cuda and deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first handle is made

    def __enter__(self) -> None:
        if not self._cuda:
            return
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        self._before.append(
            (
                matmul.allow_tf32,
                cudnn.allow_tf32,
                cudnn.deterministic,
                cudnn.benchmark,
                torch.are_deterministic_algorithms_enabled(),
                _memory.fill_uninitialized_memory,
            )
        )
        self._set((self._fast, self._fast, self._deterministic, not self._deterministic, self._deterministic, False))

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._cuda:
            self._set(self._before.pop())

    @staticmethod
    def _set(switches: tuple[bool, bool, bool, bool, bool, bool]) -> None:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = switches[:4]
        torch.use_deterministic_algorithms(switches[4], warn_only=True)
        _memory.fill_uninitialized_memory = switches[5]
