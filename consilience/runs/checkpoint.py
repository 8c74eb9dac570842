"""Checkpoints in generations: written atomically, every byte covered by a digest, no executable content."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from consilience.core.settings import Count, Invalid, Range, check_value
from consilience.core.tree import Tree
from consilience.runs import canonical, tree_file
from consilience.runs.client_log import ClientLog, ClientTable, LogEntry, TableEntry, log_files, tables_in
from consilience.runs.disk import (
    disk,
    explain,
    is_folder,
    is_temporary,
    make_inner_folder,
    read_file,
    sync_folder,
    temporary,
    write_file,
)
from consilience.runs.manifest import MANIFEST, MOST_MANIFEST_BYTES, Manifest, TreeEntry, UnknownFormat
from consilience.runs.names import plain, safe_name
from consilience.runs.saved_rows import read_log

Round = Annotated[int, Range(least=0, below=1e17)]  # largest number that fits a folder name

log = logging.getLogger(__name__)

_GENERATION = r"round-(\d{8,18})(?:\.(\d{1,9}))?"  # ".2" is the second attempt at saving the same round
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESTALE}
_DAMAGED = {errno.EIO, errno.EINVAL, errno.EFBIG}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and the reason."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint is incomplete, damaged or forged; nothing was read from it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint file {plain(path, most=400)} cannot be used: {reason}")
        self.path, self.reason = path, reason


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What was saved after `round` rounds; `skipped` says which newer generations were unusable, and why."""

    round: int
    trees: dict[str, Tree]
    facts: dict[str, Any]
    path: Path
    skipped: tuple[str, ...] = ()


def save(
    root: Path,
    round: Round,
    trees: Mapping[str, Tree],
    facts: Mapping[str, Any] | None = None,
    keep: Count = 2,
    clients: ClientLog | None = None,
) -> Path:
    """Write generation `round` into `root`, drop all but the newest `keep`; hold the run's lock meanwhile.

    Client rows with change tracking go to a file that all generations share; with the `clients` of the last save, only
    the changed ones. The old generations are unchanged until the new one is durable. It is then the latest:
    generations of later rounds, left by a run that was resumed from an earlier checkpoint, are removed too.
    """
    check_value("round", round, Round)
    check_value("keep", keep, Count)
    root, stored_facts = Path(root), canonical.to_json_types(facts or {}, "facts")
    if len({str(name).lower() for name in trees}) != len(trees):
        raise Invalid(f"tree names {plain(list(trees))} differ in capitals only: not all disks tell those apart")
    described, tables = {}, list[ClientTable]()
    for name, tree in trees.items():
        flat, layout = tree_file.describe(tree, safe_name(name, "tree name"))
        own = tables_in(name, flat)
        elsewhere = {path for table in own for path in table.entry.paths}
        described[name] = {path: leaf for path, leaf in flat.items() if path not in elsewhere}, layout
        tables += own
    clients = clients or ClientLog()
    try:
        final, others = _new_generation(root, round)
        entry = clients.append(root, tables) if tables else None
        _write(final, round, described, stored_facts, tuple(table.entry for table in tables), entry)
    except OSError as problem:
        raise CheckpointError(explain(f"save the checkpoint of round {round}:", root, problem)) from problem
    if tables:
        clients.commit()
    _retire([*others, final], keep)
    if clients.may_exist:
        clients.may_exist = _remove_unused_logs(root)
    return final


def load(path: Path) -> Checkpoint:
    """One generation, its digests verified before parsing, or `CorruptCheckpoint` naming file and reason."""
    path = Path(path)
    try:
        is_folder(path)
    except OSError as problem:
        raise CorruptCheckpoint(path, plain(problem.strerror)) from problem
    manifest = _manifest(path)
    stored = {} if manifest.log is None else _read_log(path.parent / manifest.log.file, manifest)
    trees = {}
    for entry in manifest.trees:
        file = path / entry.file
        data = _read(file, entry.bytes)
        if len(data) != entry.bytes:
            raise CorruptCheckpoint(file, f"it holds {len(data)} bytes where {entry.bytes} were written")
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise CorruptCheckpoint(file, "its SHA-256 digest is not the one that was written")
        try:
            elsewhere = {place: leaf for (name, place), leaf in stored.items() if name == entry.name}
            trees[entry.name] = tree_file.restore(data, entry.layout, elsewhere)
        except ValueError as problem:
            raise CorruptCheckpoint(file, str(problem)) from problem
    return Checkpoint(round=manifest.round, trees=trees, facts=manifest.facts, path=path)


def load_latest(root: Path) -> Checkpoint | None:
    """The newest whole generation; None where none was saved, `CorruptCheckpoint` if all are damaged."""
    skipped: list[str] = []
    for path in reversed(_named(root)):
        try:
            return dataclasses.replace(load(path), skipped=tuple(skipped))
        except CorruptCheckpoint as problem:
            if not os.path.lexists(path):  # the running process has replaced it meanwhile: read again
                return load_latest(root)
            skipped.append(str(problem))
    if skipped:
        raise CorruptCheckpoint(Path(root), "no generation is whole: " + "; ".join(skipped))
    return None


def generations(root: Path) -> tuple[Path, ...]:
    """The generations in `root`, oldest first, whole or not; drafts, links and foreign files are left out."""
    return tuple(path for path in _named(root) if path.is_dir() and not path.is_symlink())


def _named(root: Path) -> tuple[Path, ...]:
    """Everything named like a generation, oldest first; empty without a folder; links are not followed."""
    try:
        names = os.listdir(root) if is_folder(Path(root)) else []
    except OSError as problem:
        raise CheckpointError(explain("look for checkpoints in", Path(root), problem)) from problem
    ordered = sorted((order, name) for name in names if (order := _order(name)))
    return tuple(Path(root) / name for _, name in ordered)


def round_of(path: Path) -> int:
    """The round a generation is named after."""
    order = _order(path.name)
    if order is None:
        raise Invalid(f"{plain(path, most=400)} is not named like a checkpoint (round-00000012)")
    return order[0]


def _write(
    final: Path,
    round: int,
    described: Mapping[str, tuple[Any, tree_file.TreeLayout]],
    facts: dict[str, Any],
    tables: tuple[TableEntry, ...],
    log: LogEntry | None,
) -> None:
    """Build the generation under a temporary name, flush it to disk, then rename it."""
    draft = temporary(final)
    try:
        disk.mkdir(draft)
        entries = []
        for name, (flat, layout) in described.items():
            length, digest = write_file(draft / f"{name}.safetensors", tree_file.chunks(flat))
            entries.append(TreeEntry(name=name, bytes=length, sha256=digest, layout=layout))
        manifest = Manifest(round=round, trees=tuple(entries), facts=facts, tables=tables, log=log)
        write_file(draft / MANIFEST, [manifest.to_bytes()])
        sync_folder(draft)
        disk.rename(draft, final)
    except Exception:
        _remove(draft)
        raise
    sync_folder(final.parent)


def _manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        manifest = Manifest.from_bytes(_read(file, MOST_MANIFEST_BYTES))
    except UnknownFormat as problem:
        raise CheckpointError(f"checkpoint file {plain(file, most=400)}: {problem}") from problem
    except ValueError as problem:
        raise CorruptCheckpoint(file, str(problem)) from problem
    named = _order(path.name)
    if named and named[0] != manifest.round:
        raise CorruptCheckpoint(file, f"it describes round {manifest.round}, its folder another")
    return manifest


def _read(file: Path, most: int) -> bytes:
    try:
        return read_file(file, most=most)
    except OSError as problem:
        raise _unreadable(file, problem) from problem


def _unreadable(file: Path, problem: OSError) -> CheckpointError:
    reason = plain(problem.strerror or problem)
    if problem.errno in _ABSENT | _DAMAGED:
        return CorruptCheckpoint(file, f"it cannot be read: {reason}")
    # No permission, too many open files: an older generation would hide a problem that can be fixed.
    return CheckpointError(f"cannot read checkpoint file {plain(file, most=400)}: {reason}")


def _read_log(file: Path, manifest: Manifest) -> dict[tuple[str, str], Tensor]:
    """The client rows of a generation."""
    assert manifest.log is not None
    try:
        return read_log(file, manifest.log, manifest.tables)
    except ValueError as problem:
        raise CorruptCheckpoint(file, str(problem)) from problem
    except OSError as problem:
        raise _unreadable(file, problem) from problem


def _remove_unused_logs(root: Path) -> bool:
    """Remove files with clients' rows that no generation refers to; all stay while a generation cannot be read.

    Returns whether any may be left.
    """
    try:
        files = log_files(root)
        manifests = [_manifest(path) for path in _named(root)] if files else []
        used = {manifest.log.file for manifest in manifests if manifest.log is not None}
        for name in files - used:
            disk.unlink(root / name)
    except (OSError, CheckpointError) as problem:
        log.warning("outdated clients' rows in %s are not removed: %s", plain(root, most=400), problem)
        return True
    return bool(used)


def _order(name: str) -> tuple[int, int] | None:
    """(round, attempt) of a generation's folder name; None for any other name."""
    match = re.fullmatch(_GENERATION, name, re.ASCII)
    return (int(match[1]), int(match[2] or 1)) if match else None


def _new_generation(root: Path, round: int) -> tuple[Path, list[Path]]:
    """(a path not in use, since nothing is renamed over a generation; the generations that there are, oldest first).

    Drafts that a crash left behind are removed.
    """
    make_inner_folder(root)
    names = os.listdir(root)
    for name in names:
        if is_temporary(name, _GENERATION):
            _remove(root / name)
    orders = sorted((order, name) for name in names if (order := _order(name)))
    attempts = [attempt for (saved, attempt), _ in orders if saved == round]
    new = root / (f"round-{round:08d}" + (f".{max(attempts) + 1}" if attempts else ""))
    return new, [root / name for _, name in orders]


def _retire(generations: list[Path], keep: int) -> None:
    """Remove the generations that the last one replaces; failed removals are repeated at the next save."""
    newest = generations[-1]
    orders = dict(sorted(((path, _order(path.name) or (0, 0)) for path in generations), key=lambda pair: pair[1]))
    last_attempt = dict(orders.values())  # round -> its last attempt, oldest round first
    kept = [round for round in last_attempt if round <= orders[newest][0]][-keep:]
    for path, (round, attempt) in reversed(orders.items()):
        if round in kept and attempt == last_attempt[round]:
            continue
        try:
            # Renamed first: a half-deleted generation never has its own name.
            disk.rename(path, temporary(path))
        except OSError as problem:
            message = explain("remove the outdated checkpoint", path, problem)
            if round > orders[newest][0]:
                raise CheckpointError(f"{message}; a resume would take it for the latest") from problem
            log.warning(message)
        _remove(temporary(path))


def _remove(leftover: Path) -> None:
    """Remove a folder with its contents; a link or file of that name is itself removed."""
    try:
        if leftover.is_dir() and not leftover.is_symlink():
            disk.remove_folder(leftover)
        elif os.path.lexists(leftover):
            disk.unlink(leftover)
    except OSError as problem:
        log.warning(explain("remove the leftover", leftover, problem))
