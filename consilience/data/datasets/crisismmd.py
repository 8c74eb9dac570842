"""CrisisMMD: tweets with pictures of seven disasters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch

from consilience.core.settings import Count, Invalid, OnlyWith
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.encoded import encoded_pictures
from consilience.data.datasets.prepare.labels import number_names
from consilience.data.datasets.prepare.modalities import picture_path
from consilience.data.datasets.prepare.pictures import Normalise, scale_pictures
from consilience.data.datasets.prepare.records import cells, places
from consilience.data.datasets.prepare.texts import TOKENS, NumericForm, TextFeatures, VocabularySize
from consilience.data.readers.files import Source, chosen_file, source
from consilience.data.readers.pictures import read_pictures, read_sheets
from consilience.data.readers.tables import read_table
from consilience.models.modalities import PRESENT

HOME = (
    "Its home is https://crisisnlp.qcri.org/crisismmd: the release has the folders data_image and "
    "crisismmd_datasplit_agreed_label. Or (humanitarian task) a tsv.gz with columns event, label and text for each "
    "part, and a sheet of its pictures at 64x64."
)
WEIGHTS = "Weights of a picture encoder are a .safetensors or .npz file."
SIDE = 64


class _Rows(NamedTuple):
    where: Path
    events: list[str]
    labels: list[str]
    texts: list[str]
    pictures: np.ndarray  # [N, 3, size, size] bytes
    sizes: list[int]  # rows of each part


def crisismmd(
    *,
    text: NumericForm = "ngrams",
    ngram_features: Annotated[Count, OnlyWith("text", ("ngrams",))] = 4096,
    length: Annotated[Count, OnlyWith("text", TOKENS)] = 40,
    max_vocabulary: Annotated[VocabularySize, OnlyWith("text", TOKENS)] = 10000,
    encoder: Annotated[str | None, OnlyWith("text", ("encoder",))] = None,
    picture_encoder: str | None = None,
    picture_weights: str | None = None,
    task: Literal["humanitarian", "informative"] = "humanitarian",
    size: Count = SIDE,
    mask: bool = False,
    dev: Literal["drop", "train", "test"] = "drop",
    normalise: Normalise = "standard",
    data_dir: str | Path | None = None,
) -> Dataset:
    """6,126 + 998 + 955 tweets, each with a picture, 5 classes, the event as group (Alam et al. 2018).

    x is {"text": features, "picture": [N, 3, 64, 64]}; `dev` rows can join the training or the test rows.
    With `picture_encoder`, a model of the zoo (random, or with `picture_weights`, a file relative to `data_dir`) or the
    folder of a vision transformer, "picture" is its representation instead, rows of length about 1. `task` and `size`
    are for the files of the release. `mask` adds "present", which says that every row has both parts, for the partition
    `missing_modality`.
    """
    part_of = {"train": "train", "dev": dev, "test": "test"}
    parts = [part for part in ("train", "dev", "test") if part_of[part] != "drop"]
    rows = _read(parts, task, size, source("crisismmd", data_dir, how=HOME))
    labels, label_names = number_names(rows.labels, where=rows.where)
    events, event_names = number_names(rows.events, where=rows.where)
    is_train = np.repeat([part_of[part] == "train" for part in parts], rows.sizes)
    train, test = np.flatnonzero(is_train), np.flatnonzero(~is_train)
    featurise = TextFeatures(
        form=text, length=length, max_vocabulary=max_vocabulary, ngram_features=ngram_features, encoder=encoder
    )
    words, test_words, vocabulary = featurise(*([rows.texts[row] for row in part] for part in (train, test)))
    seen, test_seen = scale_pictures(
        rows.pictures[train], rows.pictures[test], normalise if picture_encoder is None else "unit"
    )
    if picture_encoder is not None:
        weights = None if picture_weights is None else chosen_file(picture_weights, data_dir, how=WEIGHTS)
        seen, test_seen = encoded_pictures(seen, test_seen, encoder=picture_encoder, weights=weights)
    elif picture_weights is not None:
        raise Invalid(f"picture_weights = {picture_weights!r} needs picture_encoder: the model they are weights of")
    x, test_x = {"text": words, "picture": seen}, {"text": test_words, "picture": test_seen}
    if mask:
        x, test_x = ({**part, PRESENT: torch.ones(len(part["text"]), 2, dtype=torch.int64)} for part in (x, test_x))
    return assemble(
        "crisismmd",
        (x, labels[train]),
        (test_x, labels[test]),
        classes=len(label_names),
        groups=events[train],
        test_groups=events[test],
        group_names=event_names,
        label_names=label_names,
        vocabulary=vocabulary,
    )


def _read(parts: Sequence[str], task: str, size: int, place: Source) -> _Rows:
    """All rows of the parts, from sheets or from the files of the release."""
    release = [f"task_{task}_text_img_agreed_lab_{part}.tsv" for part in parts]
    forms = {
        "sheets": [name for part in parts for name in (f"{part}.tsv", f"{part}.jpg")],
        "folders": [*(f"crisismmd_datasplit_agreed_label/{name}" for name in release), "data_image/"],
        "flat": [*release, "data_image/"],
    }
    form, paths = place.locate(forms)
    if form == "sheets":
        if task != "humanitarian" or size != SIDE:
            raise Invalid(
                f"{paths[0].parent} has sheets of the humanitarian task at {SIDE}x{SIDE}: leave out task and size"
            )
        tables = [read_table(path) for path in paths[::2]]
        pictures = [read_sheets([path], side=SIDE, count=len(t)) for path, t in zip(paths[1::2], tables)]
        names = ("event", "label", "text")
    else:
        tables = [read_table(path) for path in paths[:-1]]
        where, top = places(tables), paths[-1].parent
        files = [picture_path(file, at, top) for file, at in zip(cells(tables, "image"), where)]
        pictures = [read_pictures(files, size=size, fit="squash", grey=False)]  # as the sheets were made
        names = ("event_name", "label", "tweet_text")
    events, labels, texts = (cells(tables, name) for name in names)
    return _Rows(tables[0].path, events, labels, texts, np.concatenate(pictures), [len(table) for table in tables])
