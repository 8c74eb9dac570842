"""The device and floating type of an engine's tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.settings import Invalid, nearest
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.stores.block_storage import placed

DTYPES = {"float32": torch.float32, "float64": torch.float64}
FloatingType = Literal["float32", "float64"]


class Placement(NamedTuple):
    """A device and a floating type, for the model, the rows and whatever is computed from them."""

    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(device: str, dtype: str) -> Placement:
        """From their names in a config: "auto" is the GPU where there is one."""
        if dtype not in DTYPES:
            raise Invalid(f"dtype = {dtype!r} is not one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
        return Placement(resolve_device(device), DTYPES[dtype])

    def task(self, task: Task) -> Task:
        """The task with its constants placed."""
        return task.to(self.device, self.dtype)

    def start(self, task: Task) -> Tree:
        """The task's initial model."""
        return tree.cast_floating(tree.to(task.start(), self.device), self.dtype)

    def rows(self, rows: Rows) -> Rows:
        """Rows, with floating features and targets in the floating type."""
        return rows.to(self.device, self.dtype)

    def saved(self, values: Tree) -> Tree:
        """A saved tree on the device, in its saved types."""
        return placed(values, self.device)


def resolve_device(name: str) -> torch.device:
    """'auto' is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        others = "auto, cpu or cuda" if torch.cuda.is_available() else "auto or cpu"
        reason = str(problem).partition("\n")[0]
        reason = "there is no such device" if reason.startswith("Expected one of") else reason
        raise Invalid(f"device = {name!r} cannot be used here ({reason}): try {others}") from problem
    return device
