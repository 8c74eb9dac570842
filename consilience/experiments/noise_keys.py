"""The secret noise keys of a private run: on disk, readable by their owner only, until their round is saved."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from consilience.core.settings import Invalid
from consilience.privacy.round_keys import SIZE, fresh, name_of
from consilience.runs.disk import disk, explain, read_file, sync_folder, write_all, write_file
from consilience.runs.row_log import RecordError

_NAME = r"round-(\d{8,18})"


class NoiseKeys:
    """Gives each round its key: the stored one, so that a round is repeated exactly after a crash, or a new one.

    A key is durable before anything is drawn from it. Once its round is in a checkpoint it is no longer
    needed: it is overwritten and removed, and with it the only way to remove the noise from the models.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, round: int) -> bytes:
        """The key of a round."""
        known = self._stored(round)
        return self._store(round, fresh(round)) if known is None else known

    def name(self, round: int) -> str | None:
        """The name of a round's key in the ledger, if there is one; it does not reveal the key."""
        known = self._stored(round)
        return None if known is None else name_of(known)

    def erase(self, last: int) -> None:
        """Overwrite and remove the keys of all rounds up to `last`."""
        if not os.path.lexists(self._folder):
            return
        self._refuse_link()
        old = [
            file
            for file in self._folder.iterdir()
            if (match := re.fullmatch(_NAME, file.name)) and int(match[1]) <= last
        ]
        try:
            for file in old:
                self._overwrite(file)
                disk.unlink(file)
            if old:
                sync_folder(self._folder)
        except OSError as problem:
            raise RecordError(explain("erase the noise key", self._folder, problem)) from problem

    def _stored(self, round: int) -> bytes | None:
        """The key on disk; an incomplete one, left by a crash, was never used."""
        if not os.path.lexists(self._folder):
            return None
        self._refuse_link()
        try:
            key = read_file(self._path(round), most=SIZE)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise RecordError(explain("read the noise key", self._path(round), problem)) from problem
        return key if len(key) == SIZE else None

    def _store(self, round: int, key: bytes) -> bytes:
        path = self._path(round)
        try:
            if not os.path.lexists(self._folder):
                disk.mkdir(self._folder, 0o700)
                sync_folder(self._folder.parent)
            if os.path.lexists(path):
                disk.unlink(path)
            write_file(path, [key], mode=0o600)
            sync_folder(self._folder)
        except OSError as problem:
            raise RecordError(explain("store the noise key", path, problem)) from problem
        return key

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round:08d}"

    def _overwrite(self, path: Path) -> None:
        fd = disk.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
        try:
            write_all(fd, bytes(SIZE))
            disk.fsync(fd)
        finally:
            disk.close(fd)

    def _refuse_link(self) -> None:
        if not stat.S_ISDIR(os.lstat(self._folder).st_mode):
            raise Invalid(f"{self._folder} holds the noise keys and must be a folder, not a link or a file: remove it")
