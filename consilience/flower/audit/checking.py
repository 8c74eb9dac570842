"""Checks that an audit log is complete, signed and self-consistent, without contacting the server."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consilience.core.refusal import plain
from consilience.core.settings import Invalid
from consilience.flower.audit.log import FILE
from consilience.flower.audit.signing import Head, is_signed, why_not_issued
from consilience.runs.disk import read_file
from consilience.runs.folder import RunFolder
from consilience.runs.row_log import RecordError, RowLog

EVENTS = ("started", "joined", "turned_away", "left", "sent", "received", "round", "ended", "signed")
TRAIN, TEST = "train", "test"  # rules whose broadcast contains the model


@dataclass(eq=False, kw_only=True)
class AuditReport:
    """The findings: `problems` invalidate a log, `notes` are for information."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    chains: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    signatures: int = 0
    receipts: int = 0

    @property
    def id(self) -> str:
        """Of the run's log."""
        return str(self.rows[0].get("id", "")) if self.rows else ""

    def certificate_at(self, row: int) -> str:
        """The certificate that the server had declared by a row."""
        found = [one["certificate"] for one in self.rows[: row + 1] if one["event"] == "started"]
        return str(found[-1]) if found else ""


def check(path: Path, *, authority: Path | None = None, unfinished: bool = False) -> AuditReport:
    """Read and check the log in a run folder, or in a file."""
    file = path / FILE if path.is_dir() else path
    report = AuditReport(path=file)
    try:
        history = RowLog(file, chained=True).read()
    except RecordError as problem:
        report.problems.append(str(problem))
        return report
    report.rows, report.chains = history.rows, history.chains
    if history.note:
        report.problems.append(history.note)
    try:
        _check_signatures(report, authority)
        _RowChecks(report).check()
        _check_end(report, path if path.is_dir() else None, unfinished)
    except Invalid:  # an argument, not the log
        raise
    except (RecordError, FileNotFoundError) as problem:  # the run's own files
        report.problems.append(str(problem))
    except (KeyError, TypeError, AttributeError, ValueError) as problem:  # changed contents with a recomputed chain
        why = f"{type(problem).__name__} {plain(problem, most=80)}"
        report.problems.append(f"{file} has rows that no server writes: {why}")
    return report


def _check_signatures(report: AuditReport, authority: Path | None) -> None:
    if not report.rows or report.rows[0]["event"] != "started":
        report.problems.append(f"{report.path} does not begin with the start of a run")
        return
    certificate = ""
    for number, row in enumerate(report.rows):
        if row["n"] != number:
            report.problems.append(f"row {number} says it is row {row['n']}")
        if row["event"] == "started":
            if row["id"] != report.id:
                report.problems.append(f"row {number} belongs to another log ({row['id']})")
            if certificate and not row["certificate"]:
                report.problems.append(f"row {number}: from here on nothing is signed, though the rows before are")
            elif certificate and certificate != row["certificate"]:
                report.notes.append(f"row {number}: the server came back with another certificate")
            certificate = row["certificate"]
            why = why_not_issued(certificate, authority) if authority is not None else ""
            if why:
                report.problems.append(f"row {number}: the server's certificate is refused: {why}")
        elif row["event"] == "signed":
            head = Head(id=report.id, rows=row["rows"], chain=row["of"], signature=row["signature"])
            if row["rows"] != number or row["of"] != report.chains[number - 1]:
                report.problems.append(f"row {number} signs something else than the rows before it")
            elif certificate and not is_signed(head, certificate):
                report.problems.append(f"row {number}: the signature is not that of the server's certificate")
            report.signatures += bool(certificate)
    if not certificate:
        report.notes.append("it is not signed (no TLS): only receipts can show that it was written anew")
    elif report.rows[-1]["event"] != "signed":
        last = max(number for number, row in enumerate(report.rows) if row["event"] == "signed")
        report.notes.append(f"the rows after row {last} are not signed: anyone could have added them")
    if certificate and authority is None:
        report.notes.append("who issued the server's certificate was not checked: give --root-certificates ca.crt")


class _RowChecks:
    """Checks the rows in order: what is valid in a row depends on those before it."""

    def __init__(self, report: AuditReport) -> None:
        self._report = report
        self._rounds: dict[int, str] = {}  # round -> digest of the model it ended with
        self._latest = ""  # digest of the model
        self._follows: bool | None = None  # whether this algorithm broadcasts its model; None: not known yet
        self._members: dict[str, set[int]] = {}  # node -> its clients
        self._asked: dict[str, set[int]] = {}  # rule -> clients that were sent something last
        self._replied: set[int] = set()  # clients whose replies to training have arrived since the last round
        self._tested = ""  # digest of the model that clients were sent to test since the last round

    def check(self) -> None:
        for number, row in enumerate(self._report.rows):
            if row["event"] not in EVENTS:
                self._problem(number, f"{plain(row['event'], most=40)!r} is nothing that happens in a run")
            elif row["event"] in ("started", "joined", "sent", "received", "round"):
                getattr(self, f"_{row['event']}")(number, row)

    def _problem(self, number: int, why: str) -> None:
        self._report.problems.append(f"row {number}: {why}")

    def _started(self, number: int, row: dict[str, Any]) -> None:
        done = row["round"]
        if done and self._rounds.get(done) != row["model"]:
            known = "rounds before it are not in this log" if done not in self._rounds else "that round ended otherwise"
            self._problem(number, f"the server continues after round {done} with model {row['model'][:16]}: {known}")
        if number:
            self._report.notes.append(f"row {number}: the server started again, after round {done}")
        self._rounds[done], self._latest = row["model"], row["model"]
        self._members, self._asked, self._replied, self._tested = {}, {}, set(), ""
        self._follows = False if row["asynchronous"] else self._follows

    def _joined(self, number: int, row: dict[str, Any]) -> None:
        self._members[row["node"]] = set(map(int, row["clients"]))

    def _sent(self, number: int, row: dict[str, Any]) -> None:
        for to in row["to"]:
            if not set(to["clients"]) <= self._members.get(to["node"], set()):
                self._problem(
                    number, f"clients {to['clients']} are asked at node {to['node']}, which has not joined as them"
                )
        self._asked[row["rule"]] = {client for to in row["to"] for client in to["clients"]}
        if row["rule"] == TEST:
            self._tested = row.get("model", "")
        if row["rule"] != TRAIN or "model" not in row:
            return
        if self._follows is None:
            self._follows = row["model"] == self._latest
            if not self._follows:
                self._report.notes.append(
                    "this algorithm sends something else than its model: the two are not compared"
                )
        if self._follows and row["model"] != self._latest:
            before = f"{row['model'][:16]}, but the round before ended with {self._latest[:16]}"
            self._problem(number, f"round {row['round']} was trained from model {before}")

    def _received(self, number: int, row: dict[str, Any]) -> None:
        replies = set(map(int, row["replies"]))
        if not replies <= self._asked.get(row["rule"], set()):
            self._problem(number, f"replies of clients that were not asked: {sorted(replies)}")
        if row["rule"] == TRAIN:
            self._replied |= replies

    def _round(self, number: int, row: dict[str, Any]) -> None:
        without = sorted(set(row["used"]) - self._replied)
        if without:
            self._problem(number, f"round {row['round']} counts clients {without}, from whom nothing was received")
        if self._tested and self._tested != row["model"]:
            self._problem(
                number, f"clients tested model {self._tested[:16]}, but round {row['round']} ended with another"
            )
        self._rounds[row["round"]], self._latest = row["model"], row["model"]
        self._replied, self._tested = set(), ""


def _check_end(report: AuditReport, folder: Path | None, unfinished: bool) -> None:
    """Check the end of the log: rows missing at the end do not break the chain."""
    closed = [row["event"] for row in report.rows[-2:]] == ["ended", "signed"]
    if not closed:
        told = report.notes if unfinished else report.problems
        told.append(
            f"{report.path} does not end with the end of the run: it is still running, was killed, or rows were cut "
            "off (--unfinished accepts that)"
        )
        return
    if folder is not None:
        _check_folder(report, folder, report.rows[-2])


def _check_folder(report: AuditReport, folder: Path, ended: dict[str, Any]) -> None:
    """Check that the log is that of the run in this folder, to its last round."""
    for name, sha256 in ended["files"].items():
        try:
            found = hashlib.sha256(read_file(folder / name)).hexdigest()
        except OSError:
            found = ""
        if found != sha256:
            report.problems.append(f"{folder / name} is not the file that the run ended with")
    run = RunFolder.open(folder)
    status, rounds = run.facts().get("status"), len(run.rows().rows)
    last = next((row["round"] for row in reversed(report.rows) if row["event"] in ("round", "started")), 0)
    if (ended["status"], last) != (status, rounds):
        report.problems.append(
            f"it ends with {plain(ended['status'], most=40)!r} after round {last}, and the run in {folder} with "
            f"{plain(status, most=40)!r} after round {rounds}: it is another run's log, or rows were cut off"
        )
