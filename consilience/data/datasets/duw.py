"""The MNIST clients of the DUW-FedAvg paper."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.dataset import Dataset
from consilience.data.datasets.mnist import DIGITS, mnist_pictures
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.pictures import shift_pictures
from consilience.data.readers.files import source
from consilience.data.readers.npz import npz_names, read_npz

HOME = (
    "It holds int arrays <environment>_client<k> of MNIST training rows, "
    "made from the client files of https://github.com/a-nakai-k/DeepUnfolding-based-FL."
)


def duw_mnist(
    *,
    environment: Literal["fig2", "env1", "env2", "env34"] = "env1",
    test_scale: Literal["same", "authors"] = "same",
    data_dir: str | Path | None = None,
) -> Dataset:
    """The exact MNIST clients of DUW-FedAvg (Nakai-Kasai and Wadayama, arXiv 2212.12191), pixels in [-1, 1].

    The authors' code scales test pictures otherwise than training pictures, (x - 0.5) / 1.0:
    `test_scale` "authors" repeats that, "same" scales both alike.
    """
    (pictures, labels), (test_pictures, test_labels) = mnist_pictures(data_dir)
    path = source("duw_mnist", data_dir, how=HOME).find("client_indices.npz")
    parts = _client_rows(path, environment)
    rows = np.concatenate(parts).astype(np.int64)
    if len(rows) == 0 or rows.min() < 0 or rows.max() >= len(labels) or len(np.unique(rows)) != len(rows):
        raise Invalid(f"{path}: {environment} does not name distinct rows of the {len(labels)} MNIST pictures")
    half, whole = np.full(1, 0.5), np.ones(1)
    return assemble(
        f"duw_mnist_{environment}",
        (shift_pictures(pictures[rows], half, half), labels[rows]),
        (shift_pictures(test_pictures, half, half if test_scale == "same" else whole), test_labels),
        classes=10,
        groups=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
        group_names=tuple(f"client_{k}" for k in range(len(parts))),
        label_names=DIGITS,
    )


def _client_rows(path: Path, environment: str) -> list[np.ndarray]:
    """Each client's MNIST rows, in the authors' order."""
    names = {name for name in npz_names(path) if name.startswith(f"{environment}_client")}
    wanted = [f"{environment}_client{k}" for k in range(len(names))]
    if not wanted:
        raise Invalid(f"{path} has no arrays {environment}_client0, {environment}_client1, ...")
    return list(read_npz(path, wanted).values())
