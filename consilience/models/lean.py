"""Transformers that compute only what their logits depend on: the same logits from fewer operations.

An engine applies it to its own copy of a model; the user's module and exported models are unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.layers.exact import KeyedDropout

FIRST_TOKEN = ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "ElectraLayer", "CamembertLayer")
"""Layers of encoders whose classifier reads the first token alone."""


def make_lean(model: Any) -> None:
    """Change, in place, how a model of transformers or PEFT computes its logits."""
    core = model.get_base_model() if hasattr(model, "peft_config") else model
    if type(core).__name__.endswith("ForSequenceClassification"):
        layers = [part for part in core.modules() if type(part).__name__ in FIRST_TOKEN]
        if layers and not layers[-1].is_decoder:
            layers[-1].forward = functools.partial(_first_token, layers[-1])
    for part in model.modules():
        if _plain_adapter(part):
            part.forward = functools.partial(_adapted, part)


def _first_token(layer: Any, hidden: Tensor, attention_mask: Tensor | None = None, *given: Any, **named: Any) -> Tensor:
    """[B, 1, size]: the layer's output at the first token, which attends to all."""
    if _drops(layer):  # its mask is drawn for all tokens
        return type(layer).forward(layer, hidden, attention_mask, *given, **named)
    own = layer.attention.self
    first = hidden[:, :1].contiguous()  # for slices of a tensor, torch computes one product per row
    heads = (-1, own.attention_head_size)
    query, key, value = (
        project(of).unflatten(-1, heads).transpose(1, 2)
        for project, of in ((own.query, first), (own.key, hidden), (own.value, hidden))
    )
    mask = attention_mask if attention_mask is None or attention_mask.shape[-2] == 1 else attention_mask[..., :1, :]
    seen = F.scaled_dot_product_attention(query, key, value, mask, scale=own.scaling)
    return layer.feed_forward_chunk(layer.attention.output(seen.transpose(1, 2).flatten(2), first))


def _drops(layer: nn.Module) -> bool:
    dropouts = (part for part in layer.modules() if isinstance(part, (nn.Dropout, KeyedDropout)))
    return any(part.training and part.p > 0 for part in dropouts)


def _plain_adapter(part: Any) -> bool:
    """Whether this is PEFT's linear layer with one adapter of the plain kind, in use and not merged."""
    if type(part).__module__ != "peft.tuners.lora.layer" or type(part).__name__ != "Linear":
        return False
    if len(part.active_adapters) != 1 or part.disable_adapters or part.merged or part.lora_variant:
        return False
    return part.lora_B[part.active_adapters[0]].bias is None


def _adapted(layer: Any, x: Tensor) -> Tensor:
    """W x + (scaling B) A x: PEFT multiplies the product and its gradient instead, in passes over all rows."""
    (name,) = layer.active_adapters
    result = layer.base_layer(x)
    if not torch.is_autocast_enabled(x.device.type):
        x = layer._cast_input_dtype(x, layer.lora_A[name].weight.dtype)
    low = layer.lora_A[name](layer.lora_dropout[name](x))
    return (result + F.linear(low, layer.lora_B[name].weight * layer.scaling[name])).to(result.dtype)
