"""Real processes: a SuperLink that is killed, replies that drip, a node that is stopped, clocks that differ."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_deployments import digest_here, digest_of, end, ended, rows, until, write_app

from consilience.flower.deploy.local_deployment import LocalDeployment
from consilience.flower.deploy.processes import Process
from consilience.flower.deploy.up import facts_of

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
pytestmark = pytest.mark.slow

ODD_MACHINE = '''
"""A machine whose clock is wrong, and whose line drips while a file is there: read by every Python that starts."""
import datetime
import os
import time
from pathlib import Path

shift, drip = float(os.environ.get("TEST_SHIFT", "0")), os.environ.get("TEST_DRIP", "")
if shift:
    from flwr.supercore import date

    right_time, right_now = time.time, date.now
    time.time = lambda: right_time() + shift
    date.now = lambda: right_now() + datetime.timedelta(seconds=shift)
if drip:
    from flwr.supernode.fleet_http_client import FleetHttpClient

    push = FleetHttpClient.PushObject

    def slowly(self, request):
        if Path(drip).exists():
            Path(drip + ".reached").touch()
            time.sleep(4)
        return push(self, request)

    FleetHttpClient.PushObject = slowly
'''


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return write_app(tmp_path / "app")


@contextlib.contextmanager
def odd(place: Path, **settings: object) -> Iterator[None]:
    """Whatever is started meanwhile runs on an odd machine."""
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(ODD_MACHINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
        for key, value in settings.items():
            patch.setenv(key, str(value))
        yield


class Federation(LocalDeployment):
    """A local deployment of two clients, some of whose nodes run under other conditions."""

    def __init__(self, app: Path, place: Path, machines: dict[int, dict[str, object]], **settings: Any) -> None:
        super().__init__(app, shares=[[0], [1]], place=place / "stage", **settings)
        self.odd, self.machines = place / "odd", machines

    def start_node(self, number: int, **settings: Any) -> Process:
        if number not in self.machines:
            return super().start_node(number, **settings)
        with odd(self.odd, **self.machines[number]):
            return super().start_node(number, **settings)


def finished(folder: Path, running: Process, seconds: float) -> None:
    until(lambda: facts_of(folder).get("status") == "finished", seconds, unless=lambda: ended(running))


# --- row 38: the SuperLink is killed under a live run ----------------------------------------------------------------


def test_row_38_a_superlink_with_its_state_in_a_file_comes_back_and_the_run_goes_on(app: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "real"
    with LocalDeployment(app, shares=[[0], [1]], place=tmp_path / "stage", lasting=True) as stage:
        running = stage.run(runs=str(tmp_path / "runs"))
        until(lambda: len(rows(folder)) >= 1, 150, unless=lambda: ended(running))
        server = facts_of(folder)["server_pid"]
        stage.servers.add(server)
        assert stage.link is not None
        os.killpg(stage.link.pid, signal.SIGKILL)
        stage.restart_link()
        until(lambda: facts_of(folder).get("status") == "finished", 150)
        assert facts_of(folder)["server_pid"] == server  # the same ServerApp, which never stopped
        assert all(node.code is None for node in stage.nodes)
    found = rows(folder)
    assert [row["round"] for row in found] == [1, 2, 3] and [row["cohort"] for row in found] == [[0, 1]] * 3
    assert all(row["memory_lost"] == row["silent"] == 0 and row["rejected"] == {} for row in found)
    assert digest_of(folder) == digest_here(app)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_row_38_a_superlink_with_its_state_in_memory_dies_and_the_launcher_begins_again_once(
    app: Path, tmp_path: Path
) -> None:
    folder, said = app / "runs" / "real", tmp_path / "up.log"
    command = [sys.executable, "-m", "consilience", "deploy", "up", str(app), "--local", "2", "--insecure"]
    with open(said, "w") as log:
        launched = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
    try:
        died = lambda: "" if launched.poll() is None else said.read_text()  # noqa: E731
        until(lambda: (folder / "checkpoints" / "round-00000001").exists(), 150, unless=died)
        first = facts_of(folder)["server_pid"]
        (link,) = [pid for pid in children(launched.pid) if "flower-superlink" in command_of(pid)]
        os.kill(link, signal.SIGKILL)
        assert launched.wait(200) == 0, said.read_text()
    finally:
        end(launched)
    assert said.read_text().count("the SuperLink died; starting again from the last checkpoint, once") == 1
    assert "continuing after round" in said.read_text()
    assert facts_of(folder)["server_pid"] != first and not Path(f"/proc/{first}").exists()
    found = rows(folder)
    assert [row["round"] for row in found] == [1, 2, 3]
    assert all(row["memory_lost"] == row["silent"] == 0 and row["rejected"] == {} for row in found)
    assert digest_of(folder) == digest_here(app)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


# --- row 34: replies that drip, nodes that stand still ---------------------------------------------------------------


def seconds_of(folder: Path) -> list[float]:
    """What each round's training exchange took."""
    return [json.loads(line)["seconds"] for line in (folder / "timing.jsonl").read_text().splitlines()]


def test_row_34_a_reply_that_drips_is_cut_at_the_deadline_and_holds_up_nobody(app: Path, tmp_path: Path) -> None:
    """Client 0's node sends the header of its reply at once, and then a tensor every 4 seconds."""
    drip, folder = tmp_path / "drip", tmp_path / "runs" / "real"
    with Federation(app, tmp_path, {0: {"TEST_DRIP": drip}}, secure=False) as stage:
        running = stage.run(runs=str(tmp_path / "runs"), settings="deploy.deadline=12 deploy.min_available=1 rounds=2")
        until(lambda: len(rows(folder)) >= 1, 150, unless=lambda: ended(running))
        stage.servers.add(facts_of(folder)["server_pid"])
        drip.touch()
        until(lambda: Path(f"{drip}.reached").exists(), 60, unless=lambda: ended(running))
        finished(folder, running, 90)
    first, second = rows(folder)
    assert first["cohort"] == [0, 1] and first["silent"] == 0
    assert second["cohort"] == [1] and second["silent"] == 1
    assert 12 <= seconds_of(folder)[1] < 12 + 5 + 4


def test_row_34_a_node_that_stands_still_is_cut_at_the_deadline_and_comes_back(app: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "real"
    with LocalDeployment(app, shares=[[0], [1]], place=tmp_path / "stage", secure=False) as stage:
        running = stage.run(runs=str(tmp_path / "runs"), settings="deploy.deadline=10 deploy.min_available=1")
        until(lambda: len(rows(folder)) >= 1, 150, unless=lambda: ended(running))
        stage.servers.add(facts_of(folder)["server_pid"])
        stage.nodes[1].signal(signal.SIGSTOP)  # its connections stay open
        try:
            until(lambda: len(rows(folder)) >= 2, 60, unless=lambda: ended(running))
        finally:
            stage.nodes[1].signal(signal.SIGCONT)
        finished(folder, running, 60)
    found = rows(folder)
    assert [row["cohort"] for row in found][:2] == [[0, 1], [0]] and found[1]["silent"] == 1
    assert seconds_of(folder)[1] < 10 + 5 + 4
    assert found[2]["cohort"] in ([0, 1], [0])  # it may have been asked too late


# --- row 40: clocks --------------------------------------------------------------------------------------------------


def test_row_40_a_clock_within_bounds_changes_no_bit_and_one_beyond_them_is_told(app: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "real"
    with Federation(app, tmp_path, {1: {"TEST_SHIFT": -200}}) as stage:
        running = stage.run(runs=str(tmp_path / "runs"))
        assert stage.keys is not None
        for shift, side in ((3600, "ahead of"), (-3600, "behind")):
            stage.machines[0] = {"TEST_SHIFT": shift}
            key = stage.keys.nodes[0].with_name(f"copy{shift}")  # of a registered key, in a process with its own log
            key.write_bytes(stage.keys.nodes[0].read_bytes())
            key.chmod(0o600)
            refused = stage.start_node(0, key=key)
            until(lambda node=refused: node.code is not None, 60)
            assert refused.code == 0 and "SuperNode terminated gracefully" in refused.log.read_text()  # all Flower says
            with odd(stage.odd, TEST_SHIFT=shift):
                command = [sys.executable, "-m", "consilience", "deploy", "check", f"127.0.0.1:{stage.port}"]
                command += ["--root-certificates", str(stage.keys.authority)]
                told = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert told.returncode == 2 and re.search(r"clock differs by (3600|3599|3601) s", told.stderr), told
            assert f"this machine's is {side} the SuperLink's" in told.stderr
        finished(folder, running, 150)
    found = rows(folder)
    assert [row["cohort"] for row in found] == [[0, 1]] * 3 and all(row["silent"] == 0 for row in found)
    assert all(0 < seconds < 60 for seconds in seconds_of(folder))
    assert digest_of(folder) == digest_here(app)
