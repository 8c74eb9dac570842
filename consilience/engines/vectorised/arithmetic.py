"""Arithmetic during an exchange: precision, determinism, and the CPU's memory allocator."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import weakref
from types import TracebackType
from typing import Any, Literal

import torch
import torch.utils.deterministic

from consilience.core.settings import Invalid, nearest

PRECISIONS = ("auto", "full", "tf32", "bf16")
Precision = Literal["auto", "full", "tf32", "bf16"]
TF32_SINCE = (8, 0)  # compute capability of the first GPUs whose matrix units round to 10 bits
_memory: Any = torch.utils.deterministic  # its switch is a property that type stubs do not know


class Arithmetic:
    """A context that sets PyTorch's global switches for the run and restores them afterwards.

    "full" is IEEE single (or double) precision, "tf32" lets matrix units round factors to 10 bits, "bf16" computes
    activations in bfloat16 with master weights in full. Deterministic runs repeat bit for bit on the same machine.
    On a processor, memory that is freed during or after a run's first exchange is kept for the next step and the next
    round, and is returned to the system when the engine is no longer in use.
    """

    def __init__(self, device: torch.device, precision: str, deterministic: bool) -> None:
        self._cuda, self._fast, self._deterministic = device.type == "cuda", precision != "full", deterministic
        self._before: list[tuple[bool, ...]] = []
        self._kept: weakref.finalize[[], Arithmetic] | None = None
        prepare_libraries(device, deterministic)

    def __enter__(self) -> None:
        if not self._cuda:
            _set_allocator(_KEEPING)
            self._kept = self._kept or weakref.finalize(self, _release_freed_memory)
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
                torch.backends.cuda.cudnn_sdp_enabled(),
            )
        )
        exact = self._deterministic  # cuDNN's attention adds in any order; the other kernels can do without
        self._set((self._fast, self._fast, exact, not exact, exact, False, not exact))

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._cuda:
            self._set(self._before.pop())

    @staticmethod
    def _set(switches: tuple[bool, ...]) -> None:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = switches[:4]
        torch.use_deterministic_algorithms(switches[4], warn_only=True)
        _memory.fill_uninitialized_memory = switches[5]
        torch.backends.cuda.enable_cudnn_sdp(switches[6])


def resolve_precision(precision: str, device: torch.device, dtype: torch.dtype) -> str:
    """What "auto" is on a device: "tf32" in float32 on a GPU that has it, else "full"; others are themselves."""
    if precision not in PRECISIONS:
        raise Invalid(
            f"precision = {precision!r} is not one of {', '.join(PRECISIONS)}{nearest(precision, PRECISIONS)}"
        )
    if precision != "auto":
        return precision
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= TF32_SINCE
    return "tf32" if able and dtype == torch.float32 else "full"


def prepare_libraries(device: torch.device, deterministic: bool) -> None:
    """Make cuBLAS deterministic before its first use in this process."""
    if device.type == "cuda" and deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first handle is made


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # <malloc.h>
_SYSTEM = {_TRIM_THRESHOLD: 128 * 1024, _TOP_PAD: 128 * 1024, _MMAP_MAX: 65536}  # what glibc starts with
# glibc takes every large tensor from the system page by page and gives it back when it is freed: gradients of a dense
# layer, at every step. Two threads that do so wait for each other: a third of the time, measured. Replies that are
# freed between two rounds: 4 % of the time.
_KEEPING = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * 2**20, _MMAP_MAX: 0}


@functools.cache
def _allocator() -> Any:
    """glibc with its `mallopt`; None with another C library."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") else None


def _release_freed_memory() -> None:
    _set_allocator(_SYSTEM)
    if _allocator() is not None:
        _allocator().malloc_trim(0)


def _set_allocator(options: dict[int, int]) -> None:
    if _allocator() is not None:
        for option, value in options.items():
            _allocator().mallopt(option, value)
