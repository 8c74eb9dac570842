"""A data set before it is partitioned over clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from consilience.core.kind import Kind
from consilience.core.notebook import line


class Texts(tuple[str, ...]):
    """Raw texts, for the tokenizer of the model."""

    def __getitem__(self, rows: Any) -> Any:
        """One text, or some of them."""
        found = super().__getitem__(rows)
        return Texts(found) if isinstance(rows, slice) else found


@dataclass(frozen=True, eq=False, kw_only=True)
class NewRows:
    """Rows without targets, read as the training rows were: features, the name of each row, and unused columns."""

    x: Any
    names: tuple[str, ...]
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """Training and test rows; `groups` says which natural client (hospital, person, style) owns each row."""

    name: str
    x: Any  # [N, ...] tensor, a dict of such tensors, or `Texts`
    y: Tensor  # [N]
    test_x: Any
    test_y: Tensor
    classes: int | None  # number of classes; None: targets are not class numbers
    groups: Tensor | None = None  # [N] int64, indices into group_names
    test_groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()  # what each token number in x means, when x are token numbers
    feature_names: tuple[str, ...] = ()  # what each column of x means, when x is a table
    kind: Kind | None = None  # kind of task; None: inferred from the targets
    weights: Tensor | None = None  # [N] weight of each training row in the loss; None: 1
    read_rows: Callable[[Path], NewRows] | None = None  # new rows from a file, for predictions; None: not supported

    def __repr__(self) -> str:
        of = "real-valued targets" if self.classes is None else f"{self.classes} classes"
        return line(f"Dataset({self.name}, {len(self.y):,} training rows, {len(self.test_y):,} test rows, {of})")
