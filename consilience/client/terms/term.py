"""Interface of a term, and the context it may read."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from consilience.core.plans import Batch
from consilience.core.task import Task
from consilience.core.tree import Tree


class Context(NamedTuple):
    """What a term may read at a local step."""

    task: Task
    message: Tree  # the broadcast: message["model"] is the model that the client started from
    memory: Tree  # of the client
    buffers: Tree  # the model's buffers before this step
    output: Tensor  # the model's output on the batch
    features: Tensor | None = None  # [B, d] the model's features of the batch, if a term is `ReadsFeatures`


@runtime_checkable
class Term(Protocol):
    """One addition to the local objective."""

    def __call__(self, params: Tree, context: Context, batch: Batch) -> Tensor:
        """A scalar to be minimised together with the loss."""
        ...


@runtime_checkable
class NeedsMemory(Protocol):
    """A term that reads client memory."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names in the client's memory."""
        ...


@runtime_checkable
class ReadsBroadcast(Protocol):
    """A term or a memory that reads more of the server's message than the model."""

    @property
    def reads_broadcast(self) -> tuple[str, ...]:
        """Names that the server's ledgers must send."""
        ...


@runtime_checkable
class WholeModel(Protocol):
    """A term that may need every leaf of the model, so that personal layers are not possible."""

    @property
    def whole_model(self) -> bool:
        """Whether it has this property."""
        ...


@runtime_checkable
class ReadsFeatures(Protocol):
    """A term that reads the trained model's features, taken from the same forward pass as the output."""

    @property
    def reads_features(self) -> bool:
        """Whether it has this property."""
        ...
