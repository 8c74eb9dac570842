"""A disk that fails, crashes or loses power at the k-th call, for tests of whatever writes through `disk`."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from consilience.runs.disk import Disk, disk

CALLS = tuple(name for name in vars(Disk) if not name.startswith("_"))
Fault = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]


class Crash(BaseException):
    """The process is gone: no handler may catch this by accident."""


@pytest.fixture(autouse=True)
def quick_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import this to spare the real flushes: the end of a process, unlike that of power, loses no written page."""
    monkeypatch.setattr(Disk, "fsync", staticmethod(lambda fd: os.fstat(fd) and None))


@contextmanager
def failing(k: int, fault: Fault, *, only: tuple[str, ...] = CALLS, lasting: bool = False) -> Iterator[list[str]]:
    """Inside, call number k (and, if `lasting`, all later ones) goes to `fault`; yields the calls made so far."""
    made: list[str] = []

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(Disk, name)

        def call(*args: Any) -> Any:
            made.append(name)
            number = len(made) - 1
            return fault(name, real, args) if number == k or (lasting and number > k) else real(*args)

        return call

    with replaced({name: wrap(name) for name in only}):
        yield made


@contextmanager
def replaced(calls: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """`disk` with some calls replaced."""
    for name, call in calls.items():
        setattr(disk, name, call)
    try:
        yield
    finally:
        for name in calls:
            delattr(disk, name)


def error(number: int, *, after: bool = False) -> Fault:
    """Fail with an errno, before or after the call took effect."""

    def fault(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if after:
            real(*args)
        raise OSError(number, os.strerror(number))

    return fault


def short_write(number: int | None) -> Fault:
    """A write that takes half the bytes; then goes on, or fails with an errno."""

    def fault(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name != "write" or len(args[1]) < 2:
            return real(*args)
        written = real(args[0], args[1][: len(args[1]) // 2])
        if number is not None:
            raise OSError(number, os.strerror(number))
        return written

    return fault


def crash(*, after: bool) -> Fault:
    """The process ends at this call, before or after it took effect; writes and removals are half done if before."""

    def fault(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if after:
            real(*args)
        elif name == "write":
            real(args[0], args[1][: len(args[1]) // 2])
        elif name == "remove_folder":
            min(Path(args[0]).iterdir()).unlink()
        raise Crash

    return fault


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process that ends without any clean-up; 0: done, 77: crashed, 1: something else went wrong."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except Crash:
            status = 77
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Volatile:
    """A disk with a write cache: what was not flushed may be gone, in any combination, after `lose_power`."""

    def __init__(self, cut_at: int, seed: int, *, flushes: bool = True) -> None:
        self.cut_at, self.flushes, self.random, self.calls = cut_at, flushes, random.Random(seed), 0
        self.paths: dict[int, Path] = {}
        self.dirty: dict[int, Path] = {}  # inode -> path of a file with unflushed content
        self.names: list[tuple[str, Path, Path]] = []  # unflushed (what, where, where to)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        own = {name: getattr(self, name) for name in ("open", "write", "fsync", "rename", "mkdir")}
        rest = {name: getattr(Disk, name) for name in CALLS if name not in own}
        with replaced({name: self._counted(call) for name, call in (own | rest).items()}):
            yield

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.calls += 1
            if self.calls > self.cut_at:
                raise Crash
            return call(*args)

        return counted

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        fresh = not Path(path).exists()
        fd = os.open(path, flags, mode)
        self.paths[fd] = Path(path)
        if fresh:
            self.names.append(("create", Path(path), Path(path)))
        return fd

    def write(self, fd: int, data: Any) -> int:
        self.dirty[os.fstat(fd).st_ino] = self.paths[fd]
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        if not self.flushes:
            return
        self.dirty.pop(os.fstat(fd).st_ino, None)
        self.names = [item for item in self.names if item[2].parent != self.paths[fd]]

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)
        moved = [
            (what, at, target / to.relative_to(source) if to.is_relative_to(source) else to)
            for what, at, to in self.names
        ]
        self.names = [*moved, ("rename", source, target)]

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        self.names.append(("create", Path(path), Path(path)))

    def lose_power(self, folder: Path) -> None:
        """Damage unflushed contents, then undo a random choice of the unflushed changes of names."""
        for file in [path for path in folder.rglob("*") if path.is_file()]:
            if file.stat().st_ino in self.dirty:
                content = file.read_bytes()
                keep = self.random.randrange(len(content))
                zeros = self.random.choice((0, len(content) - keep))
                file.write_bytes(content[:keep] + bytes(zeros))
        for what, source, target in reversed(self.names):
            if self.random.random() < 0.5 and target.exists():
                if what == "rename" and not source.exists():
                    os.replace(target, source)
                elif what == "create" and target.is_dir():
                    shutil.rmtree(target)
                elif what == "create":
                    target.unlink()
