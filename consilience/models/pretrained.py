"""Loads models of transformers by name or config, and checks that they fit the data and the head."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from consilience.core.settings import Invalid
from consilience.models.tokenization import Tokenization, import_transformers, located

CLASSES = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "image_classification": "AutoModelForImageClassification",
}
CLASSIFIES = ("sequence_classification", "token_classification", "image_classification")


def settings_of(
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
            with Quiet(transformers):
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


def built(weights: str | None, settings: Any, head: str) -> nn.Module:
    """The model: weights from where the name says, or random ones."""
    transformers = import_transformers()
    make = getattr(transformers, CLASSES[head])
    try:
        if weights is None:
            return make.from_config(settings)
        place, here = located(weights)
        with Quiet(transformers):
            # safetensors only and no remote code: reading a model must not run code from its files
            model, found = make.from_pretrained(
                place,
                config=settings,
                local_files_only=here,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # a head with another number of classes is initialised
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


class Quiet:
    """Silences transformers' report of newly initialised weights: a head always is one."""

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
    prefix, heads = model.base_model_prefix, head_names(model)
    lost = [name for name in absent if name.startswith(f"{prefix}.") and not any(f".{h}." in name for h in heads)]
    if lost:
        raise Invalid(
            f"model.weights = {weights!r} lacks {lost[0]!r} of the right size and {len(lost) - 1} more: it is another "
            "model; leave out what model.config changes of its sizes"
        )


def refuse_misfit(model: Any, inputs: Any, tokenization: Tokenization | None, vocabulary: int | None) -> None:
    """Refuse data whose pictures, tokens or lengths the model cannot read."""
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


def head_names(model: nn.Module) -> list[str]:
    """The modules between the encoder's states and the logits: all outside the base model, and its pooler."""
    base = getattr(model, model.base_model_prefix, None)  # type: ignore[call-overload]
    if base is None or base is model:
        return []
    names = [name for name, part in model.named_children() if part is not base and any(True for _ in part.parameters())]
    pooler = getattr(base, "pooler", None)
    return [*names, "pooler"] if isinstance(pooler, nn.Module) else names


def freeze_below(model: nn.Module, heads: Sequence[str], head: str) -> None:
    """Freeze all parameters but the heads'."""
    parts = [part for name, part in model.named_modules() if name.rpartition(".")[2] in heads]
    trained = {id(p) for part in parts for p in part.parameters()}
    if not trained:
        raise Invalid(
            f"model.train = 'head' leaves nothing to train: the {head} head shares its weights with the embedding; "
            "use model.train = 'lora' or 'all'"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
