"""Whatever the disk does, the latest checkpoint is the old generation or the new one, whole (FAULTS 44 to 47)."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_disk import (  # noqa: F401
    CALLS,
    Crash,
    Fault,
    Volatile,
    crash,
    error,
    failing,
    in_child,
    quick_flushes,
    short_write,
)
from sample_rounds import assert_whole, save_round, started

from consilience.runs.checkpoint import (
    CheckpointError,
    CorruptCheckpoint,
    generations,
    load,
    load_latest,
    save,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def number_of_calls(root: Path) -> int:
    started(root)
    with failing(-1, error(0)) as made:
        save_round(root, 3)
    assert set(made) >= {"open", "write", "fsync", "close", "rename", "mkdir", "remove_folder"}
    return len(made)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


FAULTS: dict[str, tuple[Fault, bool]] = {
    "no space": (error(errno.ENOSPC), False),
    "no space from then on": (error(errno.ENOSPC), True),
    "I/O error": (error(errno.EIO), False),
    "I/O error from then on": (error(errno.EIO), True),
    "I/O error after the effect": (error(errno.EIO, after=True), False),
    "short write": (short_write(None), False),
    "short writes from then on": (short_write(None), True),
    "short write, then no space": (short_write(errno.ENOSPC), False),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_each_disk_call_failing_in_turn_leaves_the_old_or_the_new_generation(tmp_path: Path, kind: str) -> None:
    fault, lasting = FAULTS[kind]
    for k in range(number_of_calls(tmp_path / "count")):
        root, files, refusal = started(tmp_path / str(k)), open_files(), ""
        with failing(k, fault, lasting=lasting) as made:
            try:
                save_round(root, 3)
            except CheckpointError as problem:
                refusal = str(problem)
        found = load_latest(root)
        round = assert_whole(found)
        assert found is not None and found.skipped == (), (k, made[k])
        assert round in (2, 3) and (refusal or round == 3), (k, made[k])
        assert not (refusal and "short" in kind and "no space" not in kind), "a short write is no failure"
        if refusal:
            assert str(root) in refusal and "free" in refusal, refusal
            assert os.strerror(errno.ENOSPC) in refusal or os.strerror(errno.EIO) in refusal, refusal
            assert [assert_whole(load(path)) for path in generations(root)][:2] == [1, 2]  # nothing was given up
        if not lasting and made[k] not in ("close", "remove_folder"):
            assert not [name for name in os.listdir(root) if name.startswith(".")], (k, made[k])
            assert open_files() == files or made[k] == "open", (k, made[k])
        save_round(root, 4)  # and the store works on
        assert assert_whole(load_latest(root)) == 4 and len(os.listdir(root)) == 2, (k, made[k])


def test_a_call_that_only_takes_one_byte_at_a_time_is_patience_not_failure(tmp_path: Path) -> None:
    one_byte: Fault = lambda name, real, args: real(args[0], args[1][:1])  # noqa: E731
    with failing(0, one_byte, only=("write",), lasting=True) as made:
        save_round(tmp_path, 1)
    assert assert_whole(load_latest(tmp_path)) == 1 and len(made) > 500


def test_a_write_that_takes_nothing_is_an_error_not_an_endless_loop(tmp_path: Path) -> None:
    with failing(0, lambda name, real, args: 0, only=("write",), lasting=True), pytest.raises(CheckpointError):
        save_round(tmp_path, 1)
    assert load_latest(tmp_path) is None


def test_a_disk_that_cannot_flush_folders_is_accepted(tmp_path: Path) -> None:
    def not_folders(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if os.path.isdir(f"/proc/self/fd/{args[0]}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(*args)

    with failing(0, not_folders, only=("fsync",), lasting=True):
        save_round(tmp_path, 1)
    assert assert_whole(load_latest(tmp_path)) == 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_process_that_ends_at_any_call_leaves_the_old_or_the_new_generation(tmp_path: Path, after: bool) -> None:
    calls = number_of_calls(tmp_path / "count")
    seen = set()
    for k in range(calls):
        root = started(tmp_path / str(k))

        def doomed(k: int = k, root: Path = root) -> None:
            with failing(k, crash(after=after)):
                save_round(root, 3)

        assert in_child(doomed) == 77
        found = load_latest(root)
        assert found is not None and found.skipped == ()
        seen.add(assert_whole(found))
        assert all(assert_whole(load(path)) for path in generations(root))  # none half removed
        save_round(root, 4)
        assert assert_whole(load_latest(root)) == 4 and len(os.listdir(root)) == 2
    assert seen == {2, 3}


def rounds_after_power_cuts(tmp_path: Path, *, flushes: bool, seeds: int) -> list[int]:
    """Cut the power at every call and after the last; the round found then, or -1 if a promise was broken."""
    rounds = []
    calls = number_of_calls(tmp_path / "count")
    for cut_at in range(calls + 1):
        for seed in range(seeds):
            root = started(tmp_path / f"{cut_at}-{seed}")
            cache = Volatile(cut_at, seed, flushes=flushes)
            finished = False
            with cache.mounted(), contextlib.suppress(Crash):
                save_round(root, 3)
                finished = True
            assert finished == (cut_at == calls)
            cache.lose_power(root)
            try:
                found = load_latest(root)
                round = assert_whole(found) if found is not None and not found.skipped else -1
                rounds.append(round if round == 3 or not finished else -1)  # what save() promised is there
            except CorruptCheckpoint:
                rounds.append(-1)
    return rounds


def test_a_power_cut_at_any_call_leaves_the_old_or_the_new_generation(tmp_path: Path) -> None:
    assert set(rounds_after_power_cuts(tmp_path, flushes=True, seeds=4)) == {2, 3}


def test_the_simulated_power_cut_would_catch_a_store_that_does_not_flush(tmp_path: Path) -> None:
    assert -1 in rounds_after_power_cuts(tmp_path, flushes=False, seeds=2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_minus_nine_at_random_moments(tmp_path: Path) -> None:
    """A child saves in a loop and tells each finished round: what was told is never lost, what is found is whole."""
    chance, last = random.Random(9), 0
    for _ in range(20):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                for round in range(last + 1, last + 10_000):
                    save_round(tmp_path, round)
                    os.write(writer, round.to_bytes(4, "little"))
            finally:
                os._exit(1)
        os.close(writer)
        told = [os.read(reader, 4) for _ in range(chance.randrange(1, 4))]
        time.sleep(chance.random() * 0.004)  # about one save: any instruction of it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while more := os.read(reader, 4):
            told.append(more)
        os.close(reader)
        found = load_latest(tmp_path)
        last = assert_whole(found)
        assert found is not None and found.skipped == ()
        finished = int.from_bytes(told[-1], "little")
        assert finished <= last <= finished + 1


def damage(chance: random.Random, root: Path, newest: Path, older: Path) -> tuple[str, Path, bytes | None]:
    """Damage one file of the newest generation; what was done, to which file, and what the file held."""
    file = newest / chance.choice(sorted(os.listdir(newest)))
    before = file.read_bytes()
    kind = chance.choice(("flip", "flip", "bit", "truncate", "extend", "zero", "swap", "exchange", "remove", "empty"))
    at = chance.randrange(len(before))
    data = bytearray(before)
    if kind == "flip":
        data[at] ^= chance.randrange(1, 256)
    elif kind == "bit":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "truncate":
        del data[at:]
    elif kind == "extend":
        data += chance.randbytes(chance.randrange(1, 20))
    elif kind == "zero":
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    elif kind == "swap":
        other, width = chance.randrange(len(data)), chance.randrange(1, 9)
        a, b = data[at : at + width], data[other : other + width]
        data[at : at + width], data[other : other + width] = b, a
    elif kind == "exchange":
        source = chance.choice((older, newest)) / chance.choice(sorted(os.listdir(newest)))
        data = bytearray(source.read_bytes())
    elif kind == "empty":
        data = bytearray()
    file.unlink()
    if kind != "remove":
        file.write_bytes(data)
    return kind, file, before


def assert_all_damage_is_found(root: Path, times: int, seed: int) -> None:
    older, newest = (save_round(root, round) for round in (1, 2))
    chance, damaged = random.Random(seed), 0
    while damaged < times:
        kind, file, before = damage(chance, root, newest, older)
        if file.exists() and file.read_bytes() == before:
            continue  # swapping equal bytes damages nothing
        damaged += 1
        with pytest.raises(CorruptCheckpoint) as refusal:
            load(newest)
        assert str(newest) in str(refusal.value), (kind, file)
        if damaged % 5 == 0:
            found = load_latest(root)
            assert assert_whole(found) == 1 and found is not None
            assert len(found.skipped) == 1 and newest.name in found.skipped[0]
        file.unlink(missing_ok=True)  # overwriting a file in place makes some disks flush it: slow
        file.write_bytes(before)
    assert assert_whole(load_latest(root)) == 2


def test_2500_damages_are_all_found(tmp_path: Path) -> None:
    assert_all_damage_is_found(tmp_path, 2500, seed=1)


@pytest.mark.slow
def test_10000_damages_are_all_found(tmp_path: Path) -> None:
    assert_all_damage_is_found(tmp_path, 10_000, seed=2)


def test_every_single_byte_flip_of_the_manifest_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"t": {"x": torch.ones(2)}}, {"a": 1.5})
    original = (path / "manifest.json").read_bytes()
    for at in range(len(original)):
        for mask in (1, 0x20, 0xFF):
            changed = bytearray(original)
            changed[at] ^= mask
            (path / "manifest.json").write_bytes(changed)
            with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
                load(path)


def test_when_every_generation_is_damaged_all_are_named(tmp_path: Path) -> None:
    for path in generations(started(tmp_path)):
        (path / "server.safetensors").write_bytes(b"rot")
    with pytest.raises(CorruptCheckpoint) as refusal:
        load_latest(tmp_path)
    assert "round-00000001" in str(refusal.value) and "round-00000002" in str(refusal.value)


def test_generations_whose_folders_were_exchanged_are_refused(tmp_path: Path) -> None:
    one, two = (save_round(tmp_path, round) for round in (1, 2))
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    with pytest.raises(CorruptCheckpoint, match="round"):
        load_latest(tmp_path)


def test_a_checkpoint_that_may_not_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(tmp_path)
    real = os.open

    def forbidden(path: Any, *args: Any, **kwargs: Any) -> int:
        if "round-00000002" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(CheckpointError, match=r"manifest\.json: Permission denied") as refusal:
        load_latest(tmp_path)
    assert not isinstance(refusal.value, CorruptCheckpoint)


def test_every_call_of_the_seam_is_used() -> None:
    """A call added to the seam without a place in these tests would go unnoticed."""
    assert set(CALLS) == {
        *("open", "write", "truncate", "fsync", "close", "rename", "mkdir", "unlink", "remove_folder"),
    }
