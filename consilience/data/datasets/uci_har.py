"""UCI HAR: activity recognition from an accelerometer at the waist."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from consilience.core.settings import Count, Invalid
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble, refuse_nonfinite
from consilience.data.datasets.prepare.splits import HeldOut
from consilience.data.readers.files import source
from consilience.data.readers.npz import read_npz

HOME = (
    "It holds x [samples, 3] and, for each series, start, length, subject, activity and is_test, with activity_names; "
    "the release is at https://archive.ics.uci.edu/dataset/240."
)
SERIES = ("start", "length", "subject", "activity", "is_test")


def uci_har_acc(
    *,
    window: Count = 128,
    step: Count = 64,
    split: Literal["within", "release"] = "within",
    test_fraction: HeldOut = 0.2,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Windows [3, 128] of acceleration, 6 activities, the person as group (Anguita et al. 2013).

    `split` "within": the end of every series is its person's test part; "release": 9 of the 30 people are
    the test. Axes are standardised over the training windows.
    """
    path = source("uci_har_acc", data_dir, how=HOME).find("uci_har_acc.npz")
    arrays = read_npz(path, ("x", *SERIES, "activity_names"))
    _check(path, arrays)
    people = np.unique(arrays["subject"])
    taken: list[list[tuple[np.ndarray, int, int]]] = [[], []]
    for start, length, subject, activity, is_test in zip(*(arrays[name].tolist() for name in SERIES)):
        series = arrays["x"][start : start + length]
        cut = length - int(length * test_fraction) if split == "within" else (0 if is_test else length)
        for part, samples in enumerate((series[:cut], series[cut:])):
            if len(samples) >= window:
                windows = np.lib.stride_tricks.sliding_window_view(samples, window, axis=0)[::step]  # [n, 3, window]
                taken[part].append((windows, activity, int(np.searchsorted(people, subject))))
    if not all(taken):
        raise Invalid(f"{path}: no series is long enough for training and test windows of {window} samples")
    (x, y, owners), (test_x, test_y, test_owners) = (_join(part) for part in taken)
    mean = x.mean((0, 2), dtype=np.float64, keepdims=True)
    deviation = x.std((0, 2), dtype=np.float64, keepdims=True)
    return assemble(
        "uci_har_acc",
        (((x - mean) / deviation).astype(np.float32), y),
        (((test_x - mean) / deviation).astype(np.float32), test_y),
        classes=len(arrays["activity_names"]),
        groups=owners,
        test_groups=test_owners,
        group_names=tuple(f"person_{number}" for number in people),
        label_names=tuple(str(name) for name in arrays["activity_names"]),
    )


def _check(path: Path, arrays: dict[str, np.ndarray]) -> None:
    if arrays["x"].ndim != 2 or arrays["x"].dtype.kind != "f":
        raise Invalid(f"{path}: x must be decimals [samples, axes], not {arrays['x'].dtype} {arrays['x'].shape}")
    refuse_nonfinite(arrays["x"], f"{path}, x")
    if len({arrays[name].shape for name in SERIES}) != 1:
        raise Invalid(f"{path}: {', '.join(SERIES)} must have one entry for each series")
    ends = arrays["start"].astype(np.int64) + arrays["length"]
    if (arrays["start"] < 0).any() or ends.max(initial=0) > len(arrays["x"]):
        raise Invalid(f"{path}: a series ends at {ends.max(initial=0)} but x has {len(arrays['x'])} samples")


def _join(series: list[tuple[np.ndarray, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows, activities and people of all series, concatenated."""
    counts = [len(windows) for windows, _, _ in series]
    activities, people = (np.repeat([entry[k] for entry in series], counts) for k in (1, 2))
    return np.concatenate([windows for windows, _, _ in series]), activities, people
