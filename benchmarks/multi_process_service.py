"""Runs NVIDIA's Multi-Process Service while several processes share a GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

_CONTROL = "nvidia-cuda-mps-control"
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextlib.contextmanager
def shared_gpu() -> Iterator[str]:
    """Start the service, and stop it at the end; processes started meanwhile use it. Yields what was done.

    Where it is not installed, runs already, or does not work, processes take turns on the GPU as they would anyway.
    """
    if any(name in os.environ for name in _FOLDERS):
        yield "MPS is set up already"
        return
    if shutil.which(_CONTROL) is None:
        yield f"without MPS: {_CONTROL} is not installed"
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(dict.fromkeys(_FOLDERS, folder))
        try:
            yield _started()
        finally:
            if _FOLDERS[0] in os.environ:
                _stop()


def _started() -> str:
    try:
        subprocess.run([_CONTROL, "-d"], check=True, timeout=30, capture_output=True)
        trial = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda') + 1; torch.cuda.synchronize()"]
        subprocess.run(trial, check=True, timeout=90, capture_output=True)
    except (OSError, subprocess.SubprocessError) as problem:
        _stop()
        return f"without MPS: it could not be used ({type(problem).__name__})"
    return "with MPS"


def _stop() -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([_CONTROL], input=b"quit\n", timeout=30, capture_output=True, check=False)
    for name in _FOLDERS:
        os.environ.pop(name, None)
