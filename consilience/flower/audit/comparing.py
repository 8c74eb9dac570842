"""Compares the nodes' receipts with the server's log and with each other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from consilience.core.refusal import plain
from consilience.core.settings import Invalid
from consilience.flower.audit.checking import AuditReport
from consilience.flower.audit.signing import Head, is_signed
from consilience.runs.row_log import RecordError, RowLog


def compare(report: AuditReport, places: Iterable[Path]) -> None:
    """Add the comparison with receipts to a report; each place is a file, or a folder of such files."""
    told: dict[int, tuple[str, Path]] = {}  # number of rows in the log -> the chain sent to a member, and its receipts
    for file in _files(places):
        try:
            history = RowLog(file, chained=True).read()
        except RecordError as problem:
            report.problems.append(str(problem))
            continue
        report.notes += [history.note] if history.note else []
        for number, row in enumerate(history.rows):
            try:
                _check(report, file, row, told)
            except (KeyError, TypeError, AttributeError, ValueError) as problem:
                why = f"{type(problem).__name__} {plain(problem, most=80)}"
                report.problems.append(f"{file}, row {number} is no receipt: {why}")
            report.receipts += 1


def _files(places: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        mine = sorted(place.rglob("*.jsonl")) if place.is_dir() else [place]
        if not mine or not mine[0].is_file():
            raise Invalid(f"{place} holds no receipts: give a node's folder of receipts, or one of its .jsonl files")
        found += mine
    return found


def _check(report: AuditReport, file: Path, row: dict[str, Any], told: dict[int, tuple[str, Path]]) -> None:
    what = f"{file}: round {row['round']}, {row['rule']}"
    if row["head"] is None:
        report.notes.append(f"{what}: the server told no head of a log")
        return
    head = Head(**row["head"])
    if report.id and head.id != report.id:
        report.problems.append(f"{what}: it belongs to another log ({plain(head.id, most=40)}, not {report.id})")
        return
    before = told.setdefault(head.rows, (head.chain, file))
    if before[0] != head.chain:
        report.problems.append(f"{what}: {file} and {before[1]} were told different histories at row {head.rows}")
    if not report.rows:
        return
    if head.rows > len(report.chains):
        report.problems.append(
            f"{what}: the server told of {head.rows} rows, and the log has {len(report.chains)}: cut off"
        )
        return
    if report.chains[head.rows - 1] != head.chain:
        certificate = report.certificate_at(head.rows)
        proof = ", under a signature of its certificate" if certificate and is_signed(head, certificate) else ""
        report.problems.append(
            f"{what}: the server told another history{proof}: the log was written anew before row {head.rows}"
        )
        return
    _compare_exchange(report, what, row, head.rows - 1)


def _compare_exchange(report: AuditReport, what: str, row: dict[str, Any], place: int) -> None:
    """Compare what both say was sent and received; the head sent to a node ends with the row of its message."""
    sent = report.rows[place]
    mine = [to for to in sent.get("to", ()) if to["node"] == row["node"]]
    if sent["event"] != "sent" or (sent["round"], sent["rule"]) != (row["round"], row["rule"]) or not mine:
        report.problems.append(f"{what}: the log does not say that this was sent to node {row['node']}")
        return
    said = {key: sent[key] for key in ("shared", "model") if key in sent} | {
        key: mine[0][key] for key in ("personal",) if key in mine[0]
    }
    if said != row["received"]:
        report.problems.append(f"{what}: the node received something else than the log says was sent")
    later = next((one for one in report.rows[place + 1 :] if one["event"] in ("received", "started", "ended")), None)
    if later is None or later["event"] != "received":
        report.notes.append(f"{what}: the server stopped before it wrote down what came back")
        return
    refused = {one["client"]: one["reason"] for one in later["refused"]}
    for client, digest in row["replies"].items():
        known = later["replies"].get(client)
        if known == digest:
            continue
        if known is not None:
            report.problems.append(
                f"{what}: the reply of client {client} was replaced: {known[:16]}, not {digest[:16]}"
            )
        elif client in refused:
            report.notes.append(f"{what}: the reply of client {client} was refused: {refused[client]}")
        elif int(client) in later["silent"]:
            report.notes.append(f"{what}: client {client} has answered; the log says that nothing came in time")
        else:
            report.problems.append(f"{what}: the reply of client {client} was dropped: the log says nothing of it")
