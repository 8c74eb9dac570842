"""Runs and results as tables for people."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from consilience.experiments.evaluation import Scores, fairness
from consilience.experiments.personal import PersonalScores
from consilience.reporting.privacy import not_private
from consilience.runs.folder import RunFolder, RunSummary
from consilience.runs.lock import is_alive, owner
from consilience.runs.names import plain
from consilience.runs.text import duration, rate
from consilience.runs.toml_text import dumps, loads

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = {
    "round": "round",
    "loss": "loss",
    "accuracy": "accuracy",
    "absolute_error": "mean error",
    "f1": "macro F1",
    "client_accuracy_mean": "clients: mean",
    "client_accuracy_worst_tenth": "worst tenth",
    "client_accuracy_spread": "spread",
    "local_accuracy_mean": "local: mean",
    "personal_accuracy_mean": "personal: mean",
    "train_loss": "train loss",
    "drift_relative": "drift",
    "epsilon": "epsilon",
}
_NOT_BETTER = ("client_accuracy_spread", "epsilon")  # least when all fail alike, or at the start
_MOST_CLIENTS = 40


def sparkline(values: Sequence[float | None], width: int = 60) -> str:
    """A curve in one line of text; missing values are blanks."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    if len(numbers) > width:
        numbers = np.array([part[-1] for part in np.array_split(numbers, width)])
    if not np.isfinite(numbers).any():
        return ""
    low, high = np.nanmin(numbers), np.nanmax(numbers)
    level = (numbers - low) / (high - low) * (len(_BARS) - 1) if high > low else np.zeros(len(numbers))
    return "".join(_BARS[round(float(at))] if np.isfinite(at) else " " for at in level)


def metrics(rows: Sequence[dict[str, Any]], most: int = 10) -> Table:
    """The last rows, in the columns that the task has."""
    columns = [key for key in _COLUMNS if any(row.get(key) is not None for row in rows)]
    table = Table(*(_title(key, rows) for key in columns), header_style="bold", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for row in rows[-most:]:
        table.add_row(*(_number(row.get(key)) for key in columns))
    return table


def results(rows: Sequence[dict[str, Any]], timing: Sequence[dict[str, Any]]) -> Table:
    """How a run went: last and best values, traffic and time."""
    table = Table("", "last", "best", "at round", header_style="bold", box=None, pad_edge=False)
    for key, name in _COLUMNS.items():
        known = [(row[key], row["round"]) for row in rows if row.get(key) is not None]
        if key in ("round", "train_loss", "drift_relative") or not known:
            continue
        if key in _NOT_BETTER:
            table.add_row(_title(key, rows), _number(known[-1][0]), "", "")
            continue
        lower = key in ("loss", "absolute_error")
        best, at = min(known) if lower else max(known, key=lambda pair: (pair[0], -pair[1]))
        table.add_row(name, _number(known[-1][0]), _number(best), str(at))
    if rows:
        up, down = (size(rows[-1][f"bytes_{way}_total"]) for way in ("up", "down"))
        table.add_row("sent", f"{up} up", f"{down} down", "")
    if timing:
        seconds = sum(row["seconds"] + row["evaluation_seconds"] for row in timing)
        table.add_row(
            "time", duration(seconds), rate(float(np.median([r["clients_per_second"] or 0 for r in timing]))), ""
        )
    return table


def overview(facts: dict[str, Any], config: dict[str, Any]) -> str:
    """One run in a line or two: what, over whom, with what."""
    names = {
        section: escape(str(config.get(section, {}).get("name", "?"))) for section in ("algorithm", "data", "model")
    }
    engine = config.get("engine", {})
    where = f"{engine.get('device', '?')}, lane {engine.get('lane', '?')}, {engine.get('dtype', '?')}"
    parameters = facts.get("parameters")
    return (
        f"{names['algorithm']} on {names['data']}, {facts.get('clients', '?')} clients "
        f"({escape(str(config.get('partition', {}).get('name', '?')))}), {names['model']}"
        + (f" with {parameters:,} parameters" if isinstance(parameters, int) else "")
        + f"; {escape(where)}"
    )


def status(folder: Path, facts: dict[str, Any]) -> str:
    """'finished', 'running as process 12', or for a run that was killed: 'stopped'."""
    said = str(facts.get("status", "?"))
    if said not in ("created", "running"):
        return said
    known = owner(folder / "lock")
    if not known:
        return "stopped"  # whoever held the lock has given it back
    pid, host = known["pid"], known["host"]
    here = host == socket.gethostname()
    if here and not is_alive(pid):
        return "stopped"
    return f"running as process {pid}" + ("" if here else f" on {plain(host)}")


def whole_run(folder: RunFolder, rows: int, config: bool) -> RenderableType:
    """Settings in short (or in full), the curve, the last rounds, and the results."""
    facts, history = folder.facts(), folder.rows()
    table = loads(folder.config_text())
    done = f"{len(history.rows)} of {table.get('rounds', '?')} rounds, {status(folder.path, facts)}"
    lines: list[RenderableType] = [overview(facts, table), escape(f"{folder.path}: {done}")]
    lines += [
        f"forced at round {item['round']}: {escape('; '.join(item['changes']))}" for item in facts.get("forced", [])
    ]
    lines += [escape(note) for note in (not_private(facts), history.note) if note]
    lines += ["", escape(dumps(table))] if config else []
    for key in ("accuracy", "loss"):
        curve = sparkline([row.get(key) for row in history.rows])
        lines += [f"{key:9}{curve}"] if curve else []
    if history.rows:
        lines += ["", metrics(history.rows, rows), "", results(history.rows, folder.timing.read().rows)]
    return Group(*lines)


def run_list(found: Iterable[RunSummary]) -> Table:
    """One line per run."""
    table = Table("run", "status", "rounds", "accuracy", "loss", "note", header_style="bold", box=None, pad_edge=False)
    for run in found:
        last = run.last_row
        note = "; ".join(filter(None, (run.note, not_private(run.facts))))
        cells = (_number(last.get("accuracy")), _number(last.get("loss")), escape(note))
        table.add_row(escape(plain(run.path, most=80)), escape(status(run.path, run.facts)), str(run.rounds), *cells)
    return table


def scores(found: Scores, names: Sequence[str], *, everyone: bool = False) -> RenderableType:
    """A model on test rows: overall, and client by client, the worst first."""
    overall = Table("all test rows", str(found.rows), header_style="bold", box=None, pad_edge=False)
    for key in ("loss", "accuracy", "precision", "recall", "f1", "absolute_error"):
        if getattr(found, key) is not None:
            overall.add_row(key.replace("_", " "), _number(getattr(found, key)))
    for key, value in fairness(found.client_accuracy).items():
        if value is not None:
            overall.add_row(f"clients: {key.replace('_', ' ')}", _number(value))
    owners = np.flatnonzero(found.client_rows > 0)
    if not len(owners):
        return overall
    by_accuracy = np.isfinite(found.client_accuracy[owners]).all()
    order = owners[
        np.argsort(found.client_accuracy[owners] if by_accuracy else -found.client_loss[owners], kind="stable")
    ]
    table = Table("client", "test rows", "accuracy", "loss", header_style="bold", box=None, pad_edge=False)
    for k in order if everyone else order[:_MOST_CLIENTS]:
        cells = (_number(float(found.client_accuracy[k])), _number(float(found.client_loss[k])))
        table.add_row(escape(plain(names[k], most=40)), str(found.client_rows[k]), *cells)
    left = len(order) - table.row_count
    return Group(overall, "", table, *([f"... and {left} more clients, all better: --all shows them"] if left else []))


def personal(found: PersonalScores) -> RenderableType:
    """Every client's own model on its own test rows, in short."""
    table = Table(
        "personal models", str(int(np.isfinite(found.loss).sum())), header_style="bold", box=None, pad_edge=False
    )
    table.add_row("loss", _number(float(np.nanmean(found.loss)) if np.isfinite(found.loss).any() else None))
    for key, value in fairness(found.accuracy).items():
        if value is not None:
            table.add_row(f"accuracy: {key.replace('_', ' ')}", _number(value))
    return table


def size(count: float) -> str:
    """12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def next_steps(folder: Path, stopped: bool) -> str:
    """Where the run is, and what can be done with it."""
    place = escape(str(folder))
    more = f"consilience resume {place}" + ("" if stopped else " rounds=...")
    return f"[bold]{place}[/bold]\n  {more}\n  consilience show {place}\n  consilience eval {place}"


def _title(key: str, rows: Sequence[dict[str, Any]]) -> str:
    """A column's name; an epsilon that protects nobody is called so."""
    seeded = key == "epsilon" and any(row.get("private") is False for row in rows)
    return _COLUMNS[key] + (" (not private)" if seeded else "")


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and not np.isfinite(value)):
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else escape(str(value))
