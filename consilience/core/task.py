"""The task interface for rules, servers and engines; `consilience.task.task.Task` implements it for a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from consilience.core.kind import Kind
from consilience.core.metrics import Loss, Metric, Metrics
from consilience.core.plans import Batch
from consilience.core.tree import Tree


class Task(Protocol):
    """A model and its kind of task, as pure functions of trees `{"params": ..., "buffers": ...}`.

    module: as given by the user. added: metrics in addition to the kind's. metrics: all of them, the loss first.
    """

    module: nn.Module
    kind: Kind
    losses: Loss
    loss_name: str
    added: tuple[Metric, ...]
    metrics: Metrics

    def start(self) -> Tree:
        """The module's current values: the model of round 0."""
        ...

    def apply(
        self,
        model: Tree,
        x: Any,
        *,
        train: bool,
        mask: Tensor | None = None,
        key: Tensor | None = None,
        through: Callable[[nn.Module, Any], Any] | None = None,
    ) -> tuple[Any, Tree]:
        """(output, buffers afterwards) of the module's forward pass, or of `through(module, x)`."""
        ...

    def features(
        self, model: Tree, x: Any, *, train: bool = False, mask: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """[B, d] the input of the last layer."""
        ...

    def training_batch(self, batch: Batch) -> Batch:
        """The batch as used in training: unchanged, unless the module has a method of this name."""
        ...

    def row_losses(self, output: Any, batch: Batch) -> Tensor:
        """[B] the losses of a batch, times the weights of its rows if there are any."""
        ...

    def decide(self, output: Tensor) -> Tensor:
        """Class numbers from the model's output."""
        ...

    def hits(self, output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        """[B] the share of correct decisions among the counted entries of each row; 0 if the task has no decision."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype | None = None, *, matmul: bool = False) -> Task:
        """The same task with constants on a device and in a dtype, optionally with convolutions as matrix products."""
        ...

    def ready(self) -> Task:
        """Create this thread's working copies of the module; this is not possible inside a traced function."""
        ...

    def knowing(self, width: int | None) -> Task:
        """The same task with metrics for this number of classes, labels or outputs per row; None: not known."""
        ...

    def with_module(self, module: nn.Module) -> Task:
        """The same task with another module."""
        ...

    def given(self, values: Tree) -> Task:
        """The same task with some of the module's values, by name, fixed to these and excluded from the model."""
        ...

    def trained(self, model: Tree) -> nn.Module:
        """A copy of the user's module with these values, ready to use or save."""
        ...

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The constants: parameters that are not trained, by name."""
        ...

    @property
    def frozen_digest(self) -> str:
        """SHA-256 of the constants, "" if there are none."""
        ...

    @property
    def convolves(self) -> bool:
        """Whether the model has 2-d convolutions."""
        ...
