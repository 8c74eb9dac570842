"""Predicts new rows with a run's model; rows are read as the training rows were."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from consilience.core import tree
from consilience.core.settings import Invalid
from consilience.data.dataset import Texts
from consilience.experiments.retest import latest_simulation
from consilience.runs.result import Result

_AT_ONCE = 1024  # rows


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """One line for each row: its name, the prediction, and the probability of each class for classifiers."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    unused: tuple[str, ...]  # columns that the model does not read
    round: int

    def csv(self) -> str:
        """As comma-separated text."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.head)
        writer.writerows(self.rows)
        return text.getvalue()


def predict(run: Path, data: Path, *, best: bool = False) -> Predictions:
    """Predictions of a run's latest (or best) model for the rows of a file; files of another form are refused."""
    if not data.exists():
        raise FileNotFoundError(f"{data} was not found: name the file with the rows to predict")
    result, round, dataset = latest_simulation(run, best=best)
    if dataset.read_rows is None:
        raise Invalid(
            f"the data set {dataset.name!r} of {run} cannot read rows from a file: predictions are for the data sets "
            "table, client_files (tables), text_table, npz and picture_folders; in Python use cs.load(run).predict(x)"
        )
    rows = dataset.read_rows(data)
    if isinstance(rows.x, Texts):
        raise Invalid("predictions of raw texts need the model's tokenizer: export the run with --format hugging_face")
    head, lines = _decided(result, rows.x, rows.names)
    return Predictions(head=head, rows=lines, unused=rows.unused, round=round)


@torch.no_grad()
def _decided(result: Result, x: object, names: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    outputs = [
        result.task.apply(result.values, tree.rows(x, slice(start, start + _AT_ONCE)), train=False)[0]
        for start in range(0, len(names), _AT_ONCE)
    ]
    output, kind = torch.cat(outputs), result.task.kind
    if kind.class_per_row:
        labels = result.label_names or tuple(str(number) for number in range(output.shape[1]))
        probabilities = output.to(torch.float64).softmax(1)
        decided = [labels[number] for number in kind.decide(output).tolist()] if kind.decide else []
        shares = [[f"{share:.6f}" for share in row] for row in probabilities.tolist()]
        rows = [(name, label, *share) for name, label, share in zip(names, decided, shares)]
        return ("row", "prediction", *(f"probability of {label}" for label in labels)), rows
    if kind.decide is not None:
        output = kind.decide(output)
    flat = output.reshape(len(names), -1)
    head = ("prediction",) if flat.shape[1] == 1 else tuple(f"prediction {k + 1}" for k in range(flat.shape[1]))
    return ("row", *head), [(name, *(f"{v:.9g}" for v in values)) for name, values in zip(names, flat.tolist())]
