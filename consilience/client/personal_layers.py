"""Personal layers: selection of the model's leaves that are never sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from consilience.core.settings import Checked, Count, Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)


@runtime_checkable
class PersonalLayers(Protocol):
    """Selects the parameters and buffers that stay with the client."""

    def personal_names(self, model: Tree) -> frozenset[str]:
        """Names of these leaves; depends only on names and shapes, so that memories can be created without a model."""
        ...

    def check_against(self, task: Task, model: Tree) -> None:
        """Refuse a model for which the selection by names is wrong."""
        ...


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """Every leaf of the normalisation layers: scale, shift, running statistics and their counters."""

    def personal_names(self, model: Tree) -> frozenset[str]:
        """Layers with running statistics, with scale and shift of one shape, or with a lone vector of scales."""
        found: list[str] = []
        for _, leaves in _by_layer(_names(model)):
            params = {name.rpartition(".")[2]: model["params"][name] for name in leaves if name in model["params"]}
            if any(name.endswith("running_mean") for name in leaves) or _scales(params):
                found += leaves
        return frozenset(found)

    def check_against(self, task: Task, model: Tree) -> None:
        """Refuse a model whose layer types disagree with the selection."""
        layers = {name for name, part in task.module.named_modules() if _normalises(part)}
        meant = {name for layer, leaves in _by_layer(_names(model)) if layer in layers for name in leaves}
        wrong = sorted(meant ^ self.personal_names(model))
        if wrong:
            raise Invalid(
                f"personal_layers = normalisation cannot tell from shapes whether {', '.join(wrong[:4])} belong to a "
                f"normalisation layer of {type(task.module).__name__}: give "
                "personal_layers = {name = 'named', patterns = [...]}"
            )


@dataclass(frozen=True, kw_only=True)
class Head(Checked):
    """The last `layers` layers, in the order in which the module defines them."""

    layers: Count = 1

    def personal_names(self, model: Tree) -> frozenset[str]:
        """All leaves of the last layers that have parameters."""
        trained = [layer for layer, leaves in _by_layer(_names(model)) if any(n in model["params"] for n in leaves)]
        last = set(trained[-self.layers :])
        return frozenset(name for layer, leaves in _by_layer(_names(model)) if layer in last for name in leaves)

    def check_against(self, task: Task, model: Tree) -> None:
        """Refuse a model with no layer left to share."""
        _refuse_everything(self, model)


@dataclass(frozen=True, kw_only=True)
class Named(Checked):
    """Leaves whose names match one of the patterns, such as "head.*"."""

    patterns: tuple[str, ...]

    def personal_names(self, model: Tree) -> frozenset[str]:
        """Leaves that match a pattern."""
        return frozenset(n for n in _names(model) if any(fnmatchcase(n, pattern) for pattern in self.patterns))

    def check_against(self, task: Task, model: Tree) -> None:
        """Refuse a pattern without a match, and a model with no leaf left to share."""
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in _names(model)):
                known = ", ".join(list(_names(model))[:6])
                raise Invalid(
                    f"personal_layers.patterns: {pattern!r} matches no leaf of the model, which has {known} ..."
                )
        _refuse_everything(self, model)


def split(model: Tree, names: frozenset[str]) -> tuple[Tree, Tree]:
    """(the leaves with these names, all other leaves)."""
    mine = {kind: {n: leaf for n, leaf in leaves.items() if n in names} for kind, leaves in model.items()}
    others = {kind: {n: leaf for n, leaf in leaves.items() if n not in names} for kind, leaves in model.items()}
    return mine, others


def joined(model: Tree, mine: Tree) -> Tree:
    """The model with some of its leaves replaced, in the model's own order."""
    return {kind: {**leaves, **mine.get(kind, {})} for kind, leaves in model.items()}


def _names(model: Tree) -> Iterable[str]:
    return (*model["params"], *model["buffers"])


def _by_layer(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """(layer, its leaves), in order of first appearance."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.items())


def _scales(params: dict[str, Tensor]) -> bool:
    if set(params) == {"weight", "bias"}:
        return params["weight"].shape == params["bias"].shape
    return set(params) == {"weight"} and params["weight"].dim() == 1 and params["weight"].numel() > 1


def _normalises(part: nn.Module) -> bool:
    return isinstance(part, _NORMS) or "norm" in type(part).__name__.lower()


def _refuse_everything(personal_layers: PersonalLayers, model: Tree) -> None:
    if personal_layers.personal_names(model) >= set(model["params"]):
        raise Invalid(
            f"personal_layers = {personal_layers!r} keeps every parameter with the client, so that nothing is learned "
            "together"
        )
