"""Runs and results as tables in the terminal."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from consilience.core.metrics import MetricRow
from consilience.reporting.privacy import not_private
from consilience.reporting.wide_table import WideTable
from consilience.runs import verification
from consilience.runs.folder import RunFolder, RunSummary
from consilience.runs.lock import is_alive, owner
from consilience.runs.metric_table import Column, by_importance, columns, main_of, read
from consilience.runs.names import plain
from consilience.runs.text import best_model, rate, took
from consilience.runs.toml_text import dumps, loads
from consilience.task.scores import ClientScores, Scores

_BARS = "▁▂▃▄▅▆▇█"
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


def metrics(rows: Sequence[dict[str, Any]], table: Sequence[MetricRow], most: int = 10) -> RenderableType:
    """The last rows, in the columns that the task has."""
    known = [c for c in columns(table) if not c.detail and any(row.get(c.key) is not None for row in rows)]
    lines = [[_number(row.get(key)) for key in ("round", *(c.key for c in known))] for row in rows[-most:]]
    return WideTable(heads=("round", *(_title(c, rows) for c in known)), lines=lines)


def results(rows: Sequence[dict[str, Any]], timing: Sequence[dict[str, Any]], metrics: Sequence[MetricRow]) -> Table:
    """How a run went: last and best values, traffic and time."""
    table = Table("", "last", "best", "at round", header_style="bold", box=None, pad_edge=False)
    for column in columns(metrics):
        known = [(row[column.key], row["round"]) for row in rows if row.get(column.key) is not None]
        if column.detail or not known or column.key in ("train_loss", "drift_relative"):
            continue
        if not column.better:  # a spread is smallest when all clients fail equally
            table.add_row(_title(column, rows), _number(known[-1][0]), "", "")
            continue
        best, at = min(known) if column.better == "lower" else max(known, key=lambda pair: (pair[0], -pair[1]))
        table.add_row(escape(column.title), _number(known[-1][0]), _number(best), str(at))
    if rows:
        up, down = (size(rows[-1][f"bytes_{way}_total"]) for way in ("up", "down"))
        table.add_row("sent", f"{up} up", f"{down} down", "")
    if timing:
        seconds = sum(row["seconds"] + row["evaluation_seconds"] for row in timing)
        table.add_row("time", took(seconds), rate(float(np.median([r["clients_per_second"] or 0 for r in timing]))), "")
    return table


def overview(facts: dict[str, Any], config: dict[str, Any]) -> str:
    """One run in a line or two: algorithm, data, clients, model and engine."""
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
        return "stopped"  # the lock was released
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
    lines += [escape(note) for note in (not_private(facts), best_model(facts)) if note]
    lines += [f"[bold]warning:[/] {escape(problem)}" for problem in verification.problems(folder)]
    lines += ["", escape(dumps(table))] if config else []
    known = read(facts, history.rows)
    curves = [row for row in by_importance(known) if row.main or row.key == "loss"]
    width = max(len(row.title) for row in curves) + 1
    for row in curves:
        curve = sparkline([each.get(row.key) for each in history.rows])
        lines += [f"{escape(row.title):{width}}{curve}"] if curve else []
    if history.rows:
        timing = folder.timing.read().rows
        lines += ["", metrics(history.rows, known, rows), "", results(history.rows, timing, known)]
    return Group(*lines)


def run_list(found: Iterable[RunSummary]) -> Table:
    """One line per run: its main metric (by name, where runs have different ones) and its loss."""
    runs = list(found)
    tables = [read(run.facts, [run.last_row]) for run in runs]
    mains = [main_of(table) for table in tables]
    names = list(dict.fromkeys(main.title for main in mains if main.key != "loss")) or ["metric"]
    heads = ("run", "status", "rounds", escape(names[0]) if len(names) == 1 else "metric", "loss", "note")
    table = Table(*heads, header_style="bold", box=None, pad_edge=False)
    for run, main in zip(runs, mains):
        value = _number(run.last_row.get(main.key)) if main.key != "loss" else "-"
        value += f" {escape(main.title)}" if len(names) > 1 and value != "-" else ""
        note = "; ".join(filter(None, (run.note, not_private(run.facts))))
        cells = (value, _number(run.last_row.get("loss")), escape(note))
        table.add_row(escape(plain(run.path, most=80)), escape(status(run.path, run.facts)), str(run.rounds), *cells)
    return table


def scores(found: Scores, names: Sequence[str], *, everyone: bool = False) -> RenderableType:
    """A model on test rows: overall, and client by client, the worst first."""
    overall = Table("all test rows", str(found.rows), header_style="bold", box=None, pad_edge=False)
    for row in found.metrics:
        if found.values.get(row.key) is not None:
            overall.add_row(escape(row.title), _number(found.values[row.key]))
    clients = found.clients
    for key, value in clients.spread().items():
        if value is not None:
            overall.add_row(f"clients: {key.replace('_', ' ')}", _number(value))
    owners = np.flatnonzero(found.client_rows > 0)
    if not len(owners):
        return overall
    by_main = np.isfinite(clients.values[owners]).all()
    judged, worst_is_low = (clients.values, clients.main.better == "higher") if by_main else (clients.loss, False)
    order = owners[np.argsort(judged[owners] if worst_is_low else -judged[owners], kind="stable")]
    titles = ("client", "test rows", *([escape(clients.main.title)] if clients.main.key != "loss" else []), "loss")
    table = Table(*titles, header_style="bold", box=None, pad_edge=False)
    for k in order if everyone else order[:_MOST_CLIENTS]:
        shown = [clients.values, clients.loss] if clients.main.key != "loss" else [clients.loss]
        cells = [_number(float(values[k])) for values in shown]
        table.add_row(escape(plain(names[k], most=40)), str(found.client_rows[k]), *cells)
    left = len(order) - table.row_count
    return Group(overall, "", table, *([f"... and {left} more clients, all better: --all shows them"] if left else []))


def personal(found: ClientScores) -> RenderableType:
    """Every client's own model on its own test rows, in short."""
    known = int(np.isfinite(found.loss).sum())
    words = str(known) if found.sampled_from is None else f"sample of {known:,} of {found.sampled_from:,}"
    table = Table("personal models", words, header_style="bold", box=None, pad_edge=False)
    table.add_row("loss", _number(found.mean_loss()))
    for key, value in found.spread().items():
        if value is not None:
            table.add_row(f"{escape(found.main.title)}: {key.replace('_', ' ')}", _number(value))
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


def _title(column: Column, rows: Sequence[dict[str, Any]]) -> str:
    """A column's name, which marks an epsilon that protects nobody."""
    seeded = column.key == "epsilon" and any(row.get("private") is False for row in rows)
    return escape(column.title) + (" (not private)" if seeded else "")


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and not np.isfinite(value)):
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else escape(str(value))
