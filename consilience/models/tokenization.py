"""Texts as token numbers for a transformer: its own tokenizer, or bytes where there is none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core.kind import IGNORED
from consilience.core.rng import host
from consilience.core.settings import Invalid
from consilience.models.encoders import model_folder

Head = Literal["sequence_classification", "token_classification", "causal_lm", "masked_lm", "image_classification"]
BYTES = "bytes"
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
BYTE_VOCABULARY = len(SPECIAL) + 256
MASKED_SHARE = 0.15  # of the tokens of a text, as in BERT
Rows = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """How texts become rows: which tokenizer, and how many tokens at most."""

    source: str  # "bytes", a folder, an installed package or a hub name
    length: int

    def tokenizer(self) -> Any:
        """Hugging Face's tokenizer."""
        return _tokenizer(self.source)

    def __call__(self, texts: Sequence[str], *, pad_to: int | None = None) -> Rows:
        """{"input_ids": [N, L], "attention_mask": [N, L]}: cut at `length` tokens, padded on the right.

        L is the longest row's, or `pad_to`.
        """
        tokenizer = self.tokenizer()
        empty = next((row for row, text in enumerate(texts) if not isinstance(text, str) or not text.strip()), None)
        if empty is not None:
            raise Invalid(f"text {empty} is empty: remove the row, or give it a text")
        found = tokenizer(list(texts), truncation=True, max_length=self.length, padding=False)["input_ids"]
        longest = max(len(tokens) for tokens in found)
        if pad_to is not None and longest > pad_to:
            raise Invalid(f"pad_to = {pad_to} is less than the {longest} tokens of a text: give at least the length")
        longest = pad_to or longest
        ids = np.full((len(found), longest), tokenizer.pad_token_id, dtype=np.int64)
        live = np.zeros((len(found), longest), dtype=np.int64)
        for row, tokens in enumerate(found):
            ids[row, : len(tokens)] = tokens
            live[row, : len(tokens)] = 1
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(live)}

    def next_tokens(self, rows: Rows) -> Tensor:
        """The targets of a causal language model: the tokens themselves, each predicted from those before it."""
        return torch.where(rows["attention_mask"] == 1, rows["input_ids"], IGNORED)

    def masked_tokens(self, rows: Rows, *, seed: int) -> tuple[Rows, Tensor]:
        """For a masked language model: at least one token of each text hidden, and what is hidden.

        Of the hidden tokens 80 % are masked, 10 % are another token and 10 % stay, as in BERT; the draw depends on the
        seed and the row alone. In training other tokens are hidden in every step (`MaskedLanguageModel`).
        """
        tokenizer = self.tokenizer()
        if tokenizer.mask_token_id is None:
            raise Invalid(f"the tokenizer {self.source!r} has no mask token: head = 'masked_lm' needs one")
        ids, live = rows["input_ids"].numpy(), rows["attention_mask"].numpy()
        special = np.isin(ids, tokenizer.all_special_ids) | (live == 0)
        hidden, targets = ids.copy(), np.full_like(ids, IGNORED)
        for row in range(len(ids)):
            draw = host(seed, "masked tokens", row)
            order = np.where(special[row], 2.0, draw.random(ids.shape[1]))
            count = max(1, round(MASKED_SHARE * int((~special[row]).sum())))
            places = np.argsort(order, kind="stable")[:count]
            places = places[~special[row, places]]
            targets[row, places] = ids[row, places]
            how = draw.random(len(places))
            other = draw.integers(0, len(tokenizer), len(places))
            hidden[row, places] = np.where(
                how < 0.8, tokenizer.mask_token_id, np.where(how < 0.9, other, ids[row, places])
            )
        return {**rows, "input_ids": torch.from_numpy(hidden)}, torch.from_numpy(targets)


@functools.cache
def _tokenizer(source: str) -> Any:
    transformers = import_transformers()
    tokenizer = _byte_tokenizer() if source == BYTES else _loaded(transformers, source)
    if tokenizer.pad_token_id is None:  # decoders often have none; padding has no effect
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    tokenizer.padding_side = "right"
    return tokenizer


def _loaded(transformers: Any, source: str) -> Any:
    place, here = located(source)
    try:
        return transformers.AutoTokenizer.from_pretrained(place, local_files_only=here)
    except (OSError, ValueError, KeyError, ImportError) as problem:
        reason = str(problem).partition("\n")[0]
        raise Invalid(
            f'no tokenizer in {source!r} ({reason}): name one that has, model.tokenizer = "...", or use '
            f'model.tokenizer = "{BYTES}" with a model of at least {BYTE_VOCABULARY} tokens'
        ) from problem


def located(source: str) -> tuple[str | Path, bool]:
    """(where transformers finds it, whether that is this machine): a folder, an installed package, else a hub name."""
    try:
        return model_folder(source), True
    except FileNotFoundError:
        looks_like_folder = source.startswith((".", "/", "~")) or Path(source).expanduser().is_dir()
        if looks_like_folder:
            raise
        return source, False


def _byte_tokenizer() -> Any:
    """One token for every byte of UTF-8: it works for every text, and nothing is learnt from clients' texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {token: number for number, token in enumerate([*SPECIAL.values(), *alphabet])}
    core = Tokenizer(models.BPE(vocab=numbers, merges=[], unk_token=SPECIAL["unk_token"]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    first, last = SPECIAL["cls_token"], SPECIAL["sep_token"]
    core.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=[(first, numbers[first]), (last, numbers[last])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=first, eos_token=last, **SPECIAL)


def import_transformers() -> Any:
    """Import transformers; the error says what to install."""
    try:
        import transformers
    except ImportError as problem:
        raise Invalid(
            'model = "hugging_face" needs transformers, which is not installed: pip install "consilience[text]"'
        ) from problem
    return transformers
