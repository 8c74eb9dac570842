"""Real SuperLink, SuperNodes, ServerApp and ClientApps on loopback: killed, cut off, unknown, and resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_deployments import ROUNDS, digest_of, end, ended, in_process, rows, until, write_app

from consilience.flower.audit.checking import check
from consilience.flower.audit.comparing import compare
from consilience.flower.deploy import keys
from consilience.flower.deploy.local_deployment import LocalDeployment
from consilience.flower.deploy.processes import free_port
from consilience.flower.deploy.up import facts_of
from consilience.wire import arrays

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
pytestmark = pytest.mark.slow


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return write_app(tmp_path / "app")


@pytest.fixture
def launched(app: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`consilience deploy up`, as a user starts it, without TLS."""
    command = [sys.executable, "-m", "consilience", "deploy", "up", str(app), "--local", "2", "--insecure"]
    with open(tmp_path / "up.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        end(process)


def test_a_server_killed_in_mid_run_goes_on_bit_by_bit(
    launched: subprocess.Popen[str], app: Path, tmp_path: Path
) -> None:
    folder, said = app / "runs" / "real", tmp_path / "up.log"
    died = lambda: "" if launched.poll() is None else said.read_text()  # noqa: E731
    until(lambda: (folder / "checkpoints" / "round-00000001").exists(), 200, unless=died)
    os.kill(facts_of(folder)["server_pid"], signal.SIGKILL)
    assert launched.wait(300) == 0, said.read_text()
    assert "the ServerApp died; starting again from the last checkpoint, once" in said.read_text()
    assert "continuing after round" in said.read_text()

    here, there = in_process(app), rows(folder)
    values = {**here[-1].model["params"], **here[-1].model["buffers"]}
    assert digest_of(folder) == arrays.digest(values)
    assert [row["round"] for row in there] == [1, 2, 3]
    assert all(row["memory_lost"] == row["silent"] == 0 and row["rejected"] == {} for row in there)
    assert [row["bytes_up"] for row in there] == [each.bytes_up for each in here]
    assert all(0 <= row["accuracy"] <= 1 for row in there)  # clients tested the model on their own rows
    audited = check(folder)
    compare(audited, [app / "local" / "receipts"])
    assert audited.problems == [] and audited.receipts >= 2 * 3
    assert [row["event"] for row in audited.rows].count("started") == 2


def test_over_tls_too_few_clients_and_one_that_is_killed(app: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    stage = LocalDeployment(app, shares=[[0], [1]], place=tmp_path / "stage", node_config={"hold": str(hold)})
    with stage:
        honest = list(stage.nodes)
        lonely = stage.run(runs=str(tmp_path / "runs"), settings="name=lonely deploy.clients=3 deploy.wait=20")
        folder = tmp_path / "runs" / "lonely"
        until(lambda: facts_of(folder).get("reason"), 150, unless=lambda: ended(lonely))
        facts = facts_of(folder)
        assert facts["status"] == "too few clients"
        assert "2 of the 3 clients that are needed were connected after 20 seconds (2 nodes online)" in facts["reason"]

        running = stage.run(runs=str(tmp_path / "runs"), settings="deploy.deadline=25 deploy.min_available=1")
        folder = tmp_path / "runs" / "real"
        until(lambda: len(rows(folder)) >= 1, 150, unless=lambda: ended(running))
        Path(f"{hold}-1").touch()
        until(lambda: Path(f"{hold}-1").with_suffix(".reached").exists(), 60, unless=lambda: ended(running))
        helper = stage._helpers[1:2]  # what answers for client 1
        for process in (*helper, honest[1]):
            process.signal(signal.SIGKILL)
        until(lambda: facts_of(folder).get("status") == "finished", 200, unless=lambda: ended(running))
    found = rows(folder)
    assert found[0]["cohort"] == [0, 1] and found[0]["silent"] == 0
    after = [row for row in found if row["cohort"] == [0]]
    assert len(after) >= 1 and after[0]["silent"] == 1
    assert len(found) == ROUNDS and all(row["accuracy"] is not None for row in found)


def test_bad_credentials_are_refused_each_for_its_own_reason(app: Path, tmp_path: Path) -> None:
    with LocalDeployment(app, shares=[[0], [1]], place=tmp_path / "stage") as stage:
        assert stage.keys is not None
        address = ["flower-supernode", "--superlink", f"127.0.0.1:{stage.port}", "--max-retries", "2"]
        trust = ["--root-certificates", str(stage.keys.authority)]
        copy = stage.keys.nodes[0].with_name("fooled")  # a registered key, in a process with a log of its own
        copy.write_bytes(stage.keys.nodes[0].read_bytes())
        copy.chmod(0o600)
        wrong = {
            "Server disconnected": stage._process("plain", [*address, "--insecure", *_port()]),
            "404 Not Found": stage._process("anonymous", [*address, *trust, *_port()]),  # no route to register itself
            "Failed to activate SuperNode": stage.start_node(0, key=keys.node_key(tmp_path / "stranger")),
            "CERTIFICATE_VERIFY_FAILED": stage.start_node(
                0, key=copy, authority=keys.make(tmp_path / "elsewhere").authority
            ),
        }
        stage.nodes += list(wrong.values())  # so that they are stopped, whatever happens
        name = until(lambda: re.search(r"SuperNode ID: (\d+)", stage.nodes[1].log.read_text()), 60)[1]
        revoking = stage._process("revoke", ["flwr", "supernode", "unregister", name, "local"])
        assert revoking.wait(60) == 0, revoking.tail()
        stage.nodes[1].signal(signal.SIGTERM)
        stage.nodes[1].wait(20)
        revoked = stage.start_node(1, key=stage.keys.nodes[1])
        for reason, process in [*wrong.items(), ("Failed to activate SuperNode", revoked)]:
            until(lambda process=process: process.code is not None, 60)
            assert process.code != 0 and reason in process.log.read_text()
        assert stage.nodes[0].code is None  # the honest one stays


def _port() -> list[str]:
    return ["--host", "127.0.0.1", "--port", str(free_port())]


def test_verify_over_a_deployment(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "consilience", "verify", "--engines", "vectorised,flower", "--rounds", "2"]
    command += ["--algorithms", "scaffold,simfedswap"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") >= 4 and "equal, bit by bit: flower; vectorised" in done.stdout


def test_everything_started_is_stopped(app: Path, tmp_path: Path) -> None:
    with LocalDeployment(app, shares=[[0], [1]], place=tmp_path / "stage", secure=False) as stage:
        assert stage.link is not None
        started = [stage.link, *stage.nodes, *stage._helpers]
        assert all(process.code is None for process in started)
    assert all(process.code is not None for process in started)
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
