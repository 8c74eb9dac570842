"""Rows of text, pictures, vectors and table cells, from a table and the files that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from consilience.core.settings import Count, Invalid, OnlyWith, Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.modalities import (
    Modality,
    PictureForm,
    joined,
    picture_modality,
    table_modality,
    text_modality,
    vector_modality,
)
from consilience.data.datasets.prepare.pictures import Normalise
from consilience.data.datasets.prepare.records import cells, classes, owners, places
from consilience.data.datasets.prepare.splits import HeldOut, given_or_held_out
from consilience.data.datasets.prepare.texts import TOKENS, NumericForm, TextFeatures, VocabularySize
from consilience.data.readers.files import chosen_file, data_directory
from consilience.data.readers.pictures import Fit
from consilience.data.readers.tables import read_records

HOW = "It is a .csv, .tsv (.gz) or .jsonl file whose columns hold text, picture files or numbers."
WEIGHTS = "Weights of a picture encoder are a .safetensors or .npz file."


def multimodal(
    *,
    train: str,
    test: str | None = None,
    label: str = "label",
    client: str | None = None,
    text: str | None = None,
    picture: str | None = None,
    vector: str | None = None,
    columns: tuple[str, ...] = (),
    categorical: tuple[str, ...] | None = None,
    features: NumericForm = "ngrams",
    length: Annotated[Count, OnlyWith("features", TOKENS)] = 64,
    max_vocabulary: Annotated[VocabularySize, OnlyWith("features", TOKENS)] = 20000,
    ngram_features: Annotated[Count, OnlyWith("features", ("ngrams",))] = 4096,
    encoder: Annotated[str | None, OnlyWith("features", ("encoder",))] = None,
    folder: str | None = None,
    size: Count = 64,
    fit: Fit = "crop",
    grey: bool = False,
    normalise: Normalise = "standard",
    picture_encoder: str | None = None,
    picture_weights: str | None = None,
    test_fraction: Annotated[HeldOut, OnlyWith("test", (None,))] = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Rows of a csv, tsv or jsonl file: `text`, `picture` and `vector` name columns, `columns` those of a table.

    x is {"text", "picture", "vector", "table"} as far as named, and "present" [N, parts] (1: the row has the part; in
    order of name). A picture cell is a file in `folder` (default: the table's), a vector cell holds numbers; an empty
    cell, for "table" an empty cell in all `columns`, means that the row lacks this part, which is then 0.
    """
    _refuse_idle(text, picture, vector, columns, folder, picture_encoder, picture_weights)
    tables = [read_records(chosen_file(file, data_dir, how=HOW)) for file in (train, test) if file is not None]
    labels, label_names = classes(tables, label, training=1)
    owner, group_names = owners(tables, client) if client is not None else (None, ())
    where = places(tables)
    given = len(tables[0]) if test is not None else None
    rows = given_or_held_out(labels, given=given, fraction=test_fraction, seed=seed, groups=owner)
    parts: dict[str, Modality] = {}
    if text is not None:
        featurise = TextFeatures(
            form=features,
            length=length,
            max_vocabulary=max_vocabulary,
            ngram_features=ngram_features,
            encoder=encoder,
        )
        parts["text"] = text_modality(cells(tables, text), rows, featurise)
    if picture is not None:
        weights = None if picture_weights is None else chosen_file(picture_weights, data_dir, how=WEIGHTS)
        form = PictureForm(size=size, fit=fit, grey=grey, normalise=normalise, encoder=picture_encoder, weights=weights)
        place = tables[0].path.parent if folder is None else data_directory(data_dir) / folder
        parts["picture"] = picture_modality(cells(tables, picture), rows, where, place, form)
    if vector is not None:
        parts["vector"] = vector_modality(cells(tables, vector), rows, where)
    if columns:
        table = {name: cells(tables, name) for name in columns}
        parts["table"] = table_modality(table, rows, categorical=categorical, where=tables[0].path)
    x, test_x = joined(parts, where, rows, mask=True)
    return assemble(
        tables[0].path.name.split(".")[0],
        (x, labels[rows[0]]),
        (test_x, labels[rows[1]]),
        classes=len(label_names),
        groups=None if owner is None else owner[rows[0]],
        test_groups=None if owner is None else owner[rows[1]],
        group_names=group_names,
        label_names=label_names,
        vocabulary=parts["text"].vocabulary if "text" in parts else (),
        feature_names=parts["table"].feature_names if "table" in parts else (),
    )


def _refuse_idle(
    text: str | None,
    picture: str | None,
    vector: str | None,
    columns: tuple[str, ...],
    folder: str | None,
    encoder: str | None,
    weights: str | None,
) -> None:
    if text is None and picture is None and vector is None and not columns:
        raise Invalid("multimodal needs at least one part: name columns with text, picture, vector or columns")
    if picture is None and (folder or encoder or weights):
        raise Invalid("multimodal.folder, picture_encoder and picture_weights need picture: the column of the files")
    if weights is not None and encoder is None:
        raise Invalid(f"picture_weights = {weights!r} needs picture_encoder: the model they are weights of")
