"""What both sides must have in common for a round to make sense, in a few digests that name what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.refusal import plain
from consilience.core.task import Task
from consilience.flower.secure.terms import SecureTerms


def agreement(
    algorithm: Algorithm, task: Task, dtype: str, clients: int, secure: SecureTerms | None = None
) -> dict[str, str]:
    """Digests of the algorithm with all its settings, the model's tensors, the kind of task, secure sums."""
    start = tree.flatten(task.start())
    shapes = [(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in sorted(start.items())]
    return {
        "algorithm": _short(repr(algorithm)),
        "model": _short(repr(shapes)),
        "kind": task.kind.name,
        "loss": task.loss_name,
        "metrics": " ".join(metric.key for metric in task.metrics.metrics),
        "dtype": dtype,
        "clients": str(clients),
        "secure_aggregation": "no" if secure is None else _short(repr(secure)),
    }


def differences(ours: Mapping[str, str], theirs: Any) -> str:
    """What is not the same, in words; nothing if all is."""
    if not isinstance(theirs, Mapping):
        return "everything"
    differing = [
        f"{key} ({plain(theirs.get(key), most=40)}, here {ours[key]})" for key in ours if ours[key] != theirs.get(key)
    ]
    return ", ".join(differing)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
