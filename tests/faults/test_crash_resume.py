"""Kill a run at any moment, resume it, and nothing tells: weights, server state and metrics are equal to the byte."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nursery import Nursery, alive, until

from consilience.runs import checkpoint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

ROUNDS = 8
KILLS = int(os.environ.get("CONSILIENCE_KILLS", "30"))
SETTINGS = (
    *(f"rounds={ROUNDS}", "threads=1", "seed=3", "model.hidden=[16]", "partition.clients=12"),
    *("algorithm.epochs=1", "algorithm.selection={name='uniform', fraction=0.5}"),
    *("environment.communication=0.8", "environment.availability=0.9", "environment.stragglers=0.3"),
    *("engine.device=cpu", "engine.clients_at_once=4"),
)
LANES = ("serial", "batched")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery()
    assert nursery.run("--help", log=tmp_path_factory.mktemp("nursery") / "log") == 0  # it is ready
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """For each lane: a run that nothing disturbs, and the seconds it takes."""
    found = {}
    for lane in LANES:
        folder = tmp_path_factory.mktemp("undisturbed") / lane
        began = time.monotonic()
        assert begin(nursery, folder, lane) == 0, log_of(folder)
        found[lane] = folder, time.monotonic() - began
    return found


def begin(nursery: Nursery, folder: Path, lane: str, *more: str) -> int:
    return nursery.run(*command(folder, lane), *more, log=log_path(folder))


def command(folder: Path, lane: str) -> list[str]:
    return ["run", *SETTINGS, f"engine.lane={lane}", "--folder", str(folder)]


def log_path(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.log"


def log_of(folder: Path) -> str:
    return log_path(folder).read_text() if log_path(folder).exists() else ""


def finish(nursery: Nursery, folder: Path, lane: str) -> None:
    """Resume a run, or begin it again where it was killed before it had a folder."""
    arguments = ["resume", str(folder)] if (folder / "run.json").exists() else command(folder, lane)
    assert nursery.run(*arguments, log=log_path(folder)) == 0, log_of(folder)


def remains(folder: Path) -> dict[str, bytes]:
    """Everything that must not depend on how often a run was stopped."""
    newest = checkpoint.generations(folder / "checkpoints")[-1]
    records = [folder / name for name in ("metrics.jsonl", "clients.jsonl", "federation.json")]
    files = [*records, folder / "model.safetensors", folder / "model.json", *sorted(newest.iterdir())]
    return {file.name: file.read_bytes() for file in files} | {"round": newest.name[:14].encode()}


def assert_same(folder: Path, other: Path) -> None:
    found, expected = remains(folder), remains(other)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def rows(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def kill_somewhere(pid: int, folder: Path, seconds: float, number: int, chance: random.Random) -> str:
    """SIGKILL at a moment of the run's life; moments are spread over start-up, rounds and checkpoint writing."""
    goal = chance.randrange(ROUNDS)
    if number % 4 == 0:
        moment, delay = "start-up or anywhere", chance.uniform(0, seconds)
        time.sleep(min(delay, 20))
    elif number % 4 == 1:
        moment, delay = "folder creation", chance.uniform(0, 0.02)
        until(lambda: not alive(pid) or any(p.is_dir() and folder.name in p.name for p in folder.parent.iterdir()))
        time.sleep(delay)
    elif number % 4 == 2:
        moment, delay = f"checkpoint {goal + 1}", chance.uniform(0, 0.004)
        drafts = folder / "checkpoints"
        until(lambda: not alive(pid) or any(_round(path) > goal for path in drafts.glob("*")), step=0)
        time.sleep(delay)
    else:
        moment, delay = f"row {goal + 1}", chance.uniform(0, seconds / ROUNDS / 2)
        until(lambda: rows(folder) > goal or not alive(pid), step=0.0005)
        time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    return moment


def _round(path: Path) -> int:
    digits = path.name.partition("round-")[2][:8]
    return int(digits) if digits.isdigit() else 0


# eight are every kind of moment once in each lane
@pytest.mark.parametrize("kills", [5, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed(
    nursery: Nursery, undisturbed: dict[str, tuple[Path, float]], tmp_path: Path, kills: int
) -> None:
    chance, hit, number = random.Random(7), [], 0
    while len(hit) < kills:
        lane = LANES[number % 2]
        expected, seconds = undisturbed[lane]
        folder = tmp_path / f"run-{number:04}"
        pid = nursery.start(*command(folder, lane), log=log_path(folder))
        moment = kill_somewhere(pid, folder, seconds, number // 2, chance)
        number += 1
        if nursery.wait(pid) == -signal.SIGKILL:  # else the run was quicker than we were: that is no crash
            hit.append(moment)
            saved = checkpoint.load_latest(folder / "checkpoints")
            assert (saved.round if saved else 0) >= rows(folder) - 1, "more than the round in progress was lost"
        finish(nursery, folder, lane)
        assert_same(folder, expected)
        assert number < 3 * kills + 10, f"too few kills found the run alive: {hit}"
    assert len({moment.split()[0] for moment in hit}) >= 3, hit


def test_killed_again_and_again(nursery: Nursery, undisturbed: dict[str, tuple[Path, float]], tmp_path: Path) -> None:
    folder = tmp_path / "unlucky"
    pid = nursery.start(*command(folder, "serial"), log=log_path(folder))
    for goal in (1, 3, 5):
        assert until(lambda goal=goal: rows(folder) >= goal)
        os.kill(pid, signal.SIGKILL)
        nursery.wait(pid)
        pid = nursery.start("resume", str(folder), log=log_path(folder))
    assert nursery.wait(pid) == 0, log_of(folder)
    assert_same(folder, undisturbed["serial"][0])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_the_round(
    nursery: Nursery, undisturbed: dict[str, tuple[Path, float]], tmp_path: Path, number: int, code: int
) -> None:
    folder = tmp_path / "stopped"
    pid = nursery.start(*command(folder, "serial"), "checkpoint.every=5", log=log_path(folder))
    assert until(lambda: rows(folder) >= 2)
    os.kill(pid, number)
    assert nursery.wait(pid) == code, log_of(folder)
    saved = checkpoint.load_latest(folder / "checkpoints")
    assert saved is not None and saved.round == rows(folder) < ROUNDS
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    assert "consilience resume" in log_of(folder)
    assert nursery.run("resume", str(folder), "checkpoint.every=1", log=log_path(folder)) == 0, log_of(folder)
    assert_same(folder, undisturbed["serial"][0])


def test_a_second_signal_ends_the_process_at_once(nursery: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "impatient"
    pid = nursery.start(*command(folder, "serial"), "algorithm.epochs=2000", log=log_path(folder))
    assert until(lambda: (folder / "lock").exists() and "simprox" in log_of(folder))
    time.sleep(0.3)  # well into the first round, which takes minutes
    os.kill(pid, signal.SIGTERM)
    assert until(lambda: "once more" in log_of(folder)), log_of(folder)
    os.kill(pid, signal.SIGTERM)
    assert nursery.wait(pid) == -signal.SIGTERM and rows(folder) == 0


def test_two_processes_cannot_share_a_run(nursery: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    pid = nursery.start(*command(folder, "serial"), "rounds=500", log=log_path(folder))
    assert until(lambda: rows(folder) >= 1)
    log = tmp_path / "second.log"
    assert nursery.run("resume", str(folder), log=log) == 4
    assert f"process {pid}" in log.read_text() and "Traceback" not in log.read_text()
    assert alive(pid)
    assert nursery.run("show", str(folder), log=log) == 0 and f"running as process {pid}" in log.read_text()
    os.kill(pid, signal.SIGKILL)
    nursery.wait(pid)
    assert nursery.run("show", str(folder), log=log) == 0 and "rounds, stopped" in log.read_text()
    assert nursery.run("resume", str(folder), f"rounds={rows(folder) + 1}", log=log) == 0, log.read_text()


def test_a_damaged_newest_checkpoint_falls_back(
    nursery: Nursery, undisturbed: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    assert begin(nursery, folder, "batched") == 0
    newest = checkpoint.generations(folder / "checkpoints")[-1]
    file = newest / "server.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (folder / "model.safetensors").unlink()
    assert nursery.run("resume", str(folder), log=log_path(folder)) == 0, log_of(folder)
    assert f"fell back to round {ROUNDS - 1}" in log_of(folder) and "SHA-256" in log_of(folder)
    assert_same(folder, undisturbed["batched"][0])


def test_more_rounds_for_a_finished_run(
    nursery: Nursery, undisturbed: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    folder = tmp_path / "longer"
    assert begin(nursery, folder, "batched", "rounds=3") == 0
    assert nursery.run("resume", str(folder), f"rounds={ROUNDS}", log=log_path(folder)) == 0, log_of(folder)
    assert_same(folder, undisturbed["batched"][0])
