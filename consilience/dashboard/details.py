"""One run in full: clock and environment, machine, nodes of a deployment, refused replies, logs and settings."""

from __future__ import annotations

import os
from typing import Any

from consilience.core.settings import Invalid
from consilience.dashboard.curves import is_number
from consilience.dashboard.nodes import node_table
from consilience.dashboard.watched_run import WatchedRun
from consilience.reporting.groups import flat
from consilience.reporting.privacy import not_private
from consilience.reporting.terminal import size
from consilience.runs.disk import open_file
from consilience.runs.folder import DEPLOY_LOG, RESUME_LOG
from consilience.runs.names import plain
from consilience.runs.text import best_model, took
from consilience.runs.toml_text import dumps

LOGS = (DEPLOY_LOG, RESUME_LOG)
_TAIL_BYTES = 1 << 16
_MOST_LINES = 400


def details(run: WatchedRun, *, controlled: bool) -> dict[str, Any]:
    """Everything but curves and clients."""
    return {
        "version": run.version,
        "summary": run.summary(controlled=controlled),
        "facts": _facts(run),
        "environment": [[key, plain(value, most=80)] for key, value in flat(_section(run, "environment")).items()],
        "machine": _machine(run),
        "warnings": _warnings(run),
        "events": [{"round": round, "text": text} for round, text in reversed(run.events)],
        "nodes": node_table(run.path),
        "logs": [name for name in LOGS if (run.path / name).is_file()],
        "settings": dumps(run.config) if run.config else "",
    }


def log_tail(run: WatchedRun, name: str) -> list[str]:
    """The last lines of one of the run's logs."""
    if name not in LOGS:
        raise Invalid(f"{plain(name, most=40)!r} is no log of a run: {', '.join(LOGS)}")
    try:
        with os.fdopen(open_file(run.path / name, os.O_RDONLY), "rb") as stream:
            length = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, length - _TAIL_BYTES))
            text = stream.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = text.splitlines()[1 if length > _TAIL_BYTES else 0 :]
    return [plain(line, most=400) for line in lines[-_MOST_LINES:]]


def _facts(run: WatchedRun) -> list[list[str]]:
    """Cards: what happened so far, in numbers."""
    last, summary = run.last, run.summary(controlled=False)
    share = f"{100 * run.rounds / run.total:.0f} %" if run.total else ""
    found = [["round", f"{run.rounds:,} of {run.total:,}" if run.total else f"{run.rounds:,}", share]]
    if summary["metric"] and is_number(summary["value"]):
        best = f"best {summary['best']:.4f}" if is_number(summary["best"]) else ""
        found.insert(0, [summary["metric"]["title"], f"{summary['value']:.4f}", best])
    if run.seconds:
        found.append(["time", took(run.seconds), f"{run.seconds / max(1, run.rounds):.3g} s a round"])
    if is_number(last.get("simulated_seconds")) and last["simulated_seconds"]:
        found.append(["simulated clock", took(last["simulated_seconds"]), "what the environment says it would take"])
    up: Any = last.get("bytes_up_total")
    down: Any = last.get("bytes_down_total")
    if is_number(up) and is_number(down):
        found.append(["sent", f"{size(up)} up", f"{size(down)} down"])
    found.append(["refused replies", f"{run.refused:,}", "" if run.refused else "none so far"])
    if is_number(last.get("epsilon")):
        found.append(["epsilon", f"{last['epsilon']:.3f}", not_private(run.facts) or "spent so far"])
    return found


def _machine(run: WatchedRun) -> list[list[str]]:
    facts, engine = run.facts, _section(run, "engine")
    parameters: Any = facts.get("parameters")
    said: Any = facts.get("versions")
    versions = said if isinstance(said, dict) else {}
    found = {
        "created": facts.get("created"),
        "parameters": f"{parameters:,}" if type(parameters) is int else None,
        "device": engine.get("device"),
        "lane": engine.get("lane"),
        "dtype": engine.get("dtype"),
        "threads": run.config.get("threads"),
        "platform": facts.get("platform"),
        **{key: versions.get(key) for key in ("consilience", "torch", "python")},
    }
    return [[key, plain(value, most=120)] for key, value in found.items() if value not in (None, "")]


def _warnings(run: WatchedRun) -> list[str]:
    facts = run.facts
    notes: Any = facts.get("notes")
    found = [run.problem, *(notes[:20] if isinstance(notes, list) else []), best_model(facts), not_private(facts)]
    if facts.get("reason") and run.status not in ("finished", "running", "created"):
        found.append(f"{run.status}: {facts['reason']}")
    if facts.get("forced"):
        found.append("resumed by force after something had changed; run.json says what")
    return [plain(text, most=400) for text in found if text]


def _section(run: WatchedRun, name: str) -> dict[str, Any]:
    found = run.config.get(name)
    return found if isinstance(found, dict) else {}
