"""The result of a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from consilience.core import notebook
from consilience.core.settings import Invalid, nearest
from consilience.core.task import Task
from consilience.core.tree import Tree, leaves
from consilience.layers.adapters import folded
from consilience.runs.metric_table import columns
from consilience.runs.model_formats import Adapters, Format, write_model
from consilience.runs.result_folder import draw, write_result
from consilience.runs.text import quality


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Result:
    """The trained model and one row of metrics per round."""

    task: Task
    values: Tree  # the model's parameters and buffers: the last one, or the best on the validation rows
    history: list[dict[str, Any]]
    folder: Path | None = None
    stopped: int = 0  # the signal that ended it early
    best: dict[str, Any] | None = None  # round, metric and value of the best model on the validation rows
    example: Any = None  # some rows that the model reads
    label_names: tuple[str, ...] = ()  # of the classes, where they have names

    @cached_property
    def model(self) -> nn.Module:
        """Your module with the trained values, in evaluation mode."""
        return folded(self.task.trained(self.values))

    def export(self, folder: Path | str, format: Format = "safetensors", *, adapters: Adapters = "merged") -> Path:
        """Write the model for other programs; the file, or the folder of `format="hugging_face"`.

        `result.export("model", "onnx")`: formats are "safetensors" (`load_state_dict` reads it), "torch-export", "onnx"
        and "hugging_face" (with its tokenizer; low-rank `adapters` "merged" into the weights or "separate").
        """
        facts = {"kind": self.task.kind.name, "loss": self.task.loss_name}
        return write_model(
            self.task.trained(self.values),
            Path(folder),
            format,
            example=self.example,
            label_names=self.label_names,
            adapters=adapters,
            facts=facts,
        )

    @torch.no_grad()
    def predict(self, x: Any) -> Any:
        """Predictions for these rows: class names if there are any, class numbers, or real values."""
        output, _ = self.task.apply(self.values, x, train=False)
        if self.task.kind.decide is None:
            return output
        decided = self.task.kind.decide(output)
        if not self.label_names or not self.task.kind.class_per_row:
            return decided
        return [self.label_names[number] for number in decided.tolist()]

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        said = f", {quality(last, self.task.metrics.rows).replace('  ', ', ')}" if last else ""
        early = ", interrupted" if self.stopped else ""
        rounds = f"{len(self.history)} round{'' if len(self.history) == 1 else 's'}"
        parameters = sum(leaf.numel() for leaf in leaves(self.values["params"]))
        model = f"{type(self.task.module).__name__} with {parameters:,} parameters"
        return notebook.line(f"Result({rounds}{early}{said}, {model})")

    def _repr_html_(self) -> str:
        names = self._columns()
        rows = [[_shown(row.get(key)) for key in names] for row in self.history[-10:]]
        return notebook.table(repr(self), rows, head=list(names.values()))

    def frame(self) -> Any:
        """The history as a pandas frame with the round as its index; lists, such as `weights`, stay lists."""
        try:
            import pandas
        except ImportError as problem:
            raise ImportError('result.frame() needs pandas: pip install "consilience[frames]"') from problem
        found = pandas.DataFrame(self.history)
        return found.set_index("round") if len(found) else found

    def plot(self, *metrics: str | Sequence[str], axes: Any = None) -> Any:
        """Draw metrics over rounds, one below the other; the matplotlib figure.

        `result.plot("accuracy", "train_loss")`: without names the main metric and the loss that were tested, else the
        training loss. axes: one of matplotlib's to draw into, for a single metric.
        """
        keys = [key for given in metrics for key in ([given] if isinstance(given, str) else given)] or self._usual()
        known = {key for row in self.history for key, value in row.items() if isinstance(value, (int, float))}
        for key in keys:
            if key not in known - {"round"}:
                raise Invalid(f"{key!r} was not recorded{nearest(key, known)}; there are {', '.join(sorted(known))}")
        if axes is not None and len(keys) != 1:
            raise Invalid(f"axes is for one metric: name one of {', '.join(keys)}")
        return draw(self.history, {key: self._titles().get(key, key) for key in keys}, axes)

    def save(self, folder: Path | str) -> Path:
        """Write model, history and their description to a folder that `consilience.load` reads; the folder.

        A folder with other files is refused.
        """
        return write_result(self, Path(folder))

    def _usual(self) -> list[str]:
        """The main metric and the loss where they were tested, else the training loss."""
        wanted = dict.fromkeys((self.task.metrics.main_row.key, "loss"))
        tested = [key for key in wanted if any(row.get(key) is not None for row in self.history)]
        if not self.history:
            raise Invalid("there is nothing to draw: no round was finished")
        return tested or ["train_loss"]

    def _titles(self) -> dict[str, str]:
        return {column.key: column.title for column in columns(self.task.metrics.rows)}

    def _columns(self) -> dict[str, str]:
        """The fields of an overview with their titles."""
        names = {"round": "round"}
        for column in columns(self.task.metrics.rows):
            brief = column.role in ("metric", "clients") or column.key == "train_loss"
            if brief and not column.detail and any(row.get(column.key) is not None for row in self.history):
                names[column.key] = column.title
        return names

    def table(self, rows: int = 10) -> str:
        """The last rows of the history as text."""
        names = self._columns()
        lines = [list(names.values())]
        lines += [[_shown(row.get(key)) for key in names] for row in self.history[-rows:]]
        widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
