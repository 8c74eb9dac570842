"""What must be equal for a resumed run to give the same results, and the differences."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import consilience
from consilience.runs import canonical
from consilience.runs.names import plain
from consilience.runs.redact import redacted

HARMLESS = (
    *("name", "rounds", "runs", "data_dir", "log", "checkpoint.every", "checkpoint.keep", "engine.address"),
    *("engine.memory", "engine.memory_folder", "engine.rows"),
    *("engine.min_workers", "engine.num_cpus", "engine.resources", "engine.placement"),
    *("validation.patience", "validation.export", "evaluation.maps"),
)
"""Settings that do not affect results."""

MEASURED = ("lane", "clients_at_once", "compile")
"""Engine settings that the first round may find out: the fields of the engine's `Choice`."""

HARMLESS_CODE = {
    "reads what runs have written": (
        *("dashboard", "diagnose", "reporting"),
        *(f"experiments/{name}.py" for name in ("loading", "predicting", "retest")),
        *(f"compare/{name}.py" for name in ("display", "drawings", "fairness", "pages", "paired", "results", "tables")),
    ),
    "starts runs, or says with which settings; those are compared themselves": (
        *("__main__.py", "cli.py", "commands", "estimators.py", "training.py"),
        *("experiments/learn.py", "experiments/learn_command.py", "experiments/learn_file.py"),
        *("tuning", "options/ranges.py"),
        *(f"compare/{name}.py" for name in ("command", "compare", "running")),
    ),
    "starts Flower's processes, and makes their keys and files": (
        *(f"flower/deploy/{name}.py" for name in ("clock", "commands", "executor", "keys", "local_deployment")),
        *(f"flower/deploy/{name}.py" for name in ("gateway", "pins", "probe", "processes", "programs", "service")),
        *(f"flower/deploy/{name}.py" for name in ("template", "up", "verify")),
    ),
    "checks the audit log of a deployed run": tuple(
        f"flower/audit/{name}.py" for name in ("checking", "command", "comparing")
    ),
    "serves Flower's own strategies, which leave no run folder": ("flower/app.py", "flower/strategies"),
    "stores rows, trees and settings, and finds out by digests if they are not what was stored": ("runs",),
    "copies rows to other programs": ("experiments/tracker_kinds.py", "experiments/trackers.py"),
}
"""Our code that does not affect results, by the reason; all other code, also new files, is in the fingerprint."""

_ABSENT = object()


def code() -> dict[str, str]:
    """Versions of the libraries that compute, and the SHA-256 of our own code."""
    return {
        "source": source_digest(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "consilience": own_version(),
    }


def own_version() -> str:
    """The installed version of this package."""
    try:
        return importlib.metadata.version("consilience")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def source_digest() -> str:
    """SHA-256 of the source files that affect results."""
    top, digest = Path(consilience.__path__[0]), hashlib.sha256()
    for name in computing_files():
        digest.update(name.encode() + b"\0" + (top / name).read_bytes() + b"\0")
    return digest.hexdigest()


def computing_files() -> list[str]:
    """The source files that affect results, as paths below the package."""
    top = Path(consilience.__path__[0])
    harmless = {path for paths in HARMLESS_CODE.values() for path in paths}
    names = sorted(file.relative_to(top).as_posix() for file in top.rglob("*.py"))
    return [name for name in names if not any(name == path or name.startswith(f"{path}/") for path in harmless)]


def settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """The config, as plain tables, as it is stored among the facts of a run."""
    return redacted(canonical.to_json_types(table, "config"))


def differences(
    stored: Mapping[str, Any], now: Mapping[str, Any], *, computed: bool = True, prefix: str = ""
) -> list[str]:
    """'key: old -> new' for everything that affects results; `computed` says whether any round is saved already.

    Before the first checkpoint the config may know the measured lane and the facts not yet: it has no effect then.
    """
    harmless = (*HARMLESS, *_same_bits(stored, now))
    if not computed:
        harmless = (*harmless, *(f"engine.{key}" for key in MEASURED))
    return [prefix + change for change in changed_keys(_without(stored, harmless), _without(now, harmless))]


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """'train.lr: 0.1 -> 0.2' for every setting that differs; secrets are redacted."""
    changes = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += changed_keys(old, new, f"{prefix}{key}.")
        elif type(old) is not type(new) or old != new:
            changes.append(f"{prefix}{plain(key)}: {_shown(key, old)} -> {_shown(key, new)}")
    return changes


def _shown(key: str, value: Any) -> str:
    return "(absent)" if value is _ABSENT else plain(repr(redacted({key: value})[key]), most=80)


def _same_bits(stored: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Engine settings that do not affect results in the serial lane: the number of workers.

    And which engine it is, if server and clients also have the same number of processor threads on both.
    """
    engines = [table.get("engine", {}) for table in (stored, now)]
    if any(engine.get("lane") != "serial" for engine in engines):
        return ()
    threads = {table.get("threads") for table in (stored, now)}
    threads |= {engine.get("threads", table.get("threads")) for engine, table in zip(engines, (stored, now))}
    if len(threads) > 1 or any(engine.get("device") != "cpu" or engine.get("num_gpus") for engine in engines):
        return ("engine.workers",)
    return ("engine.workers", "engine.name", "engine.threads")


def _without(table: Mapping[str, Any], dropped: tuple[str, ...], prefix: str = "") -> dict[str, Any]:
    kept = {key: value for key, value in table.items() if f"{prefix}{key}" not in dropped}
    return {
        key: _without(value, dropped, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in kept.items()
    }
