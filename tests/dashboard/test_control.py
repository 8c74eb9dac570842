"""Stopping and resuming runs: only their owner's, only from our own pages, and exactly as the command line does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_runs import SMALL, written

from consilience.core.settings import Invalid
from consilience.dashboard.access import AccessRules
from consilience.dashboard.api import Api
from consilience.dashboard.guard import Guard
from consilience.dashboard.watch import Watch
from consilience.runs import canonical, control
from consilience.runs.folder import RunFolder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="runs are stopped by signals")
TOKEN = "correct-horse-battery-staple"
RULES = AccessRules(host="127.0.0.1", token=TOKEN, control=True, page_secret="s" * 40)
ROOT = Path(__file__).parents[2]
GOOD = {
    "host": "127.0.0.1:8787",
    "authorization": f"Bearer {TOKEN}",
    "origin": "http://127.0.0.1:8787",
    "sec-fetch-site": "same-origin",
    "x-consilience-page": "s" * 40,
    "content-type": "application/json",
    "content-length": "12",
}


def refusal(method: str, path: str, rules: AccessRules = RULES, **changes: str) -> int:
    """The status that the guard answers with by itself; 0 where it lets the request through."""

    async def app(*_: Any) -> None:
        raise AssertionError

    sent = {**GOOD, **{key.replace("_", "-"): value for key, value in changes.items()}}
    headers = [(key.encode(), value.encode()) for key, value in sent.items() if value]
    found = Guard(app, rules)._refusal({"method": method, "path": path, "headers": headers})
    return 0 if found is None else found[0]


def test_the_matrix_of_access() -> None:
    assert refusal("POST", "/control/stop") == refusal("POST", "/control/resume") == 0
    wrong = [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"host": "evil.example"}, 421),
        ({"origin": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "https://127.0.0.1:8787"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"x_consilience_page": ""}, 403),
        ({"x_consilience_page": "s" * 39}, 403),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"content_length": ""}, 413),
        ({"content_length": "5000"}, 413),
    ]
    for changes, status in wrong:
        assert refusal("POST", "/control/stop", **changes) == status, changes
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
        assert refusal(method, "/control/stop") == 405
    for path in ("/", "/runs/a", "/api/runs", "/control/", "/control/stop/", "/control/delete"):
        assert refusal("POST", path) == 405, path
    reading = AccessRules(host="127.0.0.1", token=TOKEN, page_secret="s" * 40)
    assert refusal("POST", "/control/stop", reading) == 405  # without --control nothing acts


def lock_note(run: Path, pid: int, host: str = "") -> None:
    (run / "lock").write_bytes(canonical.encode({"pid": pid, "host": host or socket.gethostname()}))


def test_only_a_process_that_holds_the_lock_is_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written(tmp_path, "a", status="running")
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)) if number else None)
    lock_note(run, os.getpid())  # alive, but the file is not open: its number was given to another program since
    facts = RunFolder.open(run).facts()
    assert control.possible(run, facts) == "resume"
    with pytest.raises(Invalid, match="it is not running"):
        control.stop(run)
    lock_note(run, os.getpid(), host="elsewhere")
    assert control.possible(run, facts) == ""
    with pytest.raises(Invalid, match="it runs on elsewhere"):
        control.stop(run)
    with RunFolder.open(run).lock():
        assert control.possible(run, facts) == "stop"
        assert control.stop(run) == os.getpid() and killed == [(os.getpid(), signal.SIGTERM)]
        with pytest.raises(Invalid, match="it is running"):
            control.resume(run)
        assert control.possible(run, facts | {"deployed": True}) == ""
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(Invalid, match="another user"):
        control.resume(run)


def test_a_finished_or_deployed_run_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="has finished"):
        control.resume(written(tmp_path, "a"))
    with pytest.raises(Invalid, match="deployed"):
        control.resume(written(tmp_path, "b", deployed=True, status="interrupted"))
    api = Api(Watch(tmp_path, controlled=True))
    assert api.act("resume", b'{"run": "a"}')[0] == 409
    for body in (b"", b"[]", b'{"run": 3}', b'{"run": "../a"}', b'{"run": "nowhere"}', b"[" * 4000):
        assert api.act("stop", body)[0] in (400, 404), body


@pytest.fixture
def going(tmp_path: Path) -> Iterator[Path]:
    """A run of many short rounds, as a process of its own."""
    run = tmp_path / "runs" / "long"
    settings = [one for one in SMALL if not one.startswith("rounds")]
    command = [sys.executable, "-m", "consilience", "run", "--folder", str(run), "--no-report", "-q", *settings]
    around = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "rounds=100000", "evaluation.every=1000", "checkpoint.every=100000"], env=around
    )
    try:
        assert until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0)
        yield run
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_real_run_is_stopped_and_resumed(going: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    api, body = Api(Watch(going.parent, controlled=True)), json.dumps({"run": "long"}).encode()
    status, answer = api.act("stop", body)
    assert status == 202, answer
    assert until(lambda: RunFolder.open(going).facts()["status"] == "interrupted")
    assert until(lambda: api.watch.one("long").can() == "resume")  # type: ignore[union-attr]
    rounds = len(RunFolder.open(going).rows().rows)
    status, answer = api.act("resume", body)
    assert status == 202, answer
    try:
        assert os.getsid(answer["process"]) == answer["process"]  # of its own session: it outlives the dashboard
        assert until(lambda: len(RunFolder.open(going).rows().rows) > rounds)
        assert api.act("stop", body)[0] == 202
        assert until(lambda: RunFolder.open(going).facts()["status"] == "interrupted")
        assert "continuing after round" in (going / "resume.log").read_text()
    finally:
        for child in control._children:
            child.kill()
            child.wait()
        control.reap()


def until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False
