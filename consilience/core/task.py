"""What rules, servers and engines may ask of a task; `consilience.task.task.Task` makes one of a module."""

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

    module: as the user gave it. added: metrics next to the kind's. metrics: all of them, the loss first.
    """

    module: nn.Module
    kind: Kind
    losses: Loss
    loss_name: str
    added: tuple[Metric, ...]
    metrics: Metrics

    def start(self) -> Tree:
        """The module's present values: the model of round 0."""
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
        """(output, buffers after the pass), of the module's forward pass or of `through(module, x)`."""
        ...

    def features(
        self, model: Tree, x: Any, *, train: bool = False, mask: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """[B, d] the representation in front of the last layer."""
        ...

    def training_batch(self, batch: Batch) -> Batch:
        """What a step of training sees of a batch: the batch, unless the module has a method of this name."""
        ...

    def row_losses(self, output: Any, batch: Batch) -> Tensor:
        """[B] the losses of a batch, times the weights of its rows where they have any."""
        ...

    def decide(self, output: Tensor) -> Tensor:
        """Class numbers from the model's output."""
        ...

    def hits(self, output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        """[B] the share of right decisions among the entries of each row that count; 0 where nothing is decided."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype | None = None, *, matmul: bool = False) -> Task:
        """The same task with its constants on a device and in a dtype, and convolutions as matrix products if asked."""
        ...

    def ready(self) -> Task:
        """Make this thread's working copies of the module, which cannot be made inside a traced function."""
        ...

    def knowing(self, width: int | None) -> Task:
        """The same task, whose metrics know how many classes, labels or outputs a row has; None: not known."""
        ...

    def with_module(self, module: nn.Module) -> Task:
        """The same task for another form of the module."""
        ...

    def given(self, values: Tree) -> Task:
        """The same task, in which some of the module's values, by their names, are these and not part of the model."""
        ...

    def trained(self, model: Tree) -> nn.Module:
        """A copy of the user's module holding these values, ready to use or save."""
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
