"""MEDIC: pictures of disasters, labelled for four tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from consilience.core.settings import Count, Invalid
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.modalities import PictureForm, picture_modality
from consilience.data.datasets.prepare.pictures import Normalise
from consilience.data.datasets.prepare.records import cells, classes, owners, places
from consilience.data.readers.files import source
from consilience.data.readers.pictures import Fit
from consilience.data.readers.tables import read_table

HOME = "Its home is https://crisisnlp.qcri.org/medic: MEDIC_train.tsv and the like, with pictures below data/."


def medic(
    *,
    task: Literal["damage_severity", "disaster_types", "humanitarian", "informative"] = "humanitarian",
    dev: Literal["drop", "train", "test"] = "drop",
    size: Count = 64,
    fit: Fit = "crop",
    normalise: Normalise = "standard",
    data_dir: str | Path | None = None,
) -> Dataset:
    """Pictures of disasters with labels of four tasks, the event as group (Alam et al. 2023), in its release's layout.

    The release has pictures without their tweets; `dev` rows can join the training or the test rows.
    """
    training = ["train", "dev"] if dev == "train" else ["train"]
    parts = [*training, *(["dev", "test"] if dev == "test" else ["test"])]
    files = [f"MEDIC_{part}.tsv" for part in parts]
    _, paths = source("medic", data_dir, folders=("MEDIC",), how=HOME).locate({"release": files})
    tables = [read_table(path) for path in paths]
    labels, label_names = classes(tables, task, training=len(training))
    events, event_names = owners(tables, "event_name")
    given = sum(len(table) for table in tables[: len(training)])
    rows = (np.arange(given), np.arange(given, len(labels)))
    form = PictureForm(size=size, fit=fit, grey=False, normalise=normalise)
    found = picture_modality(cells(tables, "image_path"), rows, places(tables), paths[0].parent, form)
    if not (found.has.all() and found.test_has.all()):
        raise Invalid(f"{paths[0].parent}: a row names no picture in image_path: fetch the tables again")
    return assemble(
        "medic",
        (found.train, labels[rows[0]]),
        (found.test, labels[rows[1]]),
        classes=len(label_names),
        groups=events[rows[0]],
        test_groups=events[rows[1]],
        group_names=event_names,
        label_names=label_names,
    )
