"""Worker processes: requested from Ray, awaited, and dropped when their machine is lost."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from consilience.core.settings import Invalid
from consilience.engines.ray import session
from consilience.engines.ray.resources import WorkerResources
from consilience.engines.ray.worker import Worker

REPLACE_SECONDS = 60  # until the clients of a process that died move to others, if no new one has started
GRACE_SECONDS = 5  # for workers beyond `engine.min_workers` to be there from the first round
START_FAILURES = 3  # workers that may die before the first round
_POLL = 1.0
log = logging.getLogger(__name__)


class WorkerProcess:
    """Runs in a process of its own, with one `Worker` for each share of the clients that it serves."""

    def __init__(self, paths: list[str]) -> None:
        # models and rules are found where the driver finds them
        sys.path.extend(path for path in paths if path not in sys.path and os.path.exists(path))
        self._workers: dict[int, Worker] = {}
        self._problems: dict[int, Exception] = {}

    def ready(self) -> tuple[int, str, str]:
        """(process id, PyTorch's version, Ray's id of the machine)."""
        import ray

        return os.getpid(), str(torch.__version__), ray.get_runtime_context().get_node_id()

    def open(self, share: int, setup: list[Any]) -> None:
        """Serve a share; errors are raised at its first call."""
        import ray

        self.close(share)
        try:
            self._workers[share] = Worker(*ray.get(setup))  # in a list, so that it is not opened before
        except Exception as problem:
            self._problems[share] = problem

    def close(self, share: int) -> None:
        """Stop serving a share."""
        self._workers.pop(share, None)
        self._problems.pop(share, None)

    def call(self, share: int, method: str, *arguments: Any, **named: Any) -> Any:
        """A method of a share's worker."""
        if share in self._problems:
            raise self._problems[share]
        return getattr(self._workers[share], method)(*arguments, **named)


class Process:
    """One worker's process, as the driver knows it."""

    def __init__(self, actor: Any, machine: str | None) -> None:
        self.actor, self.machine = actor, machine  # machine: the one it must run on
        self.started = actor.ready.remote()
        self.pid, self.node = 0, ""


class Processes:
    """Processes with equal resources: those that are `running`, and those that Ray has not found room for yet."""

    def __init__(self, resources: WorkerResources) -> None:
        import ray
        from ray import exceptions

        self._ray, self.resources = ray, resources
        self.dead = (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.OutOfMemoryError,
            exceptions.NodeDiedError,
        )
        self._actor: Any = ray.remote(WorkerProcess)
        self.running: list[Process] = []
        self._starting: list[Process] = []

    def spawn(self, machine: str | None = None) -> Process:
        """Ask for a process, on this machine or anywhere."""
        options = {"max_restarts": 0, "max_task_retries": 0, **self.resources.options(machine)}
        made = Process(self._actor.options(**options).remote([path for path in sys.path if path]), machine)
        self._starting.append(made)
        return made

    def begin(self, machines: Sequence[str | None], least: int) -> None:
        """Start one process on each of these machines (None: anywhere), and wait for `least` of them."""
        for machine in machines:
            self.spawn(machine)
        end, failures = time.monotonic() + session.START_SECONDS, 0
        while len(self.running) < least and time.monotonic() < end:
            for process, problem in self._wait(self._starting, least - len(self.running), end - time.monotonic()):
                failures += 1
                if failures == START_FAILURES:
                    raise Invalid(f"a worker of engine = 'ray' could not start: {problem}") from problem
                self.spawn(process.machine)  # its machine may have died
        self._wait_or_drop(self._starting, GRACE_SECONDS)
        if len(self.running) < least:
            raise Invalid(
                f"{len(self.running)} of {len(machines)} workers of engine = 'ray' were ready after "
                f"{session.START_SECONDS} s: others use the cluster's cores or GPUs, so use fewer workers, or wait"
            )

    def joined(self) -> list[Process]:
        """Processes that have started since the last call."""
        if not self._starting:
            return []
        before = list(self.running)
        self._wait_or_drop(self._starting, 0.0)
        return [process for process in self.running if process not in before]

    def missing(self, wanted: int) -> int:
        """How many of the wanted processes neither run nor start."""
        return wanted - len(self.running) - len(self._starting)

    def drop(self, gone: Sequence[Process]) -> None:
        """Drop processes that have died or cannot be reached."""
        for process in gone:
            self.running.remove(process)
            self._kill(process)

    def fill(self, machines: Sequence[str | None]) -> None:
        """Ask for processes, and wait for them as long as there is room, at most `REPLACE_SECONDS`."""
        fresh = [self.spawn(machine) for machine in machines]
        end = time.monotonic() + REPLACE_SECONDS
        while (waiting := [p for p in fresh if p in self._starting]) and time.monotonic() < end:
            self._wait_or_drop(waiting, _POLL)
            if self._room() <= 0:
                break

    def lost(self) -> list[Process]:
        """Processes whose machine is lost."""
        known = session.machines()
        return [process for process in self.running if process.node not in known]

    def shutdown(self) -> None:
        """Stop all processes."""
        for process in (*self.running, *self._starting):
            self._kill(process)
        self.running, self._starting = [], []

    def _room(self) -> int:
        """How many more could run on the machines that there are, if nothing else used them."""
        return self.resources.capacity(session.machines().values()) - len(self.running)

    def _wait_or_drop(self, wanted: Sequence[Process], seconds: float) -> None:
        """Wait for all of these; one that dies while it starts is dropped."""
        for _, problem in self._wait(wanted, len(wanted), seconds):
            log.warning("a worker could not start: %s", str(problem).partition("\n")[0])

    def _wait(self, wanted: Sequence[Process], least: int, seconds: float) -> list[tuple[Process, Exception]]:
        """Wait until `least` of those that are starting are ready, and note them; (process, why) of failures."""
        failed: list[tuple[Process, Exception]] = []
        by_call = {process.started: process for process in wanted}
        if not by_call:
            return failed
        ready, _ = self._ray.wait(list(by_call), num_returns=min(least, len(by_call)), timeout=seconds)
        if len(ready) < len(by_call):  # some more may be ready by now
            ready, _ = self._ray.wait(list(by_call), num_returns=len(by_call), timeout=0)
        for call in ready:
            process = by_call[call]
            self._starting.remove(process)
            try:
                process.pid, version, process.node = self._ray.get(call)
            except self.dead as problem:
                failed.append((process, problem))
                continue
            if version != str(torch.__version__):
                raise Invalid(
                    f"a worker has PyTorch {version} and this machine {torch.__version__}: install the same version "
                    "everywhere"
                )
            self.running.append(process)
        return failed

    def _kill(self, process: Process) -> None:
        self._ray.kill(process.actor)
