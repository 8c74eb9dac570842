"""Local training of networks whose hidden units can be permuted: a chain of dense and convolutional layers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from consilience.client.local_training import LocalTraining
from consilience.client.wrapped import Wrapped
from consilience.core.capabilities import ChecksTask, capability
from consilience.core.protocols import ClientRule
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
# modules that treat every unit the same, so that units may be permuted before or after them
ALIKE = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.Dropout, nn.Dropout2d, nn.Identity, nn.Flatten),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
FUNCTIONS = (F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.max_pool2d, F.avg_pool2d, F.dropout)
TORCH = (torch.relu, torch.tanh, torch.sigmoid, torch.square, torch.flatten)
METHODS = ("relu", "tanh", "sigmoid", "square", "flatten")


@dataclass(frozen=True, kw_only=True)
class ChainTraining(Wrapped):
    """Local training that refuses networks other than a chain of layers, which matched averaging requires."""

    training: ClientRule = field(default_factory=LocalTraining)

    def check_against(self, task: Task) -> None:
        """Refuse a network with branches, shared layers, or layers that depend on the order of units."""
        check_chain(task.module, frozenset(task.start()["params"]))
        inner = capability(self.training, ChecksTask)
        if inner is not None:
            inner.check_against(task)

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """As in training, after the check."""
        check_chain(task.module, frozenset(message["model"]["params"]))
        return self.training.begin(task, message, memory)


@functools.lru_cache(maxsize=4)  # called at the start of every client's round
def check_chain(module: nn.Module, trained: frozenset[str]) -> None:
    """Refuse a module that does not apply its layers one after another, in the order of its parameters."""
    kind, parts = type(module).__name__, dict(module.named_modules())
    try:
        graph = fx.Tracer().trace(module)
    except Exception as problem:  # a user's forward may raise anything
        raise Invalid(f"matched averaging cannot follow the forward of {kind}: {problem}") from problem
    seen: list[str] = []
    last: Any = None
    for node in graph.nodes:
        if last is not None and node.all_input_nodes != [last]:
            raise Invalid(f"matched averaging needs a chain of layers, but {kind} has a branch at {node.name}")
        last = node
        if node.op in ("placeholder", "output"):
            continue
        part = parts.get(node.target) if node.op == "call_module" else None
        if isinstance(part, LAYERS) and getattr(part, "groups", 1) == 1 and node.target not in seen:
            seen.append(node.target)
        elif isinstance(part, ALIKE) and node.target not in seen:
            seen += [node.target] if any(True for _ in part.parameters()) else []
        elif node.target not in ((*FUNCTIONS, *TORCH) if node.op == "call_function" else METHODS):
            what = node.target if part is None else f"{type(part).__name__} {node.target}"
            raise Invalid(
                f"matched averaging knows chains of dense and convolutional layers with batch norm, activations and "
                f"pooling, but {kind} has {what}: use a model such as mlp or cnn"
            )
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in module.named_parameters()))
    if owners != seen or {name for name, _ in module.named_parameters()} != trained:
        raise Invalid(f"matched averaging needs every layer of {kind} to be trained, sent, and used once, in order")
