"""Conversion between Flower's records and trees; names and order are the user's."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from consilience.core.refusal import Refused
from consilience.core.settings import Invalid
from consilience.core.tree import SEPARATOR, Tree
from consilience.flower.messages import wire
from consilience.wire import arrays

STATISTICS = ("*running_mean", "*running_var")  # floating entries of a state dict that no gradient moves


def flwr(module: str) -> Any:
    """A module of Flower, such as `app`, imported when it is first needed."""
    try:
        return importlib.import_module(f"flwr.{module}")
    except ImportError as problem:
        raise ImportError(
            f'consilience.flower needs Flower: pip install "consilience[flower]" ({problem})'
        ) from problem


@dataclass(frozen=True, kw_only=True)
class StateDictLayout:
    """Which entries of a state dict are parameters and which are buffers, and in which order the user has them.

    An ArrayRecord does not tell: entries that are not floating, or that `buffers` matches, are buffers.
    """

    names: tuple[str, ...]
    buffers: frozenset[str]

    @staticmethod
    def of(values: Mapping[str, Tensor], buffers: Iterable[str] = STATISTICS) -> StateDictLayout:
        """The layout of these entries."""
        for name in values:
            if not name or SEPARATOR in name:
                raise Invalid(f"the array {name!r} cannot be used: names must be non-empty and without {SEPARATOR!r}")
        found = {
            name
            for name, value in values.items()
            if not value.is_floating_point() or any(fnmatchcase(name, pattern) for pattern in buffers)
        }
        if len(found) == len(values):
            raise Invalid(_nothing_to_average(values))
        return StateDictLayout(names=tuple(values), buffers=frozenset(found))

    def tree(self, values: Mapping[str, Any]) -> Tree:
        """`{"params": ..., "buffers": ...}`; missing names are left out."""
        present = [name for name in self.names if name in values]
        return {
            "params": {name: values[name] for name in present if name not in self.buffers},
            "buffers": {name: values[name] for name in present if name in self.buffers},
        }

    def flat(self, model: Tree) -> dict[str, Tensor]:
        """The state dict of a model, in the user's order."""
        values = {**model["params"], **model["buffers"]}
        return {name: values[name] for name in self.names if name in values}

    def path(self, name: str) -> str:
        """The path of this entry in a template; unknown names have paths that no template contains."""
        return SEPARATOR.join(("model", "buffers" if name in self.buffers else "params", name))


def _nothing_to_average(values: Mapping[str, Tensor]) -> str:
    """Why a model without parameters is refused; tree ensembles come as one array of bytes."""
    if values and all(value.dtype == torch.uint8 and value.dim() == 1 for value in values.values()):
        return (
            f"the {len(values)} arrays hold bytes and no parameters, as those of XGBoost's and CatBoost's trees do: "
            "there is nothing to average; keep Flower's own strategy for them, such as FedXgbBagging"
        )
    return f"none of the {len(values)} arrays is a parameter: nothing can be learned"


def to_record(values: Mapping[str, Tensor]) -> Any:
    """Tensors as Flower's ArrayRecord, bit for bit."""
    return wire.array_record({name: arrays.to_bytes(value) for name, value in values.items()})


def to_tensors(record: Any) -> dict[str, Tensor]:
    """The tensors of an ArrayRecord from our own side; `Invalid` with the name of an unusable one."""
    found: dict[str, Tensor] = {}
    name = ""
    try:
        for name, one in wire.packed(record).items():
            found[name] = arrays.from_bytes(one.data, one.shape, one.dtype)
    except Refused as problem:
        raise Invalid(f"the array {problem.key or name!r} cannot be used: {problem}") from problem
    return found
