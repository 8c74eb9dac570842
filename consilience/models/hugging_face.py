"""Transformers of Hugging Face: pre-trained or from a config, trained whole, by the head, or by low-rank adapters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from consilience.core.settings import Count, Decay, Invalid, Positive
from consilience.models.arguments import factory
from consilience.models.lora import with_adapters
from consilience.models.tokenization import BYTES, Head, Tokenization, import_transformers, located

CLASSES = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "image_classification": "AutoModelForImageClassification",
}
CLASSIFIES = ("sequence_classification", "token_classification", "image_classification")
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
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    def forward(self, x: Any) -> Tensor:
        return self.core(**self._inputs(x)).logits

    def tokenize(self, texts: Sequence[str], *, pad_to: int | None = None) -> dict[str, Tensor]:
        """Texts as this model reads them, padded to the longest of them or to `pad_to` tokens."""
        if self.tokenization is None:
            raise Invalid("this model has no tokenizer: build it with model.tokenizer, or give token numbers")
        return self.tokenization(texts, pad_to=pad_to)

    def save_pretrained(self, folder: str | Path, *, label_names: Sequence[str] = (), merged: bool = True) -> None:
        """A folder that transformers loads, with the tokenizer; adapters merged into the weights, or as PEFT's own."""
        model = copy.deepcopy(self.model)
        adapted = hasattr(model, "peft_config")
        core = model.get_base_model() if adapted else model
        if label_names:
            core.config.id2label = dict(enumerate(label_names))
            core.config.label2id = {name: number for number, name in enumerate(label_names)}
        with _quiet(import_transformers()):
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
        # with four axes, transformers takes a mask as it is and does not look at its values
        return {**given, "attention_mask": mask}


class HuggingFaceClassifier(HuggingFace):
    """With one decision for a row: `head(features(x))`."""

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
        if found.dim() == 3:  # decoders decide at every token, and take the last
            found = _at_decision(found, self.head(found), logits)
        return found


def _at_decision(features: Tensor, each: Tensor, logits: Tensor) -> Tensor:
    """Of [B, T, size], the place whose logits were taken."""
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
    rank: Count = 8,
    alpha: Positive = 16.0,
    targets: tuple[str, ...] | None = None,
    dropout: Decay = 0.0,
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
    settings = _settings(weights, config, inputs, classes, head, tokenization, vocabulary)
    model = _built(weights, settings, head)
    _refuse_misfit(model, inputs, tokenization, vocabulary)
    heads = _head_names(model) if head in CLASSIFIES else []
    if train == "lora":
        model = with_adapters(model, head=head, heads=heads, rank=rank, alpha=alpha, targets=targets, dropout=dropout)
    elif train == "head":
        _freeze_below(model, heads, head)
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


def _settings(
    weights: str | None,
    config: Mapping[str, Any] | None,
    inputs: Any,
    classes: int,
    head: str,
    tokenization: Tokenization | None,
    vocabulary: int | None,
) -> Any:
    """Transformers' config of the model."""
    transformers = import_transformers()
    given = dict(config or {})
    if head in CLASSIFIES:
        given["num_labels"] = classes
    if weights is not None:
        place, here = located(weights)
        try:
            with _quiet(transformers):
                return transformers.AutoConfig.from_pretrained(place, local_files_only=here, **given)
        except (OSError, ValueError) as problem:
            raise Invalid(_not_found(weights, problem)) from problem
    family = given.pop("model_type", None)
    if family is None:
        raise Invalid(
            "model.weights is missing: name a folder, an installed package or a hub model, or describe one with random "
            'weights by model.config = {model_type = "bert", hidden_size = 32, ...}'
        )
    if head == "image_classification" and isinstance(inputs, (tuple, list)) and len(inputs) == 3:
        given = {"num_channels": inputs[0], "image_size": inputs[1], **given}
    elif tokenization is not None:
        tokens = tokenization.tokenizer()
        given = {"vocab_size": len(tokens), "pad_token_id": tokens.pad_token_id, **_ends(tokens), **given}
    elif vocabulary is not None:
        none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        given = {"vocab_size": vocabulary, **none, **given}
    try:
        return transformers.AutoConfig.for_model(family, **given)
    except (ValueError, KeyError, TypeError) as problem:
        reason = str(problem).partition("\n")[0][:200]
        raise Invalid(f"model.config = {dict(config or {})!r} is no config of transformers: {reason}") from problem


def _ends(tokens: Any) -> dict[str, int]:
    return {"bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id}


def _built(weights: str | None, settings: Any, head: str) -> nn.Module:
    transformers = import_transformers()
    make = getattr(transformers, CLASSES[head])
    try:
        if weights is None:
            return make.from_config(settings)
        place, here = located(weights)
        with _quiet(transformers):
            # safetensors only and no remote code: reading a model must not run code from its files
            model, found = make.from_pretrained(
                place,
                config=settings,
                local_files_only=here,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # a head for other classes is made anew
                output_loading_info=True,
            )
        _refuse_partial(weights, model, [*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])])
        return model.float()  # whatever the file's type
    except ValueError as problem:
        if "Unrecognized configuration class" not in str(problem):
            raise Invalid(_not_found(weights or "config", problem)) from problem
        raise Invalid(
            f"a model of type {settings.model_type!r} has no head for {head}: choose another model.head "
            f"({', '.join(CLASSES)}), or another model"
        ) from problem
    except OSError as problem:
        raise Invalid(_not_found(str(weights), problem)) from problem


class _quiet:
    """Without transformers' report of which weights are new: a head always is."""

    def __init__(self, transformers: Any) -> None:
        self._logging = transformers.logging

    def __enter__(self) -> None:
        self._before = self._logging.get_verbosity(), self._logging.is_progress_bar_enabled()
        self._logging.set_verbosity(logging.ERROR)
        self._logging.disable_progress_bar()

    def __exit__(self, *_: Any) -> None:
        self._logging.set_verbosity(self._before[0])
        if self._before[1]:
            self._logging.enable_progress_bar()


def _not_found(weights: str, problem: Exception) -> str:
    reason = str(problem).partition("\n")[0][:200]
    return (
        f"model.weights = {weights!r} cannot be loaded ({reason}): name a folder saved by save_pretrained with "
        "safetensors, an installed package that holds one, or a model of the hub that this machine can reach"
    )


def _refuse_partial(weights: str, model: nn.Module, absent: Sequence[str]) -> None:
    """Refuse weights that are not those of this architecture: only a head may be new."""
    prefix, heads = model.base_model_prefix, _head_names(model)  # type: ignore[union-attr]
    lost = [name for name in absent if name.startswith(f"{prefix}.") and not any(f".{h}." in name for h in heads)]
    if lost:
        raise Invalid(
            f"model.weights = {weights!r} lacks {lost[0]!r} of the right size and {len(lost) - 1} more: it is another "
            "model; leave out what model.config changes of its sizes"
        )


def _refuse_misfit(model: Any, inputs: Any, tokenization: Tokenization | None, vocabulary: int | None) -> None:
    config = model.config
    if isinstance(inputs, (tuple, list)) and len(inputs) == 3:
        channels, side = getattr(config, "num_channels", inputs[0]), getattr(config, "image_size", inputs[1])
        sides = tuple(side) if isinstance(side, (tuple, list)) else (side, side)
        if (channels, *sides) != tuple(inputs):
            raise Invalid(
                f"the model reads pictures of {channels} x {sides[0]} x {sides[1]}, and the data have "
                f"{' x '.join(map(str, inputs))}: resize the data, or choose another model"
            )
        return
    embedding = model.get_input_embeddings()
    room = getattr(embedding, "num_embeddings", None)
    tokens = vocabulary if tokenization is None else len(tokenization.tokenizer())
    if tokens is not None and room is not None and tokens > room:
        whose = "the data" if tokenization is None else f"the tokenizer {tokenization.source!r}"
        raise Invalid(
            f"{whose} has {tokens} tokens, and the model's embedding {room}: they do not belong together; "
            "use the model's own tokenizer"
        )
    positions = _positions(config)
    shape = inputs.get("input_ids", ()) if isinstance(inputs, Mapping) else inputs
    longest = shape[0] if isinstance(shape, (tuple, list)) and len(shape) == 1 else 0
    if positions is not None and longest > positions:
        raise Invalid(
            f"rows have {longest} tokens, and the model has {positions} positions: set model.length to at most "
            f"{positions}, or cut the data"
        )


def _positions(config: Any) -> int | None:
    found = getattr(config, "max_position_embeddings", None)
    # RoBERTa counts positions from behind its padding token
    offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
    return None if found is None else int(found) - offset


def _head_names(model: nn.Module) -> list[str]:
    """The modules between the encoder's states and the logits: all outside the base model, and its pooler."""
    base = getattr(model, model.base_model_prefix, None)  # type: ignore[call-overload]
    if base is None or base is model:
        return []
    names = [name for name, part in model.named_children() if part is not base and any(True for _ in part.parameters())]
    pooler = getattr(base, "pooler", None)
    return [*names, "pooler"] if isinstance(pooler, nn.Module) else names


def _freeze_below(model: nn.Module, heads: Sequence[str], head: str) -> None:
    parts = [part for name, part in model.named_modules() if name.rpartition(".")[2] in heads]
    trained = {id(p) for part in parts for p in part.parameters()}
    if not trained:
        raise Invalid(
            f"model.train = 'head' leaves nothing to train: the {head} head shares its weights with the embedding; "
            "use model.train = 'lora' or 'all'"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
