"""The folder of one run: its config, its facts, one row per round, its partition and its checkpoints."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from consilience.core.settings import Invalid
from consilience.runs import canonical, checkpoint
from consilience.runs.disk import (
    disk,
    explain,
    is_temporary,
    make_folder,
    open_file,
    read_file,
    replace_file,
    sync_folder,
    temporary,
    write_file,
)
from consilience.runs.facts import FORMAT, checked_facts, described, prepare_facts, sha256, with_digest
from consilience.runs.lock import RunLock, is_alive
from consilience.runs.names import plain, safe_name
from consilience.runs.redact import redacted, secrets_in
from consilience.runs.row_log import History, RecordError, RowLog

__all__ = ["History", "RecordError", "RunFolder", "RunSummary", "redacted", "runs"]

CONFIG = "config.toml"
NODES = "nodes.json"
"""The health of a deployed run's nodes, as seen by the server."""
DEPLOY_LOG = "deploy.log"
RESUME_LOG = "resume.log"
"""The output of a run that was resumed by another program, such as the dashboard."""
_MOST_JSON_BYTES = 1 << 24


@dataclass(frozen=True, eq=False, kw_only=True)
class RunFolder:
    """The files of a run; hold `lock()` while writing, reading needs no lock.

    Each file is under a digest: `run.json` under its own; the config, the partition, the clients' description and the
    trained model under those that `run.json` lists; the rows of a log under the chain that ends each row; a checkpoint
    under its manifest. What is not as it was written is refused, or noted where the rest can be read without it.
    """

    path: Path
    version: int = FORMAT
    metrics: RowLog = field(init=False, repr=False)  # reproducible byte for byte
    timing: RowLog = field(init=False, repr=False)  # wall-clock times, separate because they are not reproducible
    clients: RowLog = field(init=False, repr=False)  # client by client, reproducible as well; old runs have none
    checkpoints: Path = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoints", self.path / "checkpoints")
        for name in ("metrics", "timing", "clients"):
            object.__setattr__(self, name, RowLog(self.path / f"{name}.jsonl", chained=self.version > 1))

    @staticmethod
    def create(root: Path, name: str, config_text: str, facts: Mapping[str, Any] | None = None) -> RunFolder:
        """Make a new folder `root/name` atomically; a non-empty one is refused."""
        path = Path(root) / safe_name(name, "run name")
        _refuse_occupied(path)
        _check_config(config_text)
        config = config_text.encode()
        facts = described(name) | prepare_facts(facts or {}) | {"files": {CONFIG: [sha256(config)]}}
        try:
            make_folder(Path(root))
            _build(path, config, with_digest(facts))
        except OSError as problem:
            if problem.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                _refuse_occupied(path)  # another process was faster
            raise RecordError(explain("create the run folder", path, problem)) from problem
        return RunFolder(path=path)

    @staticmethod
    def open(path: Path) -> RunFolder:
        """The folder of an existing run."""
        return RunFolder(path=Path(path), version=RunFolder(path=Path(path)).facts()["format"])

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def partition(self) -> Path:
        return self.path / "partition.npz"

    @property
    def federation(self) -> Path:
        return self.path / "federation.json"

    def lock(self) -> RunLock:
        """`with folder.lock():` excludes every other process."""
        return RunLock(self.path / "lock")

    def config_text(self) -> str:
        """The resolved config, as TOML."""
        return self.read(CONFIG).decode("utf-8", errors="replace")

    def facts(self) -> dict[str, Any]:
        """What `run.json` says: versions, platform, and whatever was recorded."""
        data = self._read("run.json")
        try:
            return checked_facts(data)
        except ValueError as problem:
            raise RecordError(f"{self.path / 'run.json'} is damaged: {plain(problem)}") from problem

    def read(self, name: str) -> bytes:
        """Read a file of the folder; `RecordError` if it does not match its digest in `run.json`."""
        data = self._read(name)
        if self.version > 1 and sha256(data) not in self.facts()["files"].get(name, ()):
            raise RecordError(
                f"{self.path / name} was changed or damaged: its SHA-256 is not the one in run.json; "
                "put the file back as it was written"
            )
        return data

    def store(self, name: str, data: bytes, *, doing: str = "store") -> None:
        """Write a file of the folder with its digest; after a crash either the old or the new file is there."""
        known = self.facts().get("files", {})
        before, now = known.get(name, []), sha256(data)
        path = self.path / name
        try:
            if before == [now] and path.exists() and read_file(path) == data:
                return
            self._write_facts(files={**known, name: [*before, now]})
            replace_file(path, data)
        except OSError as problem:
            raise RecordError(explain(f"{doing} in", path, problem)) from problem
        self._write_facts(files={**known, name: [now]})

    def cover(self, *names: str) -> None:
        """Add the digests of files that other code wrote to `run.json`."""
        found = {name: [sha256(self._read(name))] for name in names}
        self._write_facts(files={**self.facts().get("files", {}), **found})

    def uncover(self, *names: str) -> None:
        """Remove the digests of files that are about to be rewritten."""
        known = self.facts().get("files", {})
        if set(names) & set(known):
            self._write_facts(files={name: digests for name, digests in known.items() if name not in names})

    def record(self, **facts: Any) -> None:
        """Add facts to `run.json`, or replace those of the same name; secrets are redacted, NaN becomes null."""
        self._write_facts(**prepare_facts(facts))

    def _write_facts(self, **facts: Any) -> None:
        together = self.facts() | facts
        try:
            replace_file(self.path / "run.json", with_digest(together))
        except OSError as problem:
            raise RecordError(explain("record facts in", self.path / "run.json", problem)) from problem

    def describe_clients(self, facts: Mapping[str, Any]) -> None:
        """Store the description of the clients, unless it is stored already."""
        data = canonical.encode(canonical.to_json_types(facts, "clients")) + b"\n"
        self.store(self.federation.name, data, doing="describe the clients")

    def open_log(self, name: str) -> TextIO:
        """A text file of the folder, to add lines to."""
        try:
            return os.fdopen(open_file(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8")
        except OSError as problem:
            raise RecordError(explain("write the log to", self.path / name, problem)) from problem

    def cut_back(self, metrics: tuple[int, str], clients: tuple[int, str] | None) -> None:
        """Truncate metrics and clients to the positions in a checkpoint, the timing to its last complete line.

        None: the checkpoint is of an older version without the clients' position; rows of later rounds are removed.
        """
        self.metrics.truncate(*metrics)
        self.timing.drop_torn_line()
        self.timing.read()
        if clients is None:
            self.clients.keep_rounds(len(self.metrics.read().rows))
        else:
            self.clients.truncate(*clients)

    def rows(self) -> History:
        """The metrics rows, with a note if the last line is incomplete."""
        return self.metrics.read()

    def _read(self, name: str) -> bytes:
        file = self.path / name
        try:
            return read_file(file, most=_MOST_JSON_BYTES if name in ("run.json", CONFIG) else None)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"{plain(self.path, most=400)} holds no run: {name} was looked for there; "
                "give the folder that `consilience run` made (`consilience show` lists them)"
            ) from None
        except OSError as problem:
            raise RecordError(explain("read", file, problem)) from problem


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One line of a list of runs; `note` says what is wrong with the folder, if anything."""

    name: str
    path: Path
    rounds: int = 0  # rows of metrics
    last_row: dict[str, Any] = field(default_factory=dict)
    saved_round: int | None = None  # of the newest checkpoint
    facts: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def runs(root: Path) -> list[RunSummary]:
    """The runs in `root`, by name; a damaged one is listed with the reason, never raised."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        folders = (path for path in Path(root).iterdir() if not path.name.startswith("."))
        return [_summary(path) for path in sorted(folders) if os.path.lexists(path / "run.json")]
    return []


def _summary(path: Path) -> RunSummary:
    generations = checkpoint.generations(path / "checkpoints")
    saved_round = checkpoint.round_of(generations[-1]) if generations else None
    try:
        folder = RunFolder.open(path)
        facts, history = folder.facts(), folder.rows()
    except (RecordError, OSError) as problem:
        return RunSummary(name=path.name, path=path, saved_round=saved_round, note=plain(problem, most=400))
    return RunSummary(
        name=path.name,
        path=path,
        rounds=len(history.rows),
        last_row=history.rows[-1] if history.rows else {},
        saved_round=saved_round,
        facts=facts,
        note=history.note,
    )


def _check_config(text: str) -> None:
    """Refuse a config that could not be read back, or that would put a secret on disk."""
    try:
        found = secrets_in(tomllib.loads(text))
    except tomllib.TOMLDecodeError as problem:
        raise Invalid(f"the config of a run must be TOML: {plain(problem)}") from problem
    if found:
        raise Invalid(
            f"the config holds what looks like a secret in {plain(', '.join(found))}: "
            "it would be stored in the run folder; give it through an environment variable instead"
        )


def _build(path: Path, config: bytes, facts: bytes) -> None:
    """Build the folder under a temporary name, then rename it: no system renames over a non-empty folder."""
    for leftover in path.parent.iterdir():
        # Another process may be building the same run just now: only drafts of ended processes are removed.
        if is_temporary(leftover.name, re.escape(path.name)):
            owner = int(leftover.name.rpartition("-")[2])
            if owner == os.getpid() or not is_alive(owner):
                disk.remove_folder(leftover)
    draft, renaming = temporary(path), False
    try:
        disk.mkdir(draft)
        write_file(draft / CONFIG, [config])
        write_file(draft / "run.json", [facts])
        write_file(draft / "metrics.jsonl", [])
        write_file(draft / "timing.jsonl", [])
        write_file(draft / "clients.jsonl", [])
        disk.mkdir(draft / "checkpoints")
        sync_folder(draft)
        renaming = True
        disk.rename(draft, path)
        sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            if renaming and not draft.exists():  # the rename succeeded, a later step failed
                disk.rename(path, draft)
            disk.remove_folder(draft)
        raise


def _refuse_occupied(path: Path) -> None:
    if (path / "run.json").exists():
        resume = f"continue it with `consilience resume {path}`"
        raise Invalid(f"{path} holds a run already: {resume}, or choose another run name")
    if os.path.lexists(path) and not (path.is_dir() and not os.listdir(path)):
        held = ", ".join(sorted(os.listdir(path))[:5]) if path.is_dir() else "it is a file"
        raise Invalid(f"{path} is in use ({plain(held)}) but holds no run: choose another run name, or empty it")
