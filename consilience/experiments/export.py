"""The trained model as files: safetensors under the module's own names, and a manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.runs import canonical, tree_file
from consilience.runs.disk import explain, replace_file
from consilience.runs.row_log import RecordError

MODEL = "model.safetensors"
MANIFEST = "model.json"


def export(folder: Path, task: Task, model: Tree, facts: dict[str, Any]) -> str:
    """Write the model, whole or not at all; its SHA-256. `load_state_dict` of the module reads it back.

    Frozen weights are not written, only their digest in the manifest: they are loaded from their own files.
    """
    values, frozen = {**model["params"], **model["buffers"]}, task.frozen
    learned = {n: v for n, v in task.trained(model).state_dict().items() if n not in frozen}
    state = {name: values.get(name, value) for name, value in learned.items()}
    flat, _ = tree_file.describe(state, "model")
    data = b"".join(tree_file.chunks(flat))
    digest = hashlib.sha256(data).hexdigest()
    manifest = {"format": 1, "file": MODEL, "bytes": len(data), "sha256": digest, **facts}
    try:
        replace_file(folder / MODEL, data)
        replace_file(folder / MANIFEST, canonical.encode(canonical.to_json_types(manifest, "manifest"), pretty=True))
    except OSError as problem:
        raise RecordError(explain("export the model to", folder / MODEL, problem)) from problem
    return digest
