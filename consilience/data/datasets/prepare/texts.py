"""Text to features: token numbers, hashed n-grams, or the output of a frozen encoder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import Invalid, Range
from consilience.data.dataset import Texts

NumericForm = Literal["words", "characters", "ngrams", "encoder"]
TextForm = Literal["words", "characters", "ngrams", "encoder", "raw"]
TOKENS = ("words", "characters")  # forms that give token numbers
VocabularySize = Annotated[int, Range(least=3)]
"""The size of the vocabulary, including the padding and unknown tokens."""
Split = Callable[[str], Sequence[str]]
PADDING, UNKNOWN = "<pad>", "<unk>"  # numbers 0 and 1
WORD = re.compile(r"\w+(?:'\w+)?|[^\w\s]")


@dataclass(frozen=True, kw_only=True)
class TextFeatures:
    """How texts become features: token numbers [N, length], hashed n-grams or encoder output [N, features].

    "raw" texts stay texts, which the model's tokenizer reads.
    """

    form: TextForm
    length: int
    max_vocabulary: int
    ngram_features: int
    encoder: str | None

    def __call__(self, train: Sequence[str], test: Sequence[str]) -> tuple[Any, Any, tuple[str, ...]]:
        """(training features, test features, vocabulary); the vocabulary is learnt from training texts only."""
        if self.form == "raw":
            return Texts(train), Texts(test), ()
        if self.form == "ngrams":
            from consilience.models.encoders import hashed_ngrams

            x, test_x = (hashed_ngrams(texts, features=self.ngram_features) for texts in (train, test))
            return x, test_x, ()
        if self.form == "encoder":
            if self.encoder is None:
                raise Invalid("features = 'encoder' needs the option encoder: the name or folder of a text encoder")
            from consilience.models.encoders import encode_texts

            x, test_x = (encode_texts(texts, encoder=self.encoder) for texts in (train, test))
            return x, test_x, ()
        split: Split = split_words if self.form == "words" else list
        vocabulary = build_vocabulary(train, split, most=self.max_vocabulary)
        x, test_x = (token_numbers(texts, split, vocabulary, length=self.length) for texts in (train, test))
        return x, test_x, vocabulary

    def again(self, texts: Sequence[str], vocabulary: tuple[str, ...]) -> Any:
        """Further texts as features, with the learnt vocabulary."""
        if self.form in ("words", "characters"):
            split: Split = split_words if self.form == "words" else list
            return token_numbers(texts, split, vocabulary, length=self.length)
        return self(texts, texts[:1])[0]


def split_words(text: str) -> list[str]:
    """Lower-case words and punctuation marks."""
    return WORD.findall(text.lower())


def build_vocabulary(texts: Sequence[str], split: Split, *, most: int) -> tuple[str, ...]:
    """The commonest tokens in order of frequency, after the padding and unknown tokens; `most` counts those two."""
    counts = Counter(token for text in texts for token in split(text))
    common = sorted(counts, key=lambda token: (-counts[token], token))
    return (PADDING, UNKNOWN, *common[: max(most - 2, 0)])


def token_numbers(texts: Sequence[str], split: Split, vocabulary: Sequence[str], *, length: int) -> Tensor:
    """Texts as numbers [N, length] int64: cut at `length`, padded with 0, unknown tokens 1."""
    number = {token: index for index, token in enumerate(vocabulary)}
    numbers = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        tokens = [number.get(token, 1) for token in split(text)[:length]]
        numbers[row, : len(tokens)] = tokens
    return torch.from_numpy(numbers)
