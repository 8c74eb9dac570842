"""The dashboard as a process of its own, asked over real HTTP on loopback."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from sample_runs import written
from typer.testing import CliRunner

from consilience import cli
from consilience.dashboard.pages import Pages
from consilience.dashboard.watch import Watch
from consilience.runs.folder import RunFolder

for needed in ("matplotlib", "starlette", "uvicorn"):
    pytest.importorskip(needed, reason='needs pip install "consilience[dashboard]"')

TOKEN = "correct-horse-battery-staple"
EVIL = "<script>alert(1)</script>"
ROOT = Path(__file__).parents[2]
Answer = tuple[int, dict[str, str], str]


class Dashboard:
    """A server process and a client for it."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        command = [sys.executable, "-m", "consilience", "dashboard", str(folder), "--port", "0", *options]
        surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=surroundings
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        self.url = urlsplit(self.said.split()[0]) if self.said else urlsplit("")

    def ask(self, method: str, path: str, **headers: str) -> Answer:
        assert self.url.hostname and self.url.port
        where = (self.url.hostname, self.url.port)
        if self.url.scheme == "https":
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(*where, timeout=60, context=trusting)
        else:
            connection = http.client.HTTPConnection(*where, timeout=60)
        try:
            connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        finally:
            connection.close()

    def close(self, how: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them with hostile names, a comparison of two more, and a secret beside the folder."""
    top = tmp_path_factory.mktemp("dashboard")
    similarity = ({"round": 1, "compared": [0, 2], "similarity": [0.5], "model_of": [2, 0]},)
    written(top / "runs", "plain", clients=similarity)
    written(top / "runs", "parties", clients=similarity, deployed=True)
    names = {"names": [EVIL, "b", "c", "d"], "labels": [], "train_rows": [1, 2, 3, 4]}
    written(top / "runs", "hostile", algorithm="fedprox", federation=names, more=f'note = "{EVIL}"\n')
    for seed in (0, 1):
        written(top / "runs" / "compared", f"a-seed{seed}", seed=seed)
    written(top, "outside")
    (top / "runs" / "link").symlink_to(top / "outside")
    return top / "runs"


@pytest.fixture(scope="module")
def dashboard(folder: Path) -> Iterator[Dashboard]:
    running = Dashboard(folder)
    assert running.url.hostname == "127.0.0.1", running.said
    yield running
    assert running.close() == 0


def test_the_list_and_the_pages(dashboard: Dashboard) -> None:
    status, headers, text = dashboard.ask("GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    status, headers, text = dashboard.ask("GET", "/api/runs")
    assert status == 200 and headers["content-type"] == "application/json"
    found = json.loads(text)
    assert set(found["names"]) == {"plain", "parties", "hostile", "compared/a-seed0", "compared/a-seed1"}
    assert {run["value"] for run in found["runs"]} == {0.6} and found["control"] is False
    for path in (
        "/runs/plain",
        "/runs/compared",
        "/runs/",
        "/compare?run=plain&run=hostile",
        "/client?run=plain&client=3",
    ):
        status, _, text = dashboard.ask("GET", path)
        assert status == 200 and "/static/" in text, path
    status, _, text = dashboard.ask("GET", "/report/plain")
    assert status == 200 and "<svg" in text and "0.6000" in text
    status, _, text = dashboard.ask("GET", "/report/compared")
    assert status == 200 and "0.6000 ±\N{NO-BREAK SPACE}0.0000" in text


def test_what_has_not_changed_is_not_sent_again(dashboard: Dashboard) -> None:
    for path in (
        "/api/curves?run=plain",
        "/api/run?run=plain",
        "/api/clients?run=plain",
        "/api/client?run=plain&client=0",
    ):
        status, headers, _ = dashboard.ask("GET", path)
        assert status == 200
        status, again, text = dashboard.ask("GET", path, If_None_Match=headers["etag"])
        assert (status, again["etag"], text) == (304, headers["etag"], "")


def test_every_page_is_locked_up(dashboard: Dashboard) -> None:
    for path in ("/", "/runs/hostile", "/report/hostile", "/api/runs", "/static/run.js", "/nothing"):
        _, headers, text = dashboard.ask("GET", path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe-eval" not in policy and not re.search(r"script-src[^;]*(unsafe-inline|\*|http|data:)", policy)
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert "server" not in headers and EVIL not in text


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "MKCOL", "PROPFIND", "get", "SPLICE"]
)
def test_only_reading_is_possible(dashboard: Dashboard, folder: Path, method: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
    for path in ("/", "/runs/plain", "/runs/plain/run.json", "/api/runs", "/control/stop", "/control/resume"):
        status, _, text = dashboard.ask(method, path)
        assert status in (400, 405) and "<svg" not in text, (method, path, status)
    assert {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))} == before


def test_reading_writes_nothing_either(dashboard: Dashboard, folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
    for path in ("/runs/plain", "/report/plain", "/api/runs", "/api/run?run=plain", "/api/clients?run=plain"):
        assert dashboard.ask("GET", path)[0] == 200
    assert {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))} == before


def test_head_has_no_body(dashboard: Dashboard) -> None:
    assert dashboard.ask("HEAD", "/")[::2] == (200, "")
    assert dashboard.ask("HEAD", "/", Host="evil.example")[::2] == (421, "")


@pytest.mark.parametrize(
    "name",
    [
        *("../outside", "..%2foutside", "%2e%2e/outside", "plain/../../outside", "....//outside", "link", "nowhere"),
        *(
            "plain/run.json",
            "plain/config.toml",
            "plain/checkpoints",
            "/etc/passwd",
            "%00",
            "plain%00",
            "pla",
            "\\..\\x",
        ),
    ],
)
def test_nothing_but_the_runs_of_the_folder_is_shown(dashboard: Dashboard, name: str) -> None:
    for page in (
        "runs/{}",
        "report/{}",
        "static/{}",
        "api/run?run={}",
        "api/log?file=run.json&run={}",
        "compare?run={}",
    ):
        status, _, text = dashboard.ask("GET", f"/{page.format(name)}")
        assert status in (400, 404) and "<svg" not in text, (page, status)


def test_other_host_names_are_turned_away(dashboard: Dashboard) -> None:
    assert dashboard.ask("GET", "/", Host="evil.example")[0] == 421
    assert dashboard.ask("GET", "/", Host=f"localhost:{dashboard.url.port}")[0] == 200


def test_who_resembles_whom_is_shown_of_simulated_clients_or_on_request(dashboard: Dashboard, folder: Path) -> None:
    def is_shown(text: str | None) -> bool:
        assert text is not None
        assert ("<h3>Similarity</h3>" in text) is ("<h3>Swaps</h3>" in text) is ("--similarity" not in text)
        return "<h3>Swaps</h3>" in text

    assert is_shown(dashboard.ask("GET", "/report/plain")[2]) and not is_shown(
        dashboard.ask("GET", "/report/parties")[2]
    )
    for asked in (True, False):
        pages = Pages(Watch(folder), refresh=1, with_similarity=asked)
        assert is_shown(pages.report("plain")) is is_shown(pages.report("parties")) is asked


def shown(dashboard: Dashboard, name: str) -> dict[str, Any]:
    return {run["name"]: run for run in json.loads(dashboard.ask("GET", "/api/runs")[2])["runs"]}.get(name, {})


def test_a_run_that_goes_on_is_read_on(dashboard: Dashboard, folder: Path) -> None:
    run = RunFolder.open(written(folder, "going", accuracies=(0.11,)))
    run.record(status="running")
    with run.lock():
        assert until(lambda: shown(dashboard, "going").get("value") == 0.11)
        assert shown(dashboard, "going")["status"] == "running"
        run.metrics.append({"round": 2, "accuracy": 0.77, "loss": 0.1, "cohort": [0], "weights": [1.0]})
        assert until(lambda: shown(dashboard, "going")["value"] == 0.77)
    run.record(status="finished")
    assert until(lambda: shown(dashboard, "going")["status"] == "finished")


def test_the_page_of_a_run_that_has_just_begun_finds_it(dashboard: Dashboard, folder: Path) -> None:
    assert dashboard.ask("GET", "/api/runs")[0] == 200  # the folder has just been searched
    new = written(folder, "new")
    try:
        assert dashboard.ask("GET", "/runs/new")[0] == dashboard.ask("GET", "/api/run?run=new")[0] == 200
    finally:
        shutil.rmtree(new)


def test_a_damaged_run_does_not_take_the_others_along(dashboard: Dashboard, folder: Path) -> None:
    bad = written(folder, "bad")
    (bad / "run.json").write_text("{")
    try:
        assert until(lambda: shown(dashboard, "bad").get("status") == "damaged")
        assert shown(dashboard, "plain")["value"] == 0.6
        status, _, text = dashboard.ask("GET", "/report/bad")
        assert status == 200 and "damaged" in text
    finally:
        shutil.rmtree(bad)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_token_and_tls(folder: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    making = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*making, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    options = ("--certificate", str(certificate), "--key", str(key))
    locked = Dashboard(folder, *options, CONSILIENCE_DASHBOARD_TOKEN=TOKEN)
    try:
        assert locked.url.scheme == "https" and TOKEN not in locked.said
        status, headers, text = locked.ask("GET", "/")
        assert status == 401 and headers["www-authenticate"].startswith("Basic") and "plain" not in text
        assert locked.ask("GET", "/runs/plain", Authorization="Bearer wrong")[0] == 401
        assert locked.ask("POST", "/", Authorization="Bearer wrong")[0] == 401
        assert locked.ask("GET", "/", Authorization=f"Bearer {TOKEN}")[0] == 200
        basic = base64.b64encode(f"me:{TOKEN}".encode()).decode()
        assert locked.ask("GET", "/runs/plain", Authorization=f"Basic {basic}")[0] == 200
    finally:
        locked.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), "can be reached from other machines"),
        (("--token-file", "/nowhere"), "is no file"),
        (("--certificate", __file__, "--key", __file__), "cannot be used"),
    ],
)
def test_refusals(folder: Path, options: tuple[str, ...], words: str) -> None:
    refused = CliRunner().invoke(cli.app, ["dashboard", str(folder), "--port", "0", *options])
    assert refused.exit_code == 2 and words in refused.stderr and not refused.stdout


def test_a_port_in_use_and_a_folder_that_is_not_there(dashboard: Dashboard, folder: Path) -> None:
    taken = str(dashboard.url.port)
    refused = CliRunner().invoke(cli.app, ["dashboard", str(folder), "--port", taken])
    assert refused.exit_code == 2 and f"port {taken}" in refused.stderr
    refused = CliRunner().invoke(cli.app, ["dashboard", str(folder / "nowhere"), "--port", "0"])
    assert refused.exit_code == 2 and "is no folder" in refused.stderr


def test_too_many_connections_are_turned_away_and_the_rest_goes_on(dashboard: Dashboard) -> None:
    where = (str(dashboard.url.hostname), dashboard.url.port or 0)
    crowd = [socket.create_connection(where, timeout=30) for _ in range(80)]
    try:
        assert until(lambda: dashboard.ask("GET", "/")[0] == 503)
    finally:
        for one in crowd:
            one.close()
    assert until(lambda: dashboard.ask("GET", "/")[0] == 200)


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False
