"""Ray itself: started on this machine, or joined where it runs already, and shut down after its last use."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consilience.core.settings import Invalid

CONNECT_SECONDS = 10  # until a cluster must answer
START_SECONDS = 300  # until all workers must have started
_LEAST_STORE = 80 * 2**20  # Ray refuses less
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
log = logging.getLogger(__name__)
_users = 0
_started = False


def require_ray() -> Any:
    """The Ray package, or an error that says what to install."""
    try:
        import ray
    except ImportError as problem:
        raise Invalid('engine = "ray" needs Ray, which is not installed: pip install "consilience[ray]"') from problem
    return ray


def join(address: str | None, cpus: int) -> None:
    """Make sure that Ray runs: at `address`, or on this machine with room for `cpus` threads."""
    global _users, _started
    ray = require_ray()
    if not ray.is_initialized():
        with _own_signals():
            _start(ray, address, cpus)
        _started = True
    _users += 1


def leave() -> None:
    """Shut down what `join` started, after the last user has left."""
    global _users, _started
    _users -= 1
    if _users <= 0 and _started:
        require_ray().shutdown()
        _users, _started = 0, False


def machines() -> dict[str, dict[str, float]]:
    """The whole resources of every machine of the cluster that is alive, by Ray's id of it."""
    return {node["NodeID"]: node["Resources"] for node in require_ray().nodes() if node["Alive"]}


def _start(ray: Any, address: str | None, cpus: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns that this will be its default
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        try:
            found = _reachable(address)
            # of a cluster on this machine alone, Ray would look for another address that others can reach, in vain
            with _on_loopback() if _is_loopback(found) else contextlib.nullcontext():
                ray.init(address=found, **quiet)
        except (ConnectionError, ValueError, RuntimeError, OSError) as problem:
            reason = str(problem).partition("\n")[0]
            raise Invalid(
                f"engine.address = {address!r} does not answer ({reason}): start a cluster there"
            ) from problem
        return
    with _on_loopback():
        _start_here(ray, cpus, quiet)


def _reachable(address: str) -> str:
    """The address, "auto" as host:port; one where nothing listens is refused: Ray itself would try for minutes."""
    if address.startswith("ray://"):
        raise Invalid(
            f"engine.address = {address!r} is Ray's client mode, in which every reply would pass through one process: "
            "run consilience on a machine of the cluster, with engine.address = 'auto'"
        )
    if address == "auto":
        from ray._private import services

        address = services.get_ray_address_from_environment("auto", None) or address
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    return address


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0].strip("[]") in ("localhost", "127.0.0.1", "::1")


def _start_here(ray: Any, cpus: int, quiet: dict[str, Any]) -> None:
    ray.init(
        address="local",  # whatever else runs on this machine
        num_cpus=max(cpus, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=_store_bytes(),
        **quiet,
    )
    found = [node["NodeManagerAddress"] for node in ray.nodes()]
    if any(not address.startswith("127.") and address != "::1" for address in found):
        log.warning("Ray listens on %s, not on this machine alone: anyone who can reach it can run code", found)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's signal handlers: Ray installs its own, by which SIGTERM aborts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray listen on this machine only, which it does where clusters are marked as not supported."""
    constants = sys.modules.get("ray._private.ray_constants")
    believed = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    if believed is not None:
        constants.ENABLE_RAY_CLUSTER = False  # type: ignore[union-attr]
    inherited = {_CLUSTERS: "0", **_import_path()}  # by the processes that Ray starts
    before = {name: os.environ.get(name) for name in inherited}
    os.environ.update(inherited)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        if believed is not None:
            constants.ENABLE_RAY_CLUSTER = believed  # type: ignore[union-attr]


def _import_path() -> dict[str, str]:
    """Where workers find this package, if it is not installed."""
    above = str(Path(__file__).resolve().parents[2])
    if Path(above).name in ("site-packages", "dist-packages"):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH"))))}


def _store_bytes() -> int:
    """A third of the free memory, and no more than the shared memory that the system has for it."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        free = 4 * 2**30
    if os.path.isdir("/dev/shm"):
        free = min(free, 3 * shutil.disk_usage("/dev/shm").free)
    return max(_LEAST_STORE, free // 3)
