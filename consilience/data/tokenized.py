"""A data set of texts as token numbers, by the model's tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Any

from consilience.core import tree
from consilience.core.settings import Invalid
from consilience.data.dataset import Dataset, Texts
from consilience.models.tokenization import Head, Tokenization
from consilience.task.kinds import kind_named


def tokenized(data: Dataset, reader: Tokenization, *, head: Head = "sequence_classification", seed: int = 0) -> Dataset:
    """The same rows as {"input_ids": [N, L], "attention_mask": [N, L]}.

    A language model's targets are tokens and not the data's labels: of "causal_lm" the text itself, of "masked_lm" the
    tokens that are hidden.
    """
    assert isinstance(data.x, Texts)
    if head == "token_classification":
        raise Invalid(
            f"data = {data.name!r} has one label for a text, and model.head = 'token_classification' needs one for "
            "each token: use 'sequence_classification', or data with token numbers and a label for each"
        )
    rows: Any = reader((*data.x, *data.test_x))
    train, test = slice(0, len(data.x)), slice(len(data.x), None)
    if head == "sequence_classification":
        return dataclasses.replace(data, x=tree.rows(rows, train), test_x=tree.rows(rows, test))
    if head == "causal_lm":
        y, kind = reader.next_tokens(rows), "next_token"
    else:
        (rows, y), kind = reader.masked_tokens(rows, seed=seed), "tokens"
    tokens = len(reader.tokenizer())
    return dataclasses.replace(
        data,
        x=tree.rows(rows, train),
        y=y[train],
        test_x=tree.rows(rows, test),
        test_y=y[test],
        classes=tokens,
        label_names=(),
        kind=kind_named(kind).knowing(tokens),
    )
