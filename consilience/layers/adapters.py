"""Low-rank adapters W + scaling B A in a model: finding the pairs of leaves, and their products.

A pair is found by its names: one component of a leaf's name says which factor it is, and the rest of the name is the
same. Those of `peft` are `<layer>.lora_A.<adapter>.weight` [r, in] and `<layer>.lora_B.<adapter>.weight` [out, r].
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree

Factors = tuple[str, str]
"""The components of names that mark A [r, in] and B [out, r]."""
LORA: Factors = ("lora_A", "lora_B")
MERGED = "lora_merged"  # the buffer of a layer that holds products merged so far, [out, in], unscaled
_SCALE = "lora_merged_scale"


class Pair(NamedTuple):
    """One adapter: the layer it belongs to and the names of its two leaves."""

    layer: str
    a: str
    b: str

    @property
    def key(self) -> str:
        """The key of its product in a tree of products."""
        return self.layer or "model"

    @property
    def merged(self) -> str:
        """The name of the buffer with what was merged into the layer."""
        return f"{self.layer}.{MERGED}" if self.layer else MERGED


def pairs_in(names: Iterable[str], factors: Factors = LORA) -> tuple[Pair, ...]:
    """The pairs whose two leaves are both among the names, in the order of their A."""
    names = list(names)
    found = []
    for name in names:
        parts = name.split(".")
        if factors[0] in parts:
            at = parts.index(factors[0])
            other = ".".join([*parts[:at], factors[1], *parts[at + 1 :]])
            if other in names and other != name:
                found.append(Pair(".".join(parts[:at]), name, other))
    return tuple(found)


def pairs_of(params: Mapping[str, Tensor], factors: Factors = LORA, *, stacked: bool = False) -> tuple[Pair, ...]:
    """The pairs of a model's parameters; refused, with the fix, if there are none or if they are no matrices."""
    found = pairs_in(params, factors)
    if not found:
        known = ", ".join(list(params)[:4])
        raise Invalid(
            f"the model has no adapters: no trained parameters come in pairs named {factors[0]!r} and {factors[1]!r} "
            f"(it has {known} ...): add them, for example with peft.get_peft_model(module, LoraConfig(...)), or say "
            "with factors = [...] what yours are called"
        )
    for pair in found:
        a, b = (tuple(params[name].shape[1 if stacked else 0 :]) for name in (pair.a, pair.b))
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise Invalid(
                f"the adapter of {pair.layer or 'the model'} must be matrices A [r, in] and B [out, r], but "
                f"{pair.a} is {list(a)} and {pair.b} is {list(b)}: adapt linear layers only"
            )
    return found


def is_factor(name: str, factors: Factors = LORA) -> bool:
    """Whether a leaf is one of the two factors, by its name."""
    return not set(factors).isdisjoint(name.split("."))


def product(params: Mapping[str, Tensor], pair: Pair) -> Tensor:
    """B A [..., out, in], without the scaling, which lives in the module."""
    return params[pair.b] @ params[pair.a]


def others(params: Tree, pairs: Iterable[Pair]) -> Tree:
    """The parameters that are no factor of these pairs."""
    factors = {name for pair in pairs for name in (pair.a, pair.b)}
    return {name: value for name, value in params.items() if name not in factors}


def within_rank(values: Any, pairs: Iterable[Pair], rank: Tensor) -> Any:
    """A tree in which every A keeps its first `rank` rows, every B its first `rank` columns; the others are 0.

    `rank` is a scalar, or [m] for stacked trees. Trees inside the tree that are named like the parameters (a control
    variate, say) are cut in the same way.
    """
    if not isinstance(values, dict):
        return values
    cut = {name: within_rank(value, pairs, rank) for name, value in values.items()}
    for pair in pairs:
        if pair.a in cut and pair.b in cut:
            live = torch.arange(cut[pair.a].shape[-2], device=rank.device) < rank.unsqueeze(-1)  # [..., r]
            cut[pair.a] = torch.where(live.unsqueeze(-1), cut[pair.a], 0)
            cut[pair.b] = torch.where(live.unsqueeze(-2), cut[pair.b], 0)
    return cut


# --- modules ---------------------------------------------------------------------------------------------------------


def freeze_a(task: Task, factors: Factors = LORA) -> Task:
    """The same task with every A frozen: it is not trained and never sent."""
    named = dict(task.module.named_parameters())
    frozen = [pair.a for pair in pairs_in(named, factors)]
    module = _sharing_copy(task.module, but=frozen)
    for name, value in module.named_parameters():
        if name in frozen:
            value.requires_grad_(False)
    return task.with_module(module)


def mergeable(task: Task, factors: Factors = LORA) -> Task:
    """The same task; every layer with an adapter also has a buffer [out, in] of products merged into it, now 0."""
    module = _sharing_copy(task.module)
    params = dict(module.named_parameters())
    for pair in pairs_of(task.start()["params"], factors):
        layer, a, b = module.get_submodule(pair.layer), params[pair.a], params[pair.b]
        if MERGED not in dict(layer.named_buffers(recurse=False)):
            layer.register_buffer(MERGED, a.new_zeros(b.shape[0], a.shape[1], requires_grad=False))
            setattr(layer, _SCALE, _scaling(layer, pair, factors))
            layer.register_forward_hook(_add_merged)
    return task.with_module(module)


def has_merged(module: nn.Module) -> bool:
    """Whether layers have buffers for merged products."""
    return any(MERGED in layer._buffers for layer in module.modules())


def folded(module: nn.Module) -> nn.Module:
    """The module with merged products in the layers' own weights; the module itself where nothing was merged."""
    if not has_merged(module):
        return module
    module = copy.deepcopy(module)
    for layer in module.modules():
        if MERGED in layer._buffers:
            weight = getattr(layer, "base_layer", layer).weight
            delta = getattr(layer, _SCALE) * getattr(layer, MERGED)
            with torch.no_grad():
                weight += delta.T if getattr(layer, "fan_in_fan_out", False) else delta
            del layer._buffers[MERGED]
            delattr(layer, _SCALE)
            for key in [key for key, hook in layer._forward_hooks.items() if hook is _add_merged]:
                del layer._forward_hooks[key]
    return module


def _sharing_copy(module: nn.Module, but: Iterable[str] = ()) -> nn.Module:
    """A copy whose parameters are the same tensors, except for those named: a large frozen model exists once."""
    own = set(but)
    shared: dict[int, Any] = {id(value): value for name, value in module.named_parameters() if name not in own}
    return copy.deepcopy(module, shared)


def _add_merged(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """The layer's output plus that of its merged products."""
    merged: Any = getattr(layer, MERGED)
    if inputs[0].shape[-1] != merged.shape[1]:
        raise Invalid(
            f"products cannot be merged into {type(layer).__name__}: its input is {list(inputs[0].shape)}, and its "
            f"adapter reads {merged.shape[1]} numbers: an adapted layer must take [..., in] as it is"
        )
    x = inputs[0].to(merged.dtype)
    return output + (getattr(layer, _SCALE) * F.linear(x, merged)).to(output.dtype)


def _scaling(layer: nn.Module, pair: Pair, factors: Factors) -> float:
    """What multiplies B A in the layer: its attribute `scaling`, by adapter in those of peft."""
    value: Any = getattr(layer, "scaling", None)
    if isinstance(value, Mapping):
        parts = pair.a.split(".")
        value = value.get(parts[parts.index(factors[0]) + 1])
    if not isinstance(value, (int, float)):
        raise Invalid(
            f"products cannot be merged into {pair.layer}: {type(layer).__name__} has no number `scaling`, by which it "
            "multiplies B A: set it, 1.0 if there is none"
        )
    return float(value)
