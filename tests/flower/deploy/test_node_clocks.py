"""The clock of a SuperLink against this one's (FAULTS row 40), and which clock measures durations."""

from __future__ import annotations

import ast
import contextlib
import email.utils
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

import consilience
from consilience import cli
from consilience.core.settings import Invalid
from consilience.flower.deploy import clock


@contextlib.contextmanager
def server(ahead: float, *, dated: bool = True) -> Iterator[str]:
    """The address of a server on loopback whose clock is so many seconds ahead."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(404)
            if dated:
                self.send_header("Date", email.utils.formatdate(time.time() + ahead, usegmt=True))
            self.end_headers()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *words: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join(5)


@pytest.mark.parametrize(
    ("ahead", "refused", "words"),
    [
        (0.0, False, "agree to a second"),
        (
            3600.0,
            True,
            r"clock differs by 3(600|599|601) s: this machine's is behind the SuperLink's\. Flower allows 5 s",
        ),
        (
            -3600.0,
            True,
            r"clock differs by 3(600|599|601) s: this machine's is ahead of the SuperLink's\. Flower allows",
        ),
        (200.0, False, r"clock differs by (200|199|201) s: this machine's is behind .* which Flower allows"),
        (-60.0, True, "ahead of the SuperLink's"),
    ],
)
def test_row_40_the_difference_is_measured_and_said(ahead: float, refused: bool, words: str) -> None:
    with server(ahead) as address:
        found = clock.difference(address, None)
        said = CliRunner().invoke(cli.app, ["deploy", "check", address, "--insecure"])
    assert found == pytest.approx(-ahead, abs=1.5)
    assert clock.refused(found) == refused and said.exit_code == (2 if refused else 0)
    assert re.search(words, clock.explain(found)), clock.explain(found)
    assert clock.explain(found)[:20] in said.output and f"SuperLink at {address} answers" in said.output


def test_what_cannot_be_reached_or_read_is_said(tmp_path: Path) -> None:
    with server(0) as address:
        pass
    with pytest.raises(Invalid, match="cannot be reached"):
        clock.difference(address, None, seconds=2)
    with server(0, dated=False) as address, pytest.raises(Invalid, match="does not say what time it is"):
        clock.difference(address, None)
    with pytest.raises(Invalid, match="write host:port"):
        clock.difference("fl.example.org", None)
    said = CliRunner().invoke(cli.app, ["deploy", "check", "fl.example.org:8000"])
    assert said.exit_code == 2 and "give --root-certificates ca.crt" in said.output


def test_what_flower_allows_is_what_we_say() -> None:
    constant = pytest.importorskip("flwr.common.constant", reason="Flower is not installed")
    assert constant.SYSTEM_TIME_TOLERANCE == clock.AHEAD
    assert constant.TIMESTAMP_TOLERANCE + constant.SYSTEM_TIME_TOLERANCE == clock.BEHIND


# --- durations and deadlines -----------------------------------------------------------------------------------------

STAMPS = {  # where the time of day is what is meant: a certificate's validity, when something happened, a file's age
    "flower/deploy/keys.py": 1,
    "flower/deploy/clock.py": 1,
    "flower/engine/health.py": 1,
    "flower/audit/log.py": 1,
    "runs/facts.py": 1,
    "experiments/tracker_kinds.py": 1,
    "dashboard/watched_run.py": 1,
}
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}


def _wall(file: Path) -> int:
    """How often a file reads the time of day."""
    found = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    calls = [node.func for node in found if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    named = [(getattr(call.value, "attr", getattr(call.value, "id", "")), call.attr) for call in calls]
    return sum(name in WALL for name in named)


def test_row_40_durations_and_deadlines_never_come_from_the_time_of_day() -> None:
    """A clock that is set while a run goes on must change neither a deadline nor a measured second."""
    root = Path(consilience.__file__).parent
    found = {file.relative_to(root).as_posix(): _wall(file) for file in sorted(root.rglob("*.py"))}
    assert {name: count for name, count in found.items() if count} == STAMPS
    bare = [
        file.name
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "time" and {"time"} & {one.name for one in node.names}
    ]
    assert not bare  # `from time import time` would not be seen above
