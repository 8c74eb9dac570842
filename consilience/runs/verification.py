"""Verifies that a run folder is unchanged: files, log rows, checkpoints, and their counts."""

from __future__ import annotations

import dataclasses
import hashlib
import os

from consilience.runs import checkpoint
from consilience.runs.checkpoint import Checkpoint, CheckpointError
from consilience.runs.disk import read_file
from consilience.runs.folder import RunFolder
from consilience.runs.row_log import RecordError, RowLog

ENDED = ("finished", "interrupted")  # a run with this status has saved its last round


def problems(folder: RunFolder) -> list[str]:
    """Missing or changed parts, one line each; empty for an intact folder."""
    facts, found = folder.facts(), []
    ended = facts.get("status") in ENDED
    for name in facts.get("files", {}):
        if ended or os.path.lexists(folder.path / name):  # a crash may come between a digest and its file
            try:
                folder.read(name)
            except (RecordError, OSError) as problem:
                found.append(str(problem))
    rounds: dict[str, int] = {}
    for log in (folder.metrics, folder.clients, folder.timing):
        if folder.version == 1 and not os.path.lexists(log.path):
            continue
        try:
            history = log.read()
        except RecordError as problem:
            found.append(str(problem))
            continue
        found += [history.note] if history.note else []
        rounds[log.path.name] = max((row["round"] for row in history.rows), default=0)
    audit = RowLog(folder.path / "audit.jsonl", chained=True)  # of a deployed run
    if os.path.lexists(audit.path):
        try:
            history = audit.read()
            found += [history.note] if history.note else []
        except RecordError as problem:
            found.append(str(problem))
    if ended and rounds:
        shortest = min(rounds, key=rounds.__getitem__)
        if rounds[shortest] < max(rounds.values()):
            found.append(f"{folder.path / shortest} ends after round {rounds[shortest]}, other logs later")
    newest, damaged = latest(folder)
    older = [] if newest is None else checkpoint.generations(folder.checkpoints)  # without it all were checked
    for path in older:
        try:
            checkpoint.load(path)
        except CheckpointError as problem:
            damaged += [] if str(problem) in damaged else [str(problem)]
    return found + damaged + ([] if newest is None else _not_covered(folder, newest))


def newest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The checkpoint that a resume starts from; `skipped` says why newer ones are unusable, or which log is not the one
    it belongs to; refused if all are gone, or if it is another run's."""
    saved, reasons = latest(folder)
    if saved is None and reasons:
        raise RecordError(reasons[0])
    if saved is None:
        return None
    unknown = _not_covered(folder, saved)
    if len(unknown) == 2:
        raise RecordError(
            f"{folder.checkpoints}: the checkpoint of round {saved.round} is that of another run: neither "
            "metrics.jsonl nor clients.jsonl is what it counted on; put the folder's own checkpoints back"
        )
    return dataclasses.replace(saved, skipped=(*reasons, *unknown))


def latest(folder: RunFolder) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and why it is not the one of the last round, where that should be there."""
    try:
        saved = checkpoint.load_latest(folder.checkpoints)
    except CheckpointError as problem:
        return None, [str(problem)]
    found = list(saved.skipped) if saved else []
    if folder.facts().get("status") in ENDED and not found:
        try:
            rounds = len(folder.rows().rows)
        except RecordError:
            return saved, found  # reported elsewhere
        if saved is None and rounds:
            found.append(f"{folder.checkpoints} holds no checkpoint, but {rounds} rounds were saved: it was removed")
        elif saved is not None and saved.round != rounds:
            found.append(
                f"{folder.checkpoints}: the newest checkpoint is that of round {saved.round}, but {rounds} rounds were "
                "recorded: one is missing"
            )
    return saved, found


def _not_covered(folder: RunFolder, saved: Checkpoint) -> list[str]:
    """Logs without the rows that a checkpoint refers to."""
    found = []
    for log in (folder.metrics, folder.clients):
        length, sha256 = saved.facts.get(log.path.stem, (0, ""))
        try:
            data = read_file(log.path)[:length]
        except OSError:
            continue  # reported by the reader of its rows
        if sha256 and hashlib.sha256(data).hexdigest() != sha256:
            found.append(f"{log.path} does not hold what the checkpoint of round {saved.round} counted on")
    return found
