"""Whatever the disk does, a run folder holds the old record or the new one, and each row is whole (FAULTS 44, 45)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broken_disk import Fault, crash, error, failing, in_child, quick_flushes, short_write  # noqa: F401

from consilience.runs.folder import RecordError, RunFolder

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

KEPT = ["checkpoints", "clients.jsonl", "config.toml", "metrics.jsonl"]
FAULTS: dict[str, Fault] = {
    "no space": error(errno.ENOSPC),
    "I/O error": error(errno.EIO),
    "I/O error after the effect": error(errno.EIO, after=True),
    "short write": short_write(None),
    "short write, then no space": short_write(errno.ENOSPC),
}


def make(root: Path) -> RunFolder:
    return RunFolder.create(root, "run", "rounds = 3", {"lane": "serial"})


def filled(root: Path) -> RunFolder:
    folder = make(root)
    for round in range(3):
        folder.metrics.append({"round": round})
    return folder


def calls(work: Callable[[], Any]) -> int:
    with failing(-1, error(0)) as made:
        work()
    return len(made)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("kind", FAULTS)
def test_creating_a_run_works_whole_or_leaves_nothing(tmp_path: Path, kind: str) -> None:
    for k in range(calls(lambda: make(tmp_path / "count"))):
        root, refused = tmp_path / str(k), ""
        with failing(k, FAULTS[kind]) as made:
            try:
                make(root)
            except RecordError as problem:
                refused = str(problem)
        assert not refused or kind != "short write", "a short write is no failure"
        if refused:
            assert str(tmp_path) in refused and "free" in refused
            assert not root.exists() or names(root) == [], (k, made[k])
            make(root)
        assert RunFolder.open(root / "run").facts()["lane"] == "serial" and names(root) == ["run"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_process_that_ends_while_creating_a_run_leaves_it_whole_or_absent(tmp_path: Path, after: bool) -> None:
    for k in range(calls(lambda: make(tmp_path / "count"))):
        root = tmp_path / str(k)

        def doomed(k: int = k, root: Path = root) -> None:
            with failing(k, crash(after=after)):
                make(root)

        assert in_child(doomed) == 77
        folder = RunFolder.open(root / "run") if (root / "run").exists() else make(root)
        assert folder.config_text() == "rounds = 3" and folder.rows().rows == []
        assert names(root) == ["run"]


@pytest.mark.parametrize("kind", FAULTS)
def test_recording_facts_keeps_the_old_or_the_new_ones(tmp_path: Path, kind: str) -> None:
    for k in range(
        calls(lambda: make(tmp_path / "count").record(lane="batched")) - calls(lambda: make(tmp_path / "c"))
    ):
        folder, refused = make(tmp_path / str(k)), ""
        with failing(k, FAULTS[kind]):
            try:
                folder.record(lane="batched")
            except RecordError as problem:
                refused = str(problem)
        lane = RunFolder.open(folder.path).facts()["lane"]
        assert lane in ("serial", "batched") and (refused or lane == "batched")
        assert not refused or kind != "short write", "a short write is no failure"
        assert not refused or (("run.json" in refused or str(folder.path) in refused) and "free" in refused)
        folder.record(lane="streams")
        assert folder.facts()["lane"] == "streams"
        assert names(folder.path) == [*KEPT, "run.json", "timing.jsonl"]


@pytest.mark.parametrize("kind", FAULTS)
def test_a_row_is_added_whole_or_not_at_all_and_the_run_can_go_on(tmp_path: Path, kind: str) -> None:
    for k in range(4):  # open, write, flush, close
        folder, refused = filled(tmp_path / str(k)), ""
        position = folder.metrics.position()
        with failing(k, FAULTS[kind]) as made:
            try:
                folder.metrics.append({"round": 3})
            except RecordError as problem:
                refused = str(problem)
        rows = RunFolder.open(folder.path).rows()
        assert rows.note == "" and [row["round"] for row in rows.rows] in ([0, 1, 2], [0, 1, 2, 3]), (k, made)
        assert "metrics.jsonl" in refused and "free" in refused if refused else len(rows.rows) == 4
        assert bool(refused) == (kind != "short write" and ("short" not in kind or made[k] == "write")), (k, made)
        if made[k] == "close" and refused:  # the row is there, the answer was not: cut back before trying again
            folder.cut_back(position, None)
        if refused:
            folder.metrics.append({"round": 3})
        assert [row["round"] for row in folder.rows().rows] == [0, 1, 2, 3]


def test_a_row_that_can_neither_be_finished_nor_taken_back_is_noticed(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    position = folder.metrics.position()

    def fails(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return short_write(errno.EIO)(name, real, args) if name == "write" else error(errno.EIO)(name, real, args)

    with failing(0, fails, only=("write", "truncate"), lasting=True), pytest.raises(RecordError):
        folder.metrics.append({"round": 3})
    assert "torn" in folder.rows().note and len(folder.rows().rows) == 3
    with pytest.raises(RecordError, match="bytes where"):
        folder.metrics.append({"round": 3})
    folder.cut_back(position, None)
    folder.metrics.append({"round": 3})
    assert [row["round"] for row in folder.rows().rows] == [0, 1, 2, 3]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_process_that_ends_while_adding_a_row_leaves_at_most_a_torn_line(tmp_path: Path, after: bool) -> None:
    for k in range(4):
        folder = filled(tmp_path / str(k))
        position = folder.metrics.position()

        def doomed(k: int = k, folder: RunFolder = folder) -> None:
            with failing(k, crash(after=after)):
                folder.metrics.append({"round": 3})

        assert in_child(doomed) == 77
        resumed = RunFolder.open(folder.path)
        assert [row["round"] for row in resumed.rows().rows][:3] == [0, 1, 2]
        resumed.cut_back(position, None)
        resumed.metrics.append({"round": 3})
        assert [row["round"] for row in RunFolder.open(folder.path).rows().rows] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["no space", "I/O error", "I/O error after the effect"])
def test_cutting_rows_back_works_or_leaves_them_readable(tmp_path: Path, kind: str) -> None:
    for k in range(4):  # open, truncate, flush, close
        folder = make(tmp_path / str(k))
        position = folder.metrics.append({"round": 0})
        length = folder.metrics.append({"round": 1})[0]
        with failing(k, FAULTS[kind]), pytest.raises(RecordError, match=r"metrics\.jsonl.*free"):
            folder.cut_back(position, None)
        assert [row["round"] for row in folder.rows().rows] in ([0], [0, 1])
        folder.cut_back(position, None)
        assert folder.metrics.append({"round": 1})[0] == length
