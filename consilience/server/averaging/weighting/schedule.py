"""Weights fixed before training: a table of rounds and clients, learned or written by hand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Invalid, check
from consilience.core.tree import Tree

LEARN = "learn one with `consilience learn` or `learn_schedule`, or give a table"
WeightTable = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ScheduleWeights:
    """Theta[round, client], from `table` or from the file `path`, whose content is stored in `table`.

    If some clients are missing in a round, the others share the row's sum in proportion. After the table's last round
    its means over all rounds are used (the objective of DUW's Theorem 1), or its last row again.
    """

    table: WeightTable = ()
    path: str = ""
    after_last: Literal["mean", "last"] = "mean"
    needs_each_reply = False  # it reads only which clients replied

    def __post_init__(self) -> None:
        check(self)
        if self.path and not self.table:
            object.__setattr__(self, "table", as_table(load_table(self.path)))
        lengths = {len(row) for row in self.table}
        if len(lengths) > 1:
            raise Invalid(f"ScheduleWeights.table has rows of {sorted(lengths)} weights: one per client is needed")
        if not np.isfinite(np.array(self.table, dtype=np.float64)).all():
            raise Invalid("ScheduleWeights.table holds NaN or infinite weights")

    @staticmethod
    def of(table: Tensor) -> ScheduleWeights:
        """From a tensor [rounds, clients]."""
        return ScheduleWeights(table=as_table(table))

    def init(self, start: Tree, clients: int) -> Tree:
        """No state; refuses a missing table and one for another number of clients."""
        if not self.table:
            raise Invalid(f"the schedule of aggregation weights is empty: {LEARN}")
        if len(self.table[0]) != clients:
            raise Invalid(f"the schedule is for {len(self.table[0])} clients, but there are {clients}: {LEARN}")
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """This round's row."""
        return shares(self.row(cohort.round, cohort.examples.device), cohort), state, {}

    def row(self, round: int, device: torch.device) -> Tensor:
        """[K] the weights of one round."""
        table = torch.tensor(self.table, dtype=torch.float64, device=device)
        if round < len(table):
            return table[round]
        return table.mean(0) if self.after_last == "mean" else table[-1]


def shares(row: Tensor, cohort: Cohort) -> Tensor:
    """[m] weights of the cohort from a row [K]: its sum, divided in proportion among the clients that replied."""
    ids = torch.from_numpy(np.asarray(cohort.ids)).to(row.device)
    if len(ids) == len(row):
        return row[ids]
    present = row[ids]
    if not bool(present.sum() > 0):  # no client with a weight replied: by examples
        return cohort.examples / cohort.examples.sum() * row.sum()
    return present * (row.sum() / present.sum())


def as_table(weights: Tensor) -> WeightTable:
    """A tensor [rounds, clients] as plain numbers."""
    if weights.dim() != 2:
        raise Invalid(f"a schedule has the shape [rounds, clients], not {list(weights.shape)}")
    return tuple(tuple(row) for row in weights.detach().to("cpu", torch.float64).tolist())


def save_table(weights: Tensor, path: Path | str, **more: Tensor) -> None:
    """Write weights [rounds, clients] and further tensors as a safetensors file."""
    tensors = {"weights": weights, **more}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)


def load_table(path: Path | str) -> Tensor:
    """Weights [rounds, clients] from a safetensors file."""
    return load_tensors(path)["weights"]


def load_tensors(path: Path | str) -> dict[str, Any]:
    """All tensors that `save_table` wrote."""
    if not os.path.isfile(path):
        raise Invalid(f"there is no schedule at {str(path)!r}: {LEARN}")
    try:
        found = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as problem:
        raise Invalid(f"{path} is not a safetensors file ({problem}): {LEARN}") from problem
    weights = found.get("weights")
    if weights is None or weights.dim() != 2 or not weights.is_floating_point():
        raise Invalid(f"{path} holds no floating tensor 'weights' of shape [rounds, clients]: {LEARN}")
    return found
