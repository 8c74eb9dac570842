"""Real `consilience` processes, many of them, cheaply: one process imports PyTorch once and forks the others.

`python nursery.py` reads one JSON request a line: {"arguments": [...], "log": path} starts the command line in a forked
child and answers with its process id; {"wait": pid} answers with its exit code (negative: the signal that ended it).
No tensor is ever touched before a fork, so children start with no threads but their own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Nursery:
    """The side of the tests: start children, wait for them."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": root}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, *arguments: str, log: Path) -> int:
        """A child running `consilience ARGUMENTS`; its output goes to `log`."""
        return self._ask({"arguments": list(arguments), "log": str(log)})

    def wait(self, pid: int) -> int:
        """The exit code of a child."""
        return self._ask({"wait": pid})

    def run(self, *arguments: str, log: Path) -> int:
        """Start and wait."""
        return self.wait(self.start(*arguments, log=log))

    def close(self) -> None:
        """End the nursery (its children end themselves)."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the nursery ended"
        return int(answer)


def until(condition: Callable[[], bool], *, seconds: float = 60, step: float = 0.001) -> bool:
    """Wait for a condition, but not for ever; whether it came true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(step)
    return False


def alive(pid: int) -> bool:
    """Whether a child still runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _serve() -> None:
    for module in (
        "sklearn.datasets",
        "torch._dynamo",
        "consilience.experiments.runner",
        "consilience.reporting.terminal",
    ):
        importlib.import_module(module)  # whatever a child would import on its way
    with contextlib.suppress(ImportError):
        importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    from consilience.experiments.config.catalogue import listing

    listing()  # imports every recipe, data set and part
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _child(request["arguments"], request["log"])
        print(pid, flush=True)


def _child(arguments: list[str], log: str) -> None:
    """Become `consilience ARGUMENTS`."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from consilience.cli import app

        app(arguments, prog_name="consilience")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
