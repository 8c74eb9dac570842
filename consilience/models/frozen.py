"""A linear head over a frozen encoder: only the head is trained, averaged, sent and saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from consilience.core.settings import Count
from consilience.models.arguments import Shape, factory
from consilience.models.backbones import backbone_named, head_shape
from consilience.models.weights import load_weights


class Constant(nn.Module):
    """Calls a module in eval mode whose values are not in `parameters`, `buffers` and `state_dict`.

    A constant is not part of the model's state: clients share one copy, it is never averaged, sent or saved,
    and every client builds the same one from the same configuration. `.to(...)` reaches it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # In a tuple, nn.Module does not register it as a child.
        self.held = (copy.deepcopy(module).eval().requires_grad_(False),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that calls the same module."""
        copied = copy.copy(self)
        copied._parameters, copied._buffers, copied._modules = {}, {}, {}
        return copied

    def constants(self) -> dict[str, Tensor]:
        """The values of the held module, by name."""
        return dict(self.held[0].state_dict())

    def forward(self, x: Any) -> Tensor:
        (module,) = self.held
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.to(self.dtype)
        return getattr(module, "features", module)(x)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the held module."""
        return next((p.dtype for p in self.held[0].parameters()), torch.get_default_dtype())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        values = (*self.held[0].parameters(), *self.held[0].buffers())
        with torch.no_grad():
            if any(fn(value) is not value for value in values):  # copies of this layer call the same module
                self.held = (copy.deepcopy(self.held[0])._apply(fn, recurse),)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return type(self.held[0]).__name__


class FrozenEncoder(nn.Module):
    """A constant encoder and a trainable head."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = Constant(encoder)
        self.head = head

    def features(self, x: Any) -> Tensor:
        """The encoder's representation, in the head's dtype."""
        return self.encoder(x).to(next(self.head.parameters()).dtype)

    def forward(self, x: Any) -> Tensor:
        return self.head(self.features(x))


def frozen(encoder: nn.Module, head: nn.Module) -> nn.Module:
    """`head(encoder.features(x))` (or `head(encoder(x))`) in which only the head is trained and sent."""
    return FrozenEncoder(encoder, head)


@factory
def linear_head(
    *,
    inputs: Shape,
    classes: Count,
    encoder: str = "resnet18",
    weights: str | None = None,
    encoder_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A linear classifier on a frozen model of the zoo, its weights read from a .safetensors or .npz file.

    Without `weights` the encoder is a random projection drawn from the model seed, the same at every client.
    Faster: encode the data once (`consilience.models.encoders`) and train `logistic` on the features.
    """
    backbone = backbone_named("linear_head.encoder", encoder, inputs, classes, encoder_options)
    if weights is not None:
        load_weights(backbone, weights, head=False)
    features, _ = head_shape(backbone)
    return frozen(backbone, nn.Linear(features, classes))
