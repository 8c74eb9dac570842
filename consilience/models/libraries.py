"""Picture models of torchvision and timm by their names, where these packages are installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from consilience.core.settings import Count, Invalid, nearest
from consilience.models.arguments import Shape, factory, picture_shape

Trained = Literal["all", "head"]


class LibraryModel(nn.Module):
    """A model of another library whose last linear layer is its head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def head(self) -> nn.Linear:
        """The last linear layer."""
        return self.model.get_submodule(_last_linear(self.model))  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def features(self, x: Tensor) -> Tensor:
        """[B, size]: what the last linear layer reads."""
        seen: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            self.model(x)
        finally:
            hook.remove()
        return seen[-1]


@factory
def torchvision(
    *,
    inputs: Shape,
    classes: Count,
    architecture: str,
    pretrained: bool = False,
    train: Trained = "all",
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A classifier of torchvision, such as architecture = "mobilenet_v3_small"; `pretrained` downloads its weights.

    `train` = "head" freezes all but the last layer; `options` are torchvision's own.
    """
    library = _imported("torchvision")
    channels, _, _ = picture_shape("torchvision", inputs)
    _refuse_unknown("torchvision", architecture, library.models.list_models(module=library.models))
    given = dict(options or {})
    if pretrained:
        model = library.models.get_model(architecture, weights="DEFAULT", **given)
        _replace_head(model, classes)
    else:
        model = library.models.get_model(architecture, weights=None, num_classes=classes, **given)
    return _finished(model, "torchvision", architecture, channels, train)


@factory
def timm(
    *,
    inputs: Shape,
    classes: Count,
    architecture: str,
    pretrained: bool = False,
    train: Trained = "all",
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A classifier of timm, such as architecture = "vit_tiny_patch16_224"; `pretrained` downloads its weights.

    `train` = "head" freezes all but the last layer; `options` are timm's own, such as {img_size = 32}.
    """
    library = _imported("timm")
    channels, _, _ = picture_shape("timm", inputs)
    _refuse_unknown("timm", architecture, library.list_models())
    given = {"in_chans": channels, **(options or {})}
    model = library.create_model(architecture, pretrained=pretrained, num_classes=classes, **given)
    return _finished(model, "timm", architecture, channels, train)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise Invalid(
            f'model = "{name}" needs the package {name}, which is not installed: pip install {name}'
        ) from problem


def _refuse_unknown(library: str, architecture: str, known: list[str]) -> None:
    if architecture not in known:
        raise Invalid(f"model.architecture = {architecture!r} is no model of {library}{nearest(architecture, known)}")


def _last_linear(model: nn.Module) -> str:
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return names[-1] if names else ""


def _replace_head(model: nn.Module, classes: int) -> None:
    parent, _, name = _last_linear(model).rpartition(".")
    old = model.get_submodule(_last_linear(model))
    new = nn.Linear(old.in_features, classes, bias=old.bias is not None)  # type: ignore[arg-type]
    setattr(model.get_submodule(parent), name, new)


def _finished(model: nn.Module, library: str, architecture: str, channels: int, train: str) -> nn.Module:
    last = _last_linear(model)
    if not last:
        raise Invalid(f"{architecture} of {library} has no linear layer at its end: choose a classifier")
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    if first is not None and first.in_channels != channels:
        raise Invalid(
            f"{architecture} of {library} reads {first.in_channels} channels, and the data have {channels}: "
            "repeat the channel, or choose another model"
        )
    for part in model.modules():
        if getattr(part, "inplace", False):  # a value that others read may not be overwritten
            part.inplace = False  # type: ignore[assignment]
    if train == "head":
        model.requires_grad_(False).get_submodule(last).requires_grad_(True)
    return LibraryModel(model)
