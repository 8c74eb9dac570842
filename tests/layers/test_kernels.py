"""The Triton kernels give PyTorch's results: `interpreted_*.py`, in processes whose Triton interprets them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
APART = Path(sys.prefix) / "triton"  # where `make test` puts it: nothing else of the environment shall find it


@pytest.mark.slow
@pytest.mark.parametrize("file", ["interpreted_kernels.py", "interpreted_order_statistics.py"])
def test_kernels_give_the_results_of_torch(file: str) -> None:
    if not APART.is_dir() and importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, which `make test` installs")
    paths = [str(HERE.parents[1]), *([str(APART)] if APART.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ended = subprocess.run([*command, str(HERE / file)], env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-2000:]
    assert "passed" in ended.stdout and "skipped" not in ended.stdout
