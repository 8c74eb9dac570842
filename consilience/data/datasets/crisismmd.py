"""CrisisMMD: tweets with pictures of seven disasters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from consilience.core.settings import Count, Invalid
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.encoded import encoded_pictures
from consilience.data.datasets.prepare.labels import number_names
from consilience.data.datasets.prepare.pictures import Normalise, scale_pictures
from consilience.data.datasets.prepare.texts import TextFeatures, TextForm, VocabularySize
from consilience.data.readers.files import chosen_file, source
from consilience.data.readers.pictures import read_sheets
from consilience.data.readers.tables import read_table

HOME = (
    "Its home is https://crisisnlp.qcri.org/crisismmd (humanitarian task, agreed labels): a tsv.gz with columns event, "
    "label and text for each part, and a sheet of its pictures at 64x64."
)
WEIGHTS = "Weights of a picture encoder are a .safetensors or .npz file."
SIDE = 64


def crisismmd(
    *,
    text: TextForm = "ngrams",
    ngram_features: Count = 4096,
    length: Count = 40,
    max_vocabulary: VocabularySize = 10000,
    encoder: str | None = None,
    picture_encoder: str | None = None,
    picture_weights: str | None = None,
    dev: Literal["drop", "train", "test"] = "drop",
    normalise: Normalise = "standard",
    data_dir: str | Path | None = None,
) -> Dataset:
    """6,126 + 998 + 955 tweets, each with a picture, 5 classes, the event as group (Alam et al. 2018).

    x is {"text": features, "picture": [N, 3, 64, 64]}; `dev` rows can join the training or the test rows.
    With `picture_encoder`, a model of the zoo (random, or with `picture_weights`, a file relative to `data_dir`) or the
    folder of a vision transformer, "picture" is its representation instead, rows of length about 1.
    """
    part_of = {"train": "train", "dev": dev, "test": "test"}
    parts = [part for part in ("train", "dev", "test") if part_of[part] != "drop"]
    files = [name for part in parts for name in (f"{part}.tsv", f"{part}.jpg")]
    _, paths = source("crisismmd", data_dir, how=HOME).locate({"sheets": files})
    tables = {part: read_table(path) for part, path in zip(parts, paths[::2])}
    pictures = np.concatenate(
        [read_sheets([path], side=SIDE, count=len(tables[part])) for part, path in zip(parts, paths[1::2])]
    )
    column = {name: [cell for t in tables.values() for cell in t.column(name)] for name in ("event", "label", "text")}
    labels, label_names = number_names(column["label"], where=paths[0])
    events, event_names = number_names(column["event"], where=paths[0])
    is_train = np.repeat([part_of[part] == "train" for part in parts], [len(tables[part]) for part in parts])
    train, test = np.flatnonzero(is_train), np.flatnonzero(~is_train)
    featurise = TextFeatures(
        form=text, length=length, max_vocabulary=max_vocabulary, ngram_features=ngram_features, encoder=encoder
    )
    words, test_words, vocabulary = featurise(*([column["text"][row] for row in rows] for rows in (train, test)))
    seen, test_seen = scale_pictures(pictures[train], pictures[test], normalise if picture_encoder is None else "unit")
    if picture_encoder is not None:
        weights = None if picture_weights is None else chosen_file(picture_weights, data_dir, how=WEIGHTS)
        seen, test_seen = encoded_pictures(seen, test_seen, encoder=picture_encoder, weights=weights)
    elif picture_weights is not None:
        raise Invalid(f"picture_weights = {picture_weights!r} needs picture_encoder: the model they are weights of")
    return assemble(
        "crisismmd",
        ({"text": words, "picture": seen}, labels[train]),
        ({"text": test_words, "picture": test_seen}, labels[test]),
        classes=len(label_names),
        groups=events[train],
        test_groups=events[test],
        group_names=event_names,
        label_names=label_names,
        vocabulary=vocabulary,
    )
