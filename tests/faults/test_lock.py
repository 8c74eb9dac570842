"""Two processes never work in one run folder, and a dead one never keeps another out (FAULTS 47)."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from consilience.runs.lock import RunLock, RunLocked

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.mark.parametrize("lockable", [True, False], ids=["flock", "claim file"])
def test_a_second_process_is_refused_until_the_first_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lockable: bool
) -> None:
    if not lockable:
        monkeypatch.setattr("filelock.lock_descriptor", error_without_locks)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with RunLock(tmp_path / "lock"):
                os.write(writer, b"held")
                signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reader, 4) == b"held"
        with pytest.raises(RunLocked) as refusal, RunLock(tmp_path / "lock"):
            pass
        message = str(refusal.value)
        assert f"process {pid}" in message and os.uname().nodename in message and str(tmp_path) in message
        assert "stop it" in message
        assert ("delete" in message) == (not lockable)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for _ in range(2):  # free after the kill, and again after a release
        with RunLock(tmp_path / "lock"), pytest.raises(RunLocked, match=f"process {os.getpid()}"):
            RunLock(tmp_path / "lock").acquire()


def error_without_locks(fd: int, *, blocking: bool) -> bool:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            RunLock(tmp_path / "lock").acquire()
            worker = os.fork()
            if worker == 0:
                os.write(writer, os.getpid().to_bytes(4, "little"))
                signal.pause()
            signal.pause()
        finally:
            os._exit(1)
    worker = int.from_bytes(os.read(reader, 4), "little")
    try:
        with pytest.raises(RunLocked):  # the worker's end does not free what its parent holds
            RunLock(tmp_path / "lock").acquire()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with RunLock(tmp_path / "lock"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("note", [b"", b"{", b'{"pid": "1", "host": 3}', b"[" * 5000, b"\xff"])
def test_a_damaged_note_in_the_lock_file_changes_only_the_message(tmp_path: Path, note: bytes) -> None:
    with RunLock(tmp_path / "lock"):
        (tmp_path / "lock").write_bytes(note)
        with pytest.raises(RunLocked, match="another process"):
            RunLock(tmp_path / "lock").acquire()


def test_a_claim_of_another_machine_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("filelock.lock_descriptor", error_without_locks)
    (tmp_path / "lock").write_text('{"host": "elsewhere", "pid": 1}')
    (tmp_path / "lock.claim").write_text("1\nelsewhere\n")
    with pytest.raises(RunLocked, match=r"process 1 on elsewhere.*delete .*lock\.claim"):
        RunLock(tmp_path / "lock").acquire()


def test_a_lock_file_that_cannot_be_made_is_a_clear_refusal(tmp_path: Path) -> None:
    with pytest.raises(RunLocked, match=r"lock file .*No such file"):
        RunLock(tmp_path / "absent" / "lock").acquire()


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "folder", "pipe"])
def test_whatever_stands_in_place_of_the_lock_is_left_alone(tmp_path: Path, kind: str) -> None:
    victim, lock = tmp_path / "victim", tmp_path / "run" / "lock"
    lock.parent.mkdir()
    victim.write_text("precious")
    if kind == "folder":
        lock.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock)
    elif kind == "hard link":
        os.link(victim, lock)
    else:
        lock.symlink_to(victim if kind == "link" else tmp_path / "absent")
    with pytest.raises(RunLocked, match=r"lock: it .*in its place"):
        RunLock(lock).acquire()
    assert victim.read_text() == "precious" and sorted(os.listdir(tmp_path)) == ["run", "victim"]


def test_the_lock_is_taken_through_a_link_that_the_user_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to("run")
    with RunLock(tmp_path / "latest" / "lock"), pytest.raises(RunLocked, match=f"process {os.getpid()}"):
        RunLock(tmp_path / "run" / "lock").acquire()


def test_links_are_refused_where_the_system_cannot_open_without_following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consilience.runs.disk._NO_LINKS", 0)  # as on Windows
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to("victim")
    with pytest.raises(RunLocked, match=r"lock: it is a symbolic link"):
        RunLock(tmp_path / "lock").acquire()
    assert (tmp_path / "victim").read_text() == "precious"
