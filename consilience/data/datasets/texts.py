"""Tables of labelled texts: any csv or tsv, Banking77 and Sentiment140."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from consilience.core.settings import Count, Invalid, OnlyWith, Whole
from consilience.data.dataset import Dataset, NewRows
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.labels import kept_groups, number_names
from consilience.data.datasets.prepare.splits import HeldOut, given_or_held_out
from consilience.data.datasets.prepare.texts import TOKENS, TextFeatures, TextForm, VocabularySize
from consilience.data.readers.files import chosen_file, read_text, source
from consilience.data.readers.tables import FileTable, read_json, read_table

HOW = "It is a .csv or .tsv (.gz) file whose first row names the columns."
BANKING77_HOME = "Its home is https://github.com/PolyAI-LDN/task-specific-datasets (banking_data)."
SENTIMENT140_HOME = "Its home is http://help.sentiment140.com/for-students."
SENTIMENT140_FILE = "training.1600000.processed.noemoticon.csv"
SENTIMENT140_HEADER = ("label", "id", "date", "query", "user", "text")


def text_table(
    *,
    train: str,
    test: str | None = None,
    text: str = "text",
    label: str = "label",
    group: str | None = None,
    min_group_rows: Annotated[Count, OnlyWith("group")] = 1,
    features: TextForm = "words",
    length: Annotated[Count, OnlyWith("features", TOKENS)] = 64,
    max_vocabulary: Annotated[VocabularySize, OnlyWith("features", TOKENS)] = 20000,
    ngram_features: Annotated[Count, OnlyWith("features", ("ngrams",))] = 4096,
    encoder: Annotated[str | None, OnlyWith("features", ("encoder",))] = None,
    test_fraction: Annotated[HeldOut, OnlyWith("test", (None,))] = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Texts and labels in a csv or tsv file; without a `test` file, test rows are drawn by the seed.

    `features`: "words" or "characters" (token numbers [N, length], 0 padding, 1 unknown), "ngrams" (hashed),
    or "encoder" (a frozen text encoder). `group` names a column whose values are the natural clients.
    """
    tables = [read_table(chosen_file(file, data_dir, how=HOW)) for file in (train, test) if file is not None]
    return _text_set(
        tables[0].path.name.split(".")[0],
        tables,
        TextFeatures(
            form=features, length=length, max_vocabulary=max_vocabulary, ngram_features=ngram_features, encoder=encoder
        ),
        columns=(text, label, group),
        min_group_rows=min_group_rows,
        split=(test_fraction, seed),
    )


def banking77(
    *,
    features: TextForm = "words",
    length: Annotated[Count, OnlyWith("features", TOKENS)] = 40,
    max_vocabulary: Annotated[VocabularySize, OnlyWith("features", TOKENS)] = 5000,
    ngram_features: Annotated[Count, OnlyWith("features", ("ngrams",))] = 4096,
    encoder: Annotated[str | None, OnlyWith("features", ("encoder",))] = None,
    data_dir: str | Path | None = None,
) -> Dataset:
    """10,003 + 3,080 questions to a bank, 77 intents (Casanueva et al. 2020)."""
    _, paths = source("banking77", data_dir, how=BANKING77_HOME).locate({"csv": ["train.csv", "test.csv"]})
    categories = paths[0].with_name("categories.json")
    return _text_set(
        "banking77",
        [read_table(path) for path in paths],
        TextFeatures(
            form=features, length=length, max_vocabulary=max_vocabulary, ngram_features=ngram_features, encoder=encoder
        ),
        columns=("text", "category", None),
        known=tuple(read_json(categories)) if categories.exists() else None,
    )


def sentiment140(
    *,
    by_user: bool = False,
    min_tweets: Annotated[Count, OnlyWith("by_user", (True,))] = 1,
    features: TextForm = "words",
    length: Annotated[Count, OnlyWith("features", TOKENS)] = 40,
    max_vocabulary: Annotated[VocabularySize, OnlyWith("features", TOKENS)] = 20000,
    ngram_features: Annotated[Count, OnlyWith("features", ("ngrams",))] = 4096,
    encoder: Annotated[str | None, OnlyWith("features", ("encoder",))] = None,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Tweets labelled by their emoticons, negative (0) or positive (1); `by_user` makes each author a group.

    Go et al. 2009. Reads the original 1.6 million rows or a `tweets.tsv` with columns label, user, text.
    """
    place = source("sentiment140", data_dir, folders=("sentiment140_sample",), how=SENTIMENT140_HOME)
    form, (path,) = place.locate({"tsv": ["tweets.tsv"], "original": [SENTIMENT140_FILE]})
    if form == "tsv":
        table = read_table(path)
    else:
        table = read_table(path, header=SENTIMENT140_HEADER, encoding="latin-1", strict=False)
    return _text_set(
        "sentiment140",
        [table],
        TextFeatures(
            form=features, length=length, max_vocabulary=max_vocabulary, ngram_features=ngram_features, encoder=encoder
        ),
        columns=("text", "label", "user" if by_user else None),
        min_group_rows=min_tweets,
        split=(test_fraction, seed),
        known=("0", "4"),
        label_names=("negative", "positive"),
    )


def _text_set(
    name: str,
    tables: Sequence[FileTable],
    featurise: TextFeatures,
    *,
    columns: tuple[str, str, str | None],
    min_group_rows: int = 1,
    split: tuple[float, int] = (0.2, 0),
    known: Sequence[str] | None = None,
    label_names: tuple[str, ...] | None = None,
) -> Dataset:
    """From one table (test rows drawn) or two (training and test); `columns` are text, label and group."""
    texts = [text for table in tables for text in table.column(columns[0])]
    labels, names = number_names(tables[0].column(columns[1]), where=tables[0].path, known=known)
    for table in tables[1:]:
        labels = np.append(labels, number_names(table.column(columns[1]), where=table.path, known=names)[0])
    given = len(tables[0]) if len(tables) > 1 else None
    owners: np.ndarray | None = None
    group_names: tuple[str, ...] = ()
    if columns[2] is not None:
        column = [owner for table in tables for owner in table.column(columns[2])]
        owners, group_names = number_names(column, where=tables[0].path)
        if min_group_rows > 1:
            kept = kept_groups(owners, min_group_rows, where=tables[0].path)
            given = int((kept < given).sum()) if given is not None else None
            texts, labels, column = [texts[row] for row in kept], labels[kept], [column[row] for row in kept]
            owners, group_names = number_names(column, where=tables[0].path)
    train, test = given_or_held_out(labels, given=given, fraction=split[0], seed=split[1], groups=owners)
    x, test_x, vocabulary = featurise([texts[row] for row in train], [texts[row] for row in test])
    return assemble(
        name,
        (x, labels[train]),
        (test_x, labels[test]),
        classes=len(names),
        groups=None if owners is None else owners[train],
        test_groups=None if owners is None else owners[test],
        group_names=group_names,
        label_names=label_names or names,
        vocabulary=vocabulary,
        read_rows=TextRows(column=columns[0], featurise=featurise, vocabulary=vocabulary),
    )


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """Reads new texts as the training texts were read."""

    column: str
    featurise: TextFeatures
    vocabulary: tuple[str, ...]

    def __call__(self, path: Path) -> NewRows:
        """The texts in the column of a csv, tsv or Parquet file; or the lines of a .txt file."""
        unused: tuple[str, ...]
        if path.suffix.lower() == ".txt":
            texts, unused = [line for line in read_text(path).splitlines() if line.strip()], ()
        else:
            table = read_table(path)
            texts, unused = table.column(self.column), tuple(name for name in table.columns if name != self.column)
        if not texts:
            raise Invalid(f"{path} has no texts")
        x = self.featurise.again(texts, self.vocabulary)
        return NewRows(x=x, names=tuple(str(row) for row in range(len(texts))), unused=unused)
