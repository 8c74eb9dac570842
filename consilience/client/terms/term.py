"""What a term may look at."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from consilience.core.plans import Batch
from consilience.core.task import Task
from consilience.core.tree import Tree


class Context(NamedTuple):
    """The surroundings of a local step."""

    task: Task
    message: Tree  # what the server sent: message["model"] is where the client started
    memory: Tree  # the client's own
    buffers: Tree  # the model's buffers before this step
    output: Tensor  # the model's output on the batch
    features: Tensor | None = None  # [B, d] the model's features of the batch, where a term `ReadsFeatures`


@runtime_checkable
class Term(Protocol):
    """One addition to the local objective."""

    def __call__(self, params: Tree, context: Context, batch: Batch) -> Tensor:
        """A scalar to be minimised together with the loss."""
        ...


@runtime_checkable
class NeedsMemory(Protocol):
    """A term that reads what the client remembers."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names in the client's memory."""
        ...


@runtime_checkable
class Hears(Protocol):
    """A term or a memory that reads more of the server's message than the model."""

    @property
    def hears(self) -> tuple[str, ...]:
        """Names that the server's ledgers must tell."""
        ...


@runtime_checkable
class WholeModel(Protocol):
    """A term that may follow every leaf of the model, so that clients cannot keep some of them."""

    @property
    def whole_model(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class ReadsFeatures(Protocol):
    """A term that reads the trained model's features: the pass that gives the output gives them, too."""

    @property
    def reads_features(self) -> bool:
        """Whether it does."""
        ...
