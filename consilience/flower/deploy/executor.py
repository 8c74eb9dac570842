"""Warm clients: Flower's SuperExec, which starts a process for every message, as copies of one that has imported torch.

Flower's own executors start a fresh interpreter each time (its warm pools are for Kubernetes, and not for ClientApps).
This is `flower-superexec` with the same arguments, for a SuperNode that was started with `--isolation process`; tasks,
tokens, heartbeats and transport are Flower's. Linux only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from typing import Any, NoReturn

PRELOADED = (
    *("torch", "sklearn.datasets", "consilience.flower.deploy.hosting", "consilience.experiments.config.catalogue"),
    "flwr.client.mod",  # with what secure sums need
)


def is_possible() -> bool:
    """Whether a fork of a process that has loaded torch is safe here, and this Flower has what is replaced."""
    if sys.platform != "linux":
        return False
    try:
        from flwr.supercore.superexec import run_superexec
        from flwr.supernode.runtime import run_clientapp
    except ImportError:
        return False
    return hasattr(run_superexec, "get_executor") and hasattr(run_clientapp, "run_clientapp")


class ForkingExecutor:
    """Flower's subprocess executor, but ClientApps run in forks of this process."""

    def __init__(self) -> None:
        from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

        self._fresh = SubprocessExecutor()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fresh, name)

    def launch(self, spec: Any) -> Any:
        """Start what the spec describes."""
        from flwr.supercore.constant import TaskType
        from flwr.supercore.superexec.executor.types import LaunchResult

        if spec.task_type != TaskType.CLIENT_APP:
            return self._fresh.launch(spec)
        parent = os.getpid()
        if os.fork() == 0:
            _answer(spec, parent)
        return LaunchResult.accepted()


def _answer(spec: Any, parent: int) -> NoReturn:
    """The child: one message, then the end, whatever happens."""
    code = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        from flwr.supercore.tls import validate_and_resolve_root_certificates
        from flwr.supernode.runtime.run_clientapp import run_clientapp

        run_clientapp(
            runtime_api_address=spec.runtime_api_address,
            token=spec.token,
            insecure=spec.insecure,
            certificates=validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure),
            parent_pid=parent,
            runtime_dependency_install=spec.runtime_dependency_install,
        )
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        os._exit(code)


def main() -> None:
    """`flower-superexec`, warm."""
    for module in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec import run_superexec

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended are not kept
    run_superexec.get_executor = lambda *_, **__: ForkingExecutor()
    flower_superexec()


if __name__ == "__main__":
    main()
