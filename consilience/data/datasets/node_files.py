"""One .npz file per client, on any machine of a Ray cluster."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from consilience.core.settings import Checked, Count, Invalid, Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.features import scale_features
from consilience.data.datasets.prepare.pairs import read_pairs
from consilience.data.datasets.prepare.splits import HeldOut, held_out

_CHUNK = 2**20


def node_files(
    *,
    folder: str,
    normalise: Literal["unit", "signed", "none"] = "none",
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
    classes: Count | None = None,
    data_dir: str | Path | None = None,
) -> Dataset:
    """One client per .npz file in `folder` of each machine of a Ray cluster, read there and nowhere else.

    Needs engine = 'ray'. The archives are those of `client_files`; $NAME and ~ in the folder are replaced on each
    machine. `classes`: how many there are, where the rows do not show the last ones.
    """
    raise Invalid(
        "data.name = 'node_files' are read by the workers of engine = 'ray', on the machines where they lie, in "
        "`consilience run` and `resume`: elsewhere, use data.name = 'client_files'"
    )


@dataclass(frozen=True, kw_only=True)
class NodeFiles(Checked):
    """The clients of a machine are the .npz files in its `folder`, each named after its client.

    Archives hold x and y, or x_train, y_train, x_test and y_test, as for the data set `client_files`. The folder has
    the same path on every machine, in which $NAME and ~ are replaced there; a machine without it has no clients.

    normalise: pictures to [0, 1] ("unit") or [-1, 1] ("signed"); other numbers stay as they are ("none").
    test_fraction: the share of a client's rows that are kept for testing, where its archive has no test rows.
    """

    folder: str
    normalise: Literal["unit", "signed", "none"] = "none"
    test_fraction: HeldOut = 0.2
    seed: Whole = 0

    def names(self) -> list[str]:
        """The clients whose files lie on this machine."""
        place = self._place
        return sorted(path.stem for path in place.glob("*.npz") if path.name[0] != ".") if place.is_dir() else []

    def digest(self, name: str) -> str:
        """SHA-256 of a client's file."""
        found = hashlib.sha256()
        with self._file(name).open("rb") as file:
            while part := file.read(_CHUNK):
                found.update(part)
        return found.hexdigest()

    def read(self, name: str) -> tuple[Any, ...]:
        """(x, y, test_x, test_y) of a client."""
        path = self._file(name)
        pairs = read_pairs(path)
        x, y = pairs["train"]
        if "test" in pairs:
            test_x, test_y = pairs["test"]
        else:
            rows, tested = held_out(y, fraction=self.test_fraction, seed=self.seed)
            test_x, test_y, x, y = x[tested], y[tested], x[rows], y[rows]
        scaled = scale_features(x, test_x, self.normalise, where=path)
        return tuple(torch.as_tensor(part) for part in (scaled[0], y, scaled[1], test_y))

    @property
    def _place(self) -> Path:
        return Path(os.path.expandvars(os.path.expanduser(self.folder)))

    def _file(self, name: str) -> Path:
        path = self._place / f"{name}.npz"
        if not path.is_file():
            raise Invalid(f"the file of client {name!r} is not on this machine: {path}")
        return path
