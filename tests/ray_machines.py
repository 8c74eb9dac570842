"""Ray clusters of several machines on this one, for tests: each machine is a raylet of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

QUICK = {  # a machine that is gone is noticed in a second
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
STORE = 100 * 2**20


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
        """End all processes of all machines."""
        self._cluster.shutdown()


def _machine(resources: dict[str, Any]) -> dict[str, Any]:
    return {"node_ip_address": "127.0.0.1", "object_store_memory": STORE, **resources}


@contextlib.contextmanager
def machines(**head: Any) -> Iterator[Machines]:
    """A cluster that is shut down at the end; its processes find this package, and send no statistics."""
    from consilience.engines.ray import session

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, value in session._import_path().items():
            patched.setenv(name, value)
        made = Machines(**head)
        try:
            yield made
        finally:
            made.shutdown()
