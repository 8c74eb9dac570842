"""Ray clusters of several machines on this one, for tests: each machine is a raylet of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from consilience.engines.ray import session

QUICK = {  # a machine that is gone is noticed in a second
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
STORE = 100 * 2**20
LOOPBACK = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""By which Ray sends no statistics, and its processes are reached from this machine alone."""


class Machines:
    """A head, on which the driver is, and machines that join and die."""

    def __init__(self, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        given = {"include_dashboard": False, "_system_config": QUICK, **_machine(head)}
        self._cluster = Cluster(initialize_head=True, head_node_args=given)
        self.address = str(self._cluster.address)

    def add(self, **resources: Any) -> Any:
        """One machine more."""
        return self._cluster.add_node(**_machine(resources))

    def kill(self, machine: Any) -> None:
        """Kill a machine's raylet, and wait until the cluster knows."""
        import ray

        (raylet,) = machine.all_processes["raylet"]
        os.kill(raylet.process.pid, signal.SIGKILL)
        for _ in range(300):
            if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == machine.node_id):
                return
            time.sleep(0.1)
        raise AssertionError("the cluster still believes in a machine that was killed")

    def shutdown(self) -> None:
        """End all processes of all machines; the driver first, which ends when its own machine does."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()


def _machine(resources: dict[str, Any]) -> dict[str, Any]:
    return {"node_ip_address": "127.0.0.1", "object_store_memory": STORE, **resources}


@contextlib.contextmanager
def machines(**head: Any) -> Iterator[Machines]:
    """A cluster that is shut down at the end; its processes find this package, and send no statistics."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, value in session._import_path().items():
            patched.setenv(name, value)
        made = Machines(**head)
        try:
            yield made
        finally:
            made.shutdown()


@contextlib.contextmanager
def autoscaled(*, cpus: int, most: int) -> Iterator[str]:
    """The address of a cluster whose autoscaler starts up to `most` machines, with so many cores each, on this one."""
    port = free_port()
    folder = Path("/tmp") / f"ray-{port}"  # paths of sockets must be short
    folder.mkdir()
    (folder / "autoscaler.json").write_text(json.dumps(_autoscaling(port, cpus, most)), encoding="utf-8")
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--node-ip-address=127.0.0.1", "--block"]
    command += [f"--port={port}", f"--num-cpus={cpus}", f"--object-store-memory={STORE}", "--include-dashboard=false"]
    surroundings = {
        **os.environ,
        **session._import_path(),
        **LOOPBACK,
        "RAY_TMPDIR": str(folder),
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    with (folder / "log").open("w") as log:
        head = subprocess.Popen(
            [*command, f"--autoscaling-config={folder / 'autoscaler.json'}"], env=surroundings, stdout=log, stderr=log
        )
    try:
        _wait_for(head, port)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(60)
        for pid in processes_of(folder, wait=5):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(head: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        assert head.poll() is None, "the head ended"
        time.sleep(0.1)
    raise AssertionError("the head does not answer")


def _autoscaling(port: int, cpus: int, most: int) -> dict[str, Any]:
    lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    one = {"resources": {"CPU": cpus}, "node_config": {}, "min_workers": 0}
    return {
        "cluster_name": "here",
        "max_workers": most,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"127.0.0.1:{port}",
            "disable_node_updaters": True,
        },
        "available_node_types": {"ray.head.default": {**one, "max_workers": 0}, "more": {**one, "max_workers": most}},
        "head_node_type": "ray.head.default",
        "upscaling_speed": 10,
        "idle_timeout_minutes": 1,
        **dict.fromkeys(("auth", "docker", "file_mounts"), {}),  # noqa: RUF024
        **{f"{name}_commands": [] for name in lists},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
    }


def free_port() -> int:
    """A port of this machine that nothing uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def processes_of(folder: Path, *, wait: float) -> list[int]:
    """Processes with this folder in their command line that still run after so many seconds."""
    end = time.monotonic() + wait
    while found := [pid for pid, words in _commands() if f"{folder}/".encode() in words]:
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return found


def _commands() -> Iterator[tuple[int, bytes]]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(process.name), (process / "cmdline").read_bytes()
