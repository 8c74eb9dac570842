"""The model zoo: `__all__` is the catalogue, one factory per model; every model is `head(features(x))`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from consilience.core.settings import Invalid, nearest, refuse_unknown
from consilience.models.adapted import lora_mlp
from consilience.models.convolutional import cnn
from consilience.models.densely_connected import densenet121
from consilience.models.entries import small_unet, token_transformer
from consilience.models.frozen import linear_head
from consilience.models.fusion import early_fusion, late_fusion
from consilience.models.hugging_face import hugging_face
from consilience.models.libraries import timm, torchvision
from consilience.models.perceptrons import logistic, mlp
from consilience.models.recurrent import char_lstm, text_lstm
from consilience.models.residual import resnet18, resnet20, resnet34, resnet50
from consilience.models.siamese import siamese

__all__ = [
    "char_lstm",
    "cnn",
    "densenet121",
    "early_fusion",
    "hugging_face",
    "late_fusion",
    "linear_head",
    "logistic",
    "lora_mlp",
    "mlp",
    "resnet18",
    "resnet20",
    "resnet34",
    "resnet50",
    "siamese",
    "small_unet",
    "text_lstm",
    "timm",
    "token_transformer",
    "torchvision",
]


def find(name: str, key: str = "model") -> Callable[..., nn.Module]:
    """The factory of that name; `key` is the setting that asked for it, for the error message."""
    if name not in __all__:
        raise Invalid(f"{key} = {name!r} is not a model{nearest(name, __all__)}; known: {', '.join(__all__)}")
    return getattr(sys.modules[__name__], name)


def build(name: str, inputs: Any, classes: int, *, seed: int = 0, **options: Any) -> nn.Module:
    """A model by name, on the CPU; its parameters depend on `seed` alone, global random state is kept.

    `build_model("mlp", (1, 8, 8), 10, seed=0, hidden=(32,))`: `inputs` is the shape of one row; `consilience list
    models` shows all names with their options.
    """
    make = find(name)
    refuse_unknown(
        options, [key for key in inspect.signature(make).parameters if key not in ("inputs", "classes")], name
    )
    # Not torch.manual_seed: it would reseed every accelerator as well.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        made: Any = make(inputs=inputs, classes=classes, **options)
    made.built_from = {"name": name, "inputs": inputs, "classes": classes, "options": options}  # for a saved result
    return made
