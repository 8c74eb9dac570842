"""The command `consilience audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilience.runs.failures import UNEXPECTED, guarded

if TYPE_CHECKING:
    from consilience.flower.audit.checking import AuditReport

COLUMNS = ("n", "time", "event", "round", "rule", "node", "key", "clients", "model", "chain", "rest")


def audit(
    log: Annotated[Path, typer.Argument(metavar="FOLDER_OR_FILE", exists=True, help="A run folder, or audit.jsonl.")],
    receipts: Annotated[
        list[Path] | None, typer.Option(exists=True, help="A node's receipts: a folder or file; may be repeated.")
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="ca.crt: who must have signed.")
    ] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="The run has not ended, or was killed.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all rows there, too: .json or .csv.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Check the audit log of a deployed run: chain, signatures, and the receipts of its nodes.

    Exit code 1 if anything does not fit.
    """

    def work() -> int:
        from consilience.core.settings import Invalid
        from consilience.flower.audit import checking, comparing

        if export is not None and export.suffix not in (".json", ".csv"):
            raise Invalid(f"--export {export}: the name must end in .json or .csv")
        report = checking.check(log, authority=root_certificates, unfinished=unfinished)
        comparing.compare(report, receipts or ())
        for line in summary(report):
            print(line)
        if export is not None:
            write(report, export)
            print(export)
        return UNEXPECTED if report.problems else 0

    guarded(work, debug)


def summary(report: AuditReport) -> list[str]:
    """The findings as text."""
    events = [row.get("event") for row in report.rows]
    rounds = len({row["round"] for row in report.rows if row.get("event") == "round"})
    lines = [f"{report.path}: {len(events)} rows, {rounds} rounds, {events.count('started')} starts of the server"]
    if report.rows:
        lines.append(f"log {report.id}, last chain {report.chains[-1]}")
    lines.append(f"{report.signatures} signatures, {report.receipts} receipts were compared")
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"PROBLEM: {problem}" for problem in report.problems]
    return [*lines, f"{len(report.problems)} problems" if report.problems else "everything fits"]


def write(report: AuditReport, file: Path) -> None:
    """The rows in one file, with the chain after each."""
    import csv
    import json

    rows = [{**row, "chain": chain} for row, chain in zip(report.rows, report.chains)]
    if file.suffix == ".json":
        found = {"log": str(report.path), "problems": report.problems, "notes": report.notes, "rows": rows}
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    with file.open("w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, COLUMNS)
        table.writeheader()
        for row in rows:
            rest = {key: value for key, value in row.items() if key not in COLUMNS}
            shown = {
                key: value if isinstance(value, (str, int)) else json.dumps(value)
                for key, value in row.items()
                if key in COLUMNS
            }
            table.writerow({**shown, "rest": json.dumps(rest)})
