"""`cs.load`: the result of a run folder, or one that `result.save` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from consilience import models
from consilience.core.settings import Invalid
from consilience.experiments.retest import latest
from consilience.runs.result import Result
from consilience.runs.result_folder import StoredResult, is_result, read_result, refuse_other_model
from consilience.task.task import Task


def load(folder: Path | str, model: nn.Module | Task | None = None, *, best: bool = False) -> Result:
    """A result from disk; `cs.load("runs/quickstart").predict(x)`.

    folder: of a run (`consilience run`), whose model, data and settings are rebuilt from its config; or one that
        `result.save` wrote.
    model: of a saved result the module, or the Task, that it was trained with; not needed for models of the library
        (`cs.build_model`), and refused for a run, which knows its own. Code is never read from a folder.
    best: of a run the best model on the validation rows.
    """
    place = Path(folder)
    if (place / "run.json").exists():
        if model is not None:
            raise Invalid(f"{place} is a run, which knows its model: call load({str(place)!r}) without one")
        return latest(place, best=best)[0]
    if not is_result(place):
        raise Invalid(f"{place} holds neither a run nor a saved result: name the folder of one")
    if best:
        raise Invalid(f"{place} is a saved result, which holds one model: leave out best=True")
    stored = read_result(place)
    task = _task(stored, model, place)
    refuse_other_model(stored.values, task.start(), place, stored.module)
    return Result(
        task=task,
        values=stored.values,
        history=stored.history,
        best=stored.best,
        stopped=stored.stopped,
        example=stored.example,
        label_names=stored.label_names,
    )


def _task(stored: StoredResult, model: nn.Module | Task | None, place: Path) -> Task:
    if isinstance(model, Task):
        return model
    if model is None:
        if stored.built_from is None:
            raise Invalid(
                f"{place} holds the values of a {stored.module}, and no code: give the module as well, "
                f"load({str(place)!r}, model={stored.module}(...))"
            )
        model = _built(stored.built_from)
    if not stored.kind:
        raise Invalid(f"{place} was trained for a kind of task of its own: give the Task instead of the module")
    task = Task(model, stored.kind)
    width = len(stored.label_names) or None
    if stored.loss != task.loss_name:
        task = Task(model, stored.kind, loss=stored.loss)
    return task.knowing(width) if width and task.kind.multiclass else task


def _built(built_from: dict[str, Any]) -> nn.Module:
    inputs = built_from["inputs"]
    shapes: Any = {k: tuple(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(inputs)
    options: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in built_from["options"].items()}
    return models.build(built_from["name"], shapes, built_from["classes"], **options)
