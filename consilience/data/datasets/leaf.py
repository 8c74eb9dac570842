"""LEAF's federations: FEMNIST by writer, Shakespeare by role, Sentiment140 by author, or plain features."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from consilience.core.settings import Count, Invalid, OnlyWith
from consilience.data.dataset import Dataset
from consilience.data.datasets.mnist import EMNIST_NAMES
from consilience.data.datasets.prepare.assemble import assemble, refuse_nonfinite
from consilience.data.datasets.prepare.labels import class_numbers
from consilience.data.datasets.prepare.texts import TOKENS, TextFeatures, TextForm, VocabularySize
from consilience.data.readers.files import chosen_source
from consilience.data.readers.leaf import read_leaf

HOW = (
    "Make it with LEAF's preprocess.sh (https://github.com/TalwalkarLab/leaf): all_data's train and test folders of "
    ".json files."
)
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's 80 characters
PLACE = {character: place for place, character in enumerate(ALPHABET)}
SENTIMENT = {"0": 0, "1": 1, "4": 1}
NAMES: dict[str, tuple[str, ...]] = {
    "femnist": EMNIST_NAMES["byclass"],
    "shakespeare": tuple(ALPHABET),
    "sent140": ("negative", "positive"),
    "features": (),
}
Pair = tuple[np.ndarray, np.ndarray]
Convert = Callable[[list[Any], list[Any], str], Pair]


def leaf(
    *,
    folder: str,
    task: Literal["femnist", "shakespeare", "sent140", "features"],
    min_samples: Count = 1,
    max_users: Count | None = None,
    text: TextForm = "words",
    length: Annotated[Count, OnlyWith("text", TOKENS)] = 25,
    max_vocabulary: Annotated[VocabularySize, OnlyWith("text", TOKENS)] = 20000,
    ngram_features: Annotated[Count, OnlyWith("text", ("ngrams",))] = 4096,
    encoder: Annotated[str | None, OnlyWith("text", ("encoder",))] = None,
    data_dir: str | Path | None = None,
) -> Dataset:
    """LEAF JSON in `folder`/train and `folder`/test (Caldas et al. 2018), users as groups.

    Uses the first `max_users` users with at least `min_samples` training samples; `text` and what
    follows it are for sent140. Shakespeare's numbers are LEAF's own, places in its 80-character alphabet.
    """
    top = chosen_source(folder, data_dir, how=HOW)
    _, paths = top.locate({"folders": ["train/", "test/"]})
    train = _read_users(paths[0], CONVERT[task], least=min_samples, most=max_users)
    test = _read_users(paths[1], CONVERT[task], only=train)
    if not train or not test:
        raise Invalid(f"{paths[0]} has no user with {min_samples} samples who is also in {paths[1]}")
    (x, y, owners), (test_x, test_y, test_owners) = (_join(part, tuple(train)) for part in (train, test))
    names, vocabulary = NAMES[task], tuple(ALPHABET) if task == "shakespeare" else ()
    if task == "sent140":
        featurise = TextFeatures(
            form=text, length=length, max_vocabulary=max_vocabulary, ngram_features=ngram_features, encoder=encoder
        )
        x, test_x, vocabulary = featurise(x.tolist(), test_x.tolist())
    return assemble(
        f"leaf_{task}",
        (x, y),
        (test_x, test_y),
        classes=len(names) or 1 + int(max(y.max(), test_y.max())),
        groups=owners,
        test_groups=test_owners,
        group_names=tuple(train),
        label_names=names,
        vocabulary=vocabulary,
    )


def _read_users(
    folder: Path, convert: Convert, *, least: int = 1, most: int | None = None, only: Collection[str] | None = None
) -> dict[str, Pair]:
    """User -> (x, y), converted file by file because JSON numbers take ten times the memory."""
    users: dict[str, Pair] = {}
    for user, x, y, path in read_leaf(folder):
        if len(users) == most:
            break
        if len(y) >= least and (only is None or user in only):
            if user in users:
                raise Invalid(f"{path}: user {user!r} was in an earlier file already")
            users[user] = convert(x, y, f"{path}, user {user!r}")
    return users


def _join(users: dict[str, Pair], order: tuple[str, ...]) -> tuple[Any, np.ndarray, np.ndarray]:
    """Features, labels and owner numbers of all users, in one order for training and test."""
    present = [(number, users[user]) for number, user in enumerate(order) if user in users]
    first = present[0][1][0].shape[1:]
    for number, (x, _) in present:
        if x.shape[1:] != first:
            raise Invalid(f"user {order[number]!r} has rows of shape {x.shape[1:]} where others have {first}")
    owners = np.repeat([number for number, _ in present], [len(pair[1]) for _, pair in present])
    return np.concatenate([pair[0] for _, pair in present]), np.concatenate([pair[1] for _, pair in present]), owners


def _features(x: list[Any], y: list[Any], where: str) -> Pair:
    try:
        values, labels = np.array(x, np.float32), np.array(y)
    except (ValueError, TypeError) as problem:
        raise Invalid(f"{where}: x must be rows of numbers of one length ({problem})") from problem
    if values.ndim != 2:
        raise Invalid(f"{where}: x must be rows of numbers, not of shape {values.shape}")
    refuse_nonfinite(values, where)
    if labels.dtype.kind not in "iuf" or not np.array_equal(labels, np.round(labels)):
        raise Invalid(f"{where}: y must be whole numbers")
    return values, labels.astype(np.int64)


def _pictures(x: list[Any], y: list[Any], where: str) -> Pair:
    """784 numbers -> a picture (1, 28, 28), ink dark on white as LEAF has it."""
    values, labels = _features(x, y, where)
    if values.shape[1] != 28 * 28:
        raise Invalid(f"{where}: a FEMNIST picture has 784 numbers, not {values.shape[1]}")
    return values.reshape(-1, 1, 28, 28), class_numbers(labels, rows=len(values), classes=62, where=where)


def _characters(x: list[Any], y: list[Any], where: str) -> Pair:
    """Strings of equal length -> places in LEAF's alphabet."""
    lengths = {len(text) if isinstance(text, str) else -1 for text in x}
    if len(lengths) != 1 or -1 in lengths or any(not isinstance(c, str) or len(c) != 1 for c in y):
        raise Invalid(f"{where}: x must be strings of one length and y single characters")
    unknown = set().union(*x, y) - set(ALPHABET)
    if unknown:
        raise Invalid(f"{where}: the character {min(unknown)!r} is not in LEAF's alphabet")
    numbers = np.array([[PLACE[character] for character in text] for text in x], np.int64)
    return numbers, np.array([PLACE[character] for character in y], np.int64)


def _tweets(x: list[Any], y: list[Any], where: str) -> Pair:
    """[id, date, query, author, text] -> the text; 0 is negative, 4 (or 1) positive."""
    texts = [row[-1] if isinstance(row, list) and row else row for row in x]
    labels = [SENTIMENT.get(str(label)) for label in y]
    if not all(isinstance(text, str) for text in texts) or None in labels:
        raise Invalid(f"{where}: x must be [id, date, query, author, text] and y 0, 1 or 4")
    return np.array(texts, dtype=object), np.array(labels, np.int64)


CONVERT: dict[str, Convert] = {
    "femnist": _pictures,
    "shakespeare": _characters,
    "sent140": _tweets,
    "features": _features,
}
