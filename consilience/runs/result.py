"""What a finished training gives back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from consilience.core.adapters import folded
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.runs.metric_table import columns
from consilience.runs.model_formats import Adapters, Format, write_model


@dataclass(frozen=True, eq=False, kw_only=True)
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
        """What the model says of these rows: names of classes where there are any, class numbers, or real values."""
        output, _ = self.task.apply(self.values, x, train=False)
        if self.task.kind.decide is None:
            return output
        decided = self.task.kind.decide(output)
        if not self.label_names or not self.task.kind.class_per_row:
            return decided
        return [self.label_names[number] for number in decided.tolist()]

    def table(self, rows: int = 10) -> str:
        """The last rows of the history as text."""
        names = {"round": "round"}
        for column in columns(self.task.metrics.rows):
            brief = column.role in ("metric", "clients") or column.key == "train_loss"
            if brief and not column.detail and any(row.get(column.key) is not None for row in self.history):
                names[column.key] = column.title
        lines = [list(names.values())]
        lines += [[_shown(row.get(key)) for key in names] for row in self.history[-rows:]]
        widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
