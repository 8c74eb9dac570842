"""Models as parts of other models: built by name, with the length of their representation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from consilience.core.settings import Invalid


def backbone_named(key: str, name: str, inputs: Any, classes: int, options: Mapping[str, Any] | None) -> nn.Module:
    """The zoo's model of that name; `key` is the setting that asked for it, for the error message."""
    from consilience.models import find  # imported here: the wrappers are in this catalogue themselves

    if options is not None and not isinstance(options, Mapping):
        raise Invalid(f"{key}_options = {options!r} must be a table of options for {name}, e.g. {{norm = 'group'}}")
    return find(name, key)(inputs=inputs, classes=classes, **(options or {}))


def head_shape(backbone: nn.Module) -> tuple[int, int]:
    """Input and output size of the backbone's linear head: the length of `features(x)`, the number of classes."""
    head = getattr(backbone, "head", None)
    if not callable(getattr(backbone, "features", None)) or not isinstance(head, nn.Linear):
        raise Invalid(
            f"{type(backbone).__name__} cannot be wrapped: a backbone needs a method features(x) "
            "and its last nn.Linear in an attribute head"
        )
    return head.in_features, head.out_features
