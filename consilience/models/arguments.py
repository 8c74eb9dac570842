"""Checks of a model factory's arguments: options by their annotations, input shapes by the model."""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, cast

from torch import nn

from consilience.core.settings import Count, Invalid, check_options, check_value

Given = ParamSpec("Given")
Shape = tuple[Count, ...]  # of one example


def factory(make: Callable[Given, nn.Module]) -> Callable[Given, nn.Module]:
    """Decorator of model factories that refuses unknown, missing and invalid options before building anything."""
    required = [n for n, p in inspect.signature(make).parameters.items() if p.default is p.empty]

    @functools.wraps(make)
    def build(*args: Given.args, **options: Given.kwargs) -> nn.Module:
        name = make.__name__
        if args:
            raise Invalid(f"{name} takes its options by name, e.g. {name}({required[0]}={args[0]!r}, ...)")
        missing = [option for option in required if option not in options]
        if missing:
            raise Invalid(f"{name} needs {' and '.join(missing)}: give {', '.join(f'{m}=...' for m in missing)}")
        inputs = options.get("inputs")
        if isinstance(inputs, dict) and typing.get_type_hints(make, include_extras=True)["inputs"] == Shape:
            parts = f"inputs = {inputs!r} has several parts: {name} reads one"
            raise Invalid(f"{name}.{parts}; use early_fusion or late_fusion, or load one part alone")
        return cast(Any, make)(**check_options(make, options, name))

    return build


def value_count(model: str, inputs: Shape) -> int:
    """How many numbers one example holds, whatever its shape."""
    if not inputs:
        raise Invalid(f"{model}.inputs = () has no axis: give the shape of one example, e.g. (64,) or (1, 28, 28)")
    return math.prod(inputs)


def picture_shape(model: str, inputs: Shape, least: int = 1, hint: str = "") -> tuple[int, int, int]:
    """(channels, height, width), or `Invalid` when examples are no pictures or have sides below `least`."""
    if len(inputs) != 3:
        raise Invalid(
            f"{model}.inputs = {inputs!r} is not a picture: {model} reads (channels, height, width) such as "
            "(3, 32, 32); use mlp or logistic for flat examples, or reshape the data"
        )
    channels, height, width = inputs
    if min(height, width) < least:
        raise Invalid(
            f"{model}.inputs = {inputs!r} is too small: pictures of at least {least} x {least} pixels are needed{hint}"
        )
    return channels, height, width


def require_sequence(model: str, inputs: Shape) -> None:
    """Refuse inputs that are not a sequence of tokens."""
    if len(inputs) != 1:
        raise Invalid(
            f"{model}.inputs = {inputs!r} is not a sequence: "
            f"{model} reads token numbers of shape (length,) such as (80,)"
        )


def modality_sizes(model: str, inputs: Any) -> dict[str, int]:
    """Feature size of each modality, sorted by name so that every organisation builds the same model."""
    if not isinstance(inputs, dict) or not inputs:
        raise Invalid(
            f"{model}.inputs = {inputs!r} must name the size of each modality, e.g. {{'text': 384, 'picture': 512}}"
        )
    sizes = {}
    for name, size in sorted(inputs.items(), key=str):
        if not str(name).isidentifier() or hasattr(nn.ModuleDict(), name):
            raise Invalid(f"{model}.inputs has a modality named {name!r}: use a plain word, e.g. 'text'")
        shape = check_value(f"{model}.inputs.{name}", (size,) if isinstance(size, int) else size, Shape)
        if len(shape) != 1:
            raise Invalid(
                f"{model}.inputs.{name} = {size!r} is not a feature vector: encode this modality first "
                "(data.picture_encoder in a config, consilience.models.encoders in Python); late_fusion may train a "
                "picture_encoder of its own"
            )
        sizes[name] = shape[0]
    return sizes
