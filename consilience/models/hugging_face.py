"""Transformers of Hugging Face: pre-trained or from a config, trained whole, by the head, or by low-rank adapters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from consilience.core.settings import Count, Decay, Invalid, OnlyWith, Positive
from consilience.models.arguments import factory
from consilience.models.lean import make_lean
from consilience.models.lora import with_adapters
from consilience.models.pretrained import CLASSIFIES, Quiet, built, freeze_below, head_names, refuse_misfit, settings_of
from consilience.models.tokenization import BYTES, Head, Tokenization, import_transformers

Trained = Literal["all", "head", "lora"]


class HuggingFace(nn.Module):
    """A model of transformers or PEFT as a model of one input: token numbers, pictures, or a dict of named inputs.

    The output are the model's logits: [B, classes], or [B, tokens, classes] of a head that decides at every token.
    """

    def __init__(self, model: nn.Module, tokenization: Tokenization | None = None) -> None:
        super().__init__()
        self.model, self.tokenization = model, tokenization
        self.core.config.use_cache = False
        self._causal = any(getattr(part, "is_causal", False) for part in self.core.modules())

    @property
    def core(self) -> Any:
        """The model of transformers itself, below PEFT's."""
        return _core(self.model)

    def forward(self, x: Any) -> Tensor:
        return self.core(**self._inputs(x)).logits

    def compute_less(self) -> None:
        """Remove, in place, computation that the logits do not depend on, in the engine's copy of the model."""
        make_lean(self.model)

    def tokenize(self, texts: Sequence[str], *, pad_to: int | None = None) -> dict[str, Tensor]:
        """Texts as this model reads them, padded to the longest of them or to `pad_to` tokens."""
        if self.tokenization is None:
            raise Invalid("this model has no tokenizer: build it with model.tokenizer, or give token numbers")
        return self.tokenization(texts, pad_to=pad_to)

    def save_pretrained(self, folder: str | Path, *, label_names: Sequence[str] = (), merged: bool = True) -> None:
        """A folder that transformers loads, with the tokenizer; adapters merged into the weights, or as PEFT's own."""
        model: Any = copy.deepcopy(self.model)
        adapted, core = hasattr(model, "peft_config"), _core(model)
        if label_names:
            core.config.id2label = dict(enumerate(label_names))
            core.config.label2id = {name: number for number, name in enumerate(label_names)}
        with Quiet(import_transformers()):
            if adapted and merged:
                model = model.merge_and_unload()
            model.save_pretrained(folder)
            if adapted and not merged:
                core.config.save_pretrained(folder)
        self.save_tokenizer(folder)

    def save_tokenizer(self, folder: str | Path) -> None:
        """The tokenizer's files, where the model has one."""
        if self.tokenization is not None:
            self.tokenization.tokenizer().save_pretrained(folder)

    def _inputs(self, x: Any) -> dict[str, Any]:
        if isinstance(x, Tensor):
            x = {"pixel_values": x} if x.is_floating_point() else {"input_ids": x}
        if "pixel_values" in x:
            return dict(x)
        given, mask = dict(x), x.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, None, :] != 0
        if self._causal:
            length = x["input_ids"].shape[-1]
            causal = torch.ones(length, length, dtype=torch.bool, device=x["input_ids"].device).tril()[None, None]
            mask = causal if mask is None else mask & causal
        # transformers uses a mask with four axes as it is, without reading its values
        return {**given, "attention_mask": mask}


def _core(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


class HuggingFaceClassifier(HuggingFace):
    """A classifier with one output per row: `head(features(x))`."""

    @property
    def head(self) -> nn.Linear:
        """The last linear layer."""
        layers = [
            part
            for name, part in self.model.named_modules()
            if isinstance(part, nn.Linear) and "original_module" not in name and "lora_" not in name
        ]
        return layers[-1]

    def features(self, x: Any) -> Tensor:
        """[B, size]: what the last linear layer reads."""
        seen: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            logits = self.core(**self._inputs(x)).logits
        finally:
            hook.remove()
        found = seen[-1]
        if found.dim() == 3:  # decoders compute logits at every token and use the last
            found = _at_decision(found, self.head(found), logits)
        return found


def _at_decision(features: Tensor, each: Tensor, logits: Tensor) -> Tensor:
    """From [B, T, size], the features at the token whose logits were used."""
    distance = (each - logits.unsqueeze(1)).abs().sum(-1)
    place = distance.argmin(1)
    return features.gather(1, place[:, None, None].expand(-1, 1, features.shape[-1])).squeeze(1)


@factory
def hugging_face(
    *,
    inputs: Any,
    classes: Count,
    weights: str | None = None,
    config: Mapping[str, Any] | None = None,
    head: Head = "sequence_classification",
    train: Trained = "all",
    rank: Annotated[Count, OnlyWith("train", ("lora",))] = 8,
    alpha: Annotated[Positive, OnlyWith("train", ("lora",))] = 16.0,
    targets: Annotated[tuple[str, ...] | None, OnlyWith("train", ("lora",))] = None,
    dropout: Annotated[Decay, OnlyWith("train", ("lora",))] = 0.0,
    tokenizer: str | None = None,
    length: Count = 128,
    vocabulary: Count | None = None,
) -> nn.Module:
    """A transformer with a head: `weights` names a folder, an installed package or a hub model; without it, `config`
    describes one with random weights, such as {model_type = "bert", hidden_size = 32, ...}.

    `train`: "all" weights, the "head" alone, or "lora" adapters (`rank`, `alpha`, `targets`, `dropout`) and the head.
    Texts (data.features = "raw") are cut at `length` tokens of the model's `tokenizer`: the weights' own, or bytes.
    """
    tokenization = _tokenization(weights, tokenizer, length, head, texts=isinstance(inputs, Mapping))
    settings = settings_of(weights, config, inputs, classes, head, tokenization, vocabulary)
    model = built(weights, settings, head)
    refuse_misfit(model, inputs, tokenization, vocabulary)
    heads = head_names(model) if head in CLASSIFIES else []
    if train == "lora":
        model = with_adapters(model, head=head, heads=heads, rank=rank, alpha=alpha, targets=targets, dropout=dropout)
    elif train == "head":
        freeze_below(model, heads, head)
    if head == "masked_lm" and tokenization is not None:
        from consilience.models.masking import MaskedLanguageModel

        return MaskedLanguageModel(model, tokenization)
    kind = HuggingFaceClassifier if head in ("sequence_classification", "image_classification") else HuggingFace
    return kind(model, tokenization)


def tokenization_of(
    *,
    weights: str | None = None,
    head: Head = "sequence_classification",
    tokenizer: str | None = None,
    length: int = 128,
    **_: Any,
) -> Tokenization:
    """How a model with these options reads texts."""
    found = _tokenization(weights, tokenizer, length, head, texts=True)
    if found is None:
        raise Invalid(f"model.head = {head!r} reads pictures, and the data are texts")
    return found


hugging_face.reads_texts = tokenization_of  # type: ignore[attr-defined]


def _tokenization(
    weights: str | None, tokenizer: str | None, length: int, head: str, *, texts: bool
) -> Tokenization | None:
    if head == "image_classification" or (not texts and tokenizer is None):
        return None
    return Tokenization(source=tokenizer or weights or BYTES, length=length)
