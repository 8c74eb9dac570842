"""The time left that a run shows, by a clock that the test moves."""

from __future__ import annotations

import io
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import consilience as cs
from consilience.core import progress as core_progress
from consilience.core.metrics import MetricRow
from consilience.reporting import progress
from consilience.runs.interrupts import Interrupts


def test_the_first_round_counts_alone_until_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    clock = progress._Clock(rounds=10, done=2)

    def after(seconds: float, number: int) -> str:
        now[0] += seconds
        finished: Any = SimpleNamespace(round=SimpleNamespace(number=number))
        return clock.left(finished)

    assert after(30, 3) == "3:30"  # 7 rounds as long as the first, which measures and compiles
    assert after(4, 4) == "0:24"  # 6 rounds of 4 s: the first no longer counts
    assert after(8, 5) == "0:30"  # 5 rounds of (4 + 8) / 2 s
    assert after(6, 10) == "0:00"


def observed(number: int, accuracy: float, rejected: dict[str, int] | None = None) -> Any:
    refusals = [f"client {k} refused: <b>[bold]" for k in range(sum((rejected or {}).values()))]
    metrics = (MetricRow(key="accuracy", title="accuracy", better="higher", main=True),)
    row = {"round": number, "accuracy": accuracy, "loss": 0.5, "rejected": rejected or {}}
    return SimpleNamespace(
        round=SimpleNamespace(number=number, cohort=SimpleNamespace(refusals=refusals)),
        row=row,
        metrics=metrics,
        timing={"clients_per_second": 12.0},
        quality=lambda: f"accuracy {accuracy:.4f}",
    )


ROUNDS = [observed(1, 0.1), observed(2, 0.5, {"shape": 2}), observed(3, 0.9)]


@pytest.mark.parametrize("width", [40, 120])
def test_the_live_display_fits_and_tells_what_matters(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    status = progress._Status(10, 0)
    for each in ROUNDS:
        status.see(each)
    status.hear(3, 7)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, legacy_windows=False)
    with console.capture() as captured:
        console.print(status)
    lines = captured.get().splitlines()
    assert len(lines) == 2 and all(len(line) <= width for line in lines) and "\x1b[3" not in captured.get()
    assert "round 3/10" in lines[0] and "left" in lines[0] and "▁▅█" in lines[1]
    assert ("clients 3/7" in lines[0]) == (width > 80) and ("12 clients/s" in lines[1]) == (width > 80)
    if width > 80:
        assert "accuracy 0.9000" in lines[1] and "refused 2" in lines[1]


def test_an_interrupt_is_shown_by_the_live_display_which_would_paint_over_it(capfd: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=50, legacy_windows=False)
    with Interrupts() as interrupts:
        for observation in progress.shown(iter(ROUNDS), rounds=3, console=console):
            if observation is ROUNDS[1]:
                interrupts._ask(signal.SIGINT, None)
    assert "finishing" not in capfd.readouterr().err
    assert "SIGINT: finishing this round and saving" in out.getvalue()
    with Interrupts() as interrupts:
        interrupts._ask(signal.SIGTERM, None)
    assert "SIGTERM: finishing this round and saving; once more to exit at once" in capfd.readouterr().err


def test_without_unicode_and_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "▁" not in _drawn(progress._Status(10, 0, curve=False))
    out = io.StringIO()
    list(progress.shown(iter(ROUNDS), rounds=3, console=Console(file=out, force_terminal=False, width=200)))
    first, second, *names = out.getvalue().splitlines()
    assert first.startswith("round 1/3  accuracy 0.1000  12 clients/s  left ")
    assert "refused 2 (shape 2)" in second and names[0] == "  client 0 refused: <b>[bold]"


def _drawn(status: Any) -> str:
    for each in ROUNDS:
        status.see(each)
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        console.print(status)
    return captured.get()


def test_a_notebook_has_one_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By IPython's own display publisher, as a front end receives it."""
    pytest.importorskip("IPython", reason="needs IPython")
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    monkeypatch.setattr(shell.display_pub, "publish", lambda data, **more: sent.append({"data": data, **more}))
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    try:
        for k, _ in enumerate(progress.shown(iter(ROUNDS), rounds=3)):
            core_progress.begin(4)
            core_progress.add(k + 1)
    finally:
        InteractiveShell.clear_instance()
    assert len({one["transient"]["display_id"] for one in sent}) == 1
    assert [bool(one.get("update")) for one in sent] == [False, *[True] * (len(sent) - 1)]
    last = sent[-1]["data"]["text/html"]
    assert "round 3/3" in last and "accuracy 0.9000" in last and "<polyline" in last and "refused 2 in all" in last
    assert any("clients 2/4" in one["data"]["text/html"] for one in sent) and "<b>" not in last


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_engines_say_how_many_clients_are_done(lane: str) -> None:
    heard: list[tuple[int, int]] = []
    rng = torch.Generator().manual_seed(0)
    rows = [(torch.randn(6, 3, generator=rng), torch.tensor([0, 1] * 3)) for _ in range(5)]
    more = {"clients_at_once": 2} if lane == "batched" else {}
    with core_progress.listening(lambda done, of: heard.append((done, of))):
        cs.train(torch.nn.Linear(3, 2), rows, cs.fedavg(), rounds=1, progress=False, device="cpu", lane=lane, **more)
    expected = range(6) if lane == "serial" else (0, 2, 4, 5)
    assert heard == [(k, 5) for k in expected]
