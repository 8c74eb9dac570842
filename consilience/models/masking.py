"""Hidden tokens of a masked language model, drawn anew in every step of training."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from consilience.core import rng
from consilience.core.kind import IGNORED
from consilience.core.plans import Batch
from consilience.layers import samplers
from consilience.models.hugging_face import HuggingFace
from consilience.models.tokenization import MASKED_SHARE, Tokenization

SALT = 2**42  # a stream of its own, different from those of layers, modules and augmentation


class MaskedLanguageModel(HuggingFace):
    """Predicts masked tokens; in training they are drawn from the batch's key, and so differ in every round.

    Rows come with hidden tokens and, as targets, what is hidden there: tests and passes without training use these.
    """

    tokenization: Tokenization

    def training_batch(self, batch: Batch) -> Batch:
        """The batch with other tokens hidden: 15 %, of which 80 % are masked, 10 % replaced and 10 % left (BERT)."""
        special, mask, size = _numbers(self.tokenization)
        x: dict[str, Any] = batch.x
        tokens = torch.where(batch.y == IGNORED, x["input_ids"], batch.y)  # [B, L], nothing hidden
        free = x["attention_mask"] != 0
        for number in special:
            free = free & (tokens != number)
        place, how, other = (samplers.unit(rng.fold(batch.key, SALT + n), tokens.shape) for n in range(3))
        order = torch.where(free, place, 2.0).argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
        count = (MASKED_SHARE * free.sum(-1, keepdim=True)).round().clamp(min=1)
        chosen = free & (order < count)
        drawn = (other * size).to(tokens.dtype)
        shown = torch.where(how < 0.8, mask, torch.where(how < 0.9, drawn, tokens))
        hidden: Tensor = torch.where(chosen, shown, tokens)
        return batch._replace(x={**x, "input_ids": hidden}, y=torch.where(chosen, tokens, IGNORED))


@functools.cache
def _numbers(tokenization: Tokenization) -> tuple[tuple[int, ...], int, int]:
    """(special tokens, the mask, how many tokens there are); asking the tokenizer takes longer than a small step."""
    tokenizer = tokenization.tokenizer()
    return tuple(tokenizer.all_special_ids), int(tokenizer.mask_token_id), len(tokenizer)
