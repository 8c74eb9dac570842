"""Low-rank adapters by PEFT: which layers get them, checked before anything is built."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from consilience.core.settings import Invalid, nearest

TASKS = {"sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS", "causal_lm": "CAUSAL_LM"}
ALL_LINEAR = "all-linear"
USUAL = {"distilbert": ("q_lin", "v_lin"), "vit": ("query", "value", "q_proj", "v_proj")}
"""Names of the query and value layers, as PEFT has them for other models."""


def with_adapters(
    model: nn.Module,
    *,
    head: str,
    heads: Sequence[str],
    rank: int,
    alpha: float,
    targets: Sequence[str] | None,
    dropout: float,
) -> nn.Module:
    """PEFT's model: adapters beside the target layers, whose own weights are frozen; `heads` are trained as they are.

    An adapter adds alpha / rank * B A x to a layer, with B = 0 at the start (Hu et al. 2021).
    """
    peft = _import_peft()
    names = _targets(peft, model, targets)
    _refuse_large_rank(model, names, rank)
    settings = peft.LoraConfig(
        task_type=TASKS.get(head),
        r=rank,
        lora_alpha=alpha,
        target_modules=names if isinstance(names, str) else list(names),
        lora_dropout=dropout,
        modules_to_save=list(heads) or None,
        fan_in_fan_out=any(type(layer).__name__ == "Conv1D" for layer in _chosen(model, names).values()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers
        return peft.get_peft_model(model, settings)


def _targets(peft: Any, model: nn.Module, targets: Sequence[str] | None) -> Sequence[str] | str:
    if targets is None:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

        settings: Any = model.config
        family = settings.model_type
        known = [name for name in {**USUAL, **KNOWN}.get(family, ()) if name in _endings(model)]
        if not known:
            raise Invalid(
                f"PEFT has no usual targets for a model of type {family!r}: name layers in model.targets, such as "
                f"{', '.join(_endings(model)[:6])}, or use model.targets = ['{ALL_LINEAR}']"
            )
        return known
    if list(targets) == [ALL_LINEAR]:
        return ALL_LINEAR
    known = _endings(model)
    for target in targets:
        if not _chosen(model, [target]):
            raise Invalid(
                f"model.targets has {target!r}, which is no linear layer of this model{nearest(target, known)}; "
                f"it has {', '.join(known)}"
            )
    return tuple(targets)


def _linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _endings(model: nn.Module) -> list[str]:
    """The last parts of the names of linear layers, which is what targets are compared with."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name, layer in model.named_modules() if _linear(layer)))


def _chosen(model: nn.Module, targets: Sequence[str] | str) -> dict[str, nn.Module]:
    every = targets == ALL_LINEAR
    return {
        name: layer
        for name, layer in model.named_modules()
        if _linear(layer) and (every or any(name == t or name.endswith(f".{t}") for t in targets))
    }


def _refuse_large_rank(model: nn.Module, targets: Sequence[str] | str, rank: int) -> None:
    for name, layer in _chosen(model, targets).items():
        shape: Any = layer.weight.shape
        smallest = min(shape)
        if rank > smallest:
            raise Invalid(
                f"model.rank = {rank} is above the size of {name} ({' x '.join(map(str, shape))}): "
                f"use at most {smallest}, or other targets"
            )


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as problem:
        raise Invalid(
            'model.train = "lora" needs PEFT, which is not installed: pip install "consilience[text]"'
        ) from problem
    return peft
