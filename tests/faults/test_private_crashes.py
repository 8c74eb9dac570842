"""Kill a private run at any moment: what it had spent never gets less, and no round is ever released in two ways."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from nursery import Nursery, alive, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL"),
]
KILLS = 50
SETTINGS = (
    *("rounds=24", "threads=1", "model=logistic", "partition.clients=12", "engine.device=cpu", "engine.lane=serial"),
    *("algorithm=dp_fedavg", "algorithm.noise=2.0", "algorithm.rate=0.5", "checkpoint.every=3", "seed=5"),
)


def spent(folder: Path) -> tuple[int, float]:
    """(rounds, epsilon) as the folder has them."""
    try:
        facts = json.loads((folder / "run.json").read_text()).get("privacy", {})
    except FileNotFoundError:
        facts = {}
    return facts.get("rounds", 0), facts.get("epsilon", 0.0)


def rows(folder: Path) -> list[dict[str, float]]:
    try:
        whole = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in whole.splitlines()]


def test_killed_at_fifty_moments_epsilon_never_falls(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")
    nursery, chance, hits, number = Nursery(), random.Random(3), 0, 0
    try:
        undisturbed = tmp_path / "undisturbed"
        assert nursery.run("run", *SETTINGS, "--folder", str(undisturbed), log=tmp_path / "log") == 0
        while hits < KILLS:
            folder, known = tmp_path / f"run-{number:03}", (0, 0.0)
            shown: dict[float, dict[str, float]] = {}  # round -> its row, when it was first seen
            number += 1
            assert number < KILLS, "too few kills found a run alive"
            while True:
                started = (folder / "run.json").exists()
                command = ["resume", str(folder)] if started else ["run", *SETTINGS, "--folder", str(folder)]
                pid = nursery.start(*command, log=tmp_path / f"log-{number:03}")
                goal = known[0] + chance.randrange(1, 6)
                until(lambda: spent(folder)[0] >= goal or not alive(pid), step=0)  # noqa: B023
                time.sleep(chance.uniform(0, 0.01))
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
                code = nursery.wait(pid)
                now = spent(folder)
                assert now[0] >= known[0] and now[1] >= known[1], "what was spent was forgotten"
                for row in rows(folder):
                    assert row["epsilon"] <= now[1], "shown before it was stored"
                    assert shown.setdefault(row["round"], row) == row, "two releases of one round"
                known = now
                if code == 0:
                    break
                assert code == -signal.SIGKILL, (tmp_path / f"log-{number:03}").read_text()
                hits += 1
            ledger = [json.loads(line) for line in (folder / "privacy.jsonl").read_text().splitlines()]
            assert [row["round"] for row in ledger] == list(range(1, 25)), "a release was charged twice, or not at all"
            assert [row["epsilon"] for row in rows(folder)] == [row["epsilon"] for row in rows(undisturbed)]
            assert rows(folder) != rows(undisturbed), "two runs of one seed have the same noise"
            assert not os.listdir(folder / "keys"), "a key outlived its round"
    finally:
        nursery.close()
