"""Models of several modalities: late fusion concatenates their features, early fusion their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core.settings import Count, Decay, Invalid, NonNegative, OnlyWith, Probability
from consilience.models.arguments import factory, modality_sizes, value_count
from consilience.models.augmentation import Augment
from consilience.models.backbones import backbone_named, head_shape
from consilience.models.encoders import IMAGENET_MEAN, IMAGENET_STD
from consilience.models.frozen import Constant
from consilience.models.layers import dropout as dropout_layer
from consilience.models.modalities import PRESENT, present_columns
from consilience.models.weights import load_weights


class LateFusion(nn.Module):
    """One projection per modality, ReLU, concatenation in order of name, dropout, linear head.

    A modality with an encoder goes through it first; the others are feature vectors already. With `masked`, the
    projection of a modality that a row does not have is 0: the head sees nothing of it, and nothing of it is trained.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        classes: int,
        projection: int,
        dropout: float,
        encoders: Mapping[str, nn.Module] | None = None,
        masked: bool = False,
    ) -> None:
        super().__init__()
        self.masked = masked
        self.encoders = nn.ModuleDict(encoders)
        self.projections = nn.ModuleDict({name: nn.Linear(size, projection) for name, size in sizes.items()})
        self.dropout = dropout_layer(dropout)
        self.head = nn.Linear(projection * len(sizes), classes)

    def features(self, x: dict[str, Tensor]) -> Tensor:
        """{name: [n, ...]} -> [n, projection * modalities]"""
        seen = {name: self.encoders[name](x[name]) if name in self.encoders else x[name] for name in self.projections}
        # a frozen encoder may compute in another precision
        dtype = self.head.weight.dtype
        parts = {name: F.relu(project(seen[name].to(dtype))) for name, project in self.projections.items()}
        if self.masked:
            here = present_columns(x[PRESENT].to(dtype), tuple(parts))
            parts = {name: part * here[name] for name, part in parts.items()}
        return self.dropout(torch.cat(list(parts.values()), -1))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.head(self.features(x))


class EarlyFusion(nn.Module):
    """All modalities flattened and concatenated in order of name, then one multilayer perceptron.

    With `masked`, a modality that a row does not have is 0, and a column for each modality says whether it is there.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        classes: int,
        hidden: Sequence[int],
        dropout: float,
        encoders: Mapping[str, nn.Module] | None = None,
        masked: bool = False,
    ) -> None:
        super().__init__()
        self.names, self.masked = tuple(sizes), masked
        self.encoders = nn.ModuleDict(encoders)
        widths = [sum(sizes.values()) + (len(sizes) if masked else 0), *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.dropout = dropout_layer(dropout)
        self.head = nn.Linear(widths[-1], classes)

    def features(self, x: dict[str, Tensor]) -> Tensor:
        """{name: [n, ...]} -> [n, last hidden width]"""
        dtype = self.head.weight.dtype
        seen = {name: self.encoders[name](x[name]) if name in self.encoders else x[name] for name in self.names}
        parts = {name: part.flatten(1).to(dtype) for name, part in seen.items()}
        values = list(parts.values())
        if self.masked:
            present = x[PRESENT].to(dtype)
            here = present_columns(present, self.names)
            values = [*(part * here[name] for name, part in parts.items()), present]
        z = torch.cat(values, -1)
        for layer in self.layers:
            z = F.relu(layer(z))
        return self.dropout(z)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.head(self.features(x))


class TokenEncoder(nn.Module):
    """Token numbers [n, length] -> the mean embedding of the tokens, 0 being padding: [n, size]."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)

    def forward(self, x: Tensor) -> Tensor:
        live = (x != 0).unsqueeze(-1).to(self.embedding.weight.dtype)
        return (self.embedding(x.long()) * live).sum(1) / live.sum(1).clamp(min=1)


class PictureEncoder(nn.Module):
    """Pictures in [0, 1]: varied in training, standardised by ImageNet's statistics, then a backbone's `features`."""

    def __init__(self, backbone: nn.Module, *, trained: bool, augment: nn.Module | None) -> None:
        super().__init__()
        self.augment = augment or nn.Identity()
        self.backbone = backbone if trained else Constant(backbone)
        self.trained = trained
        if trained:
            backbone.head = nn.Identity()  # its classifier is not used

    def forward(self, x: Tensor) -> Tensor:
        x = self.augment(x)
        x = torch.stack([(x[:, k] - IMAGENET_MEAN[k]) / IMAGENET_STD[k] for k in range(3)], 1)
        return self.backbone.features(x) if self.trained else self.backbone(x)  # type: ignore[operator]


@factory
def late_fusion(
    *,
    inputs: dict[str, Any],
    classes: Count,
    projection: Count = 256,
    dropout: Decay = 0.0,
    picture_encoder: str | None = None,
    picture_weights: str | None = None,
    picture_options: Annotated[Mapping[str, Any] | None, OnlyWith("picture_encoder")] = None,
    picture_trained: bool = False,
    flip: Probability = 0.0,
    jitter: Decay = 0.0,
    rotation: NonNegative = 0.0,
    tokens: Count | None = None,
) -> nn.Module:
    """Classifier on features of several modalities, e.g. inputs={"text": 384, "picture": 512}.

    The multimodal model of the SimProx paper; feature vectors come from frozen encoders (see `models.encoders`).
    Colour pictures [3, h, w] in [0, 1] need `picture_encoder`, a model of the zoo: frozen, with `picture_weights` from
    a file or else random ones, or `picture_trained`. `flip`, `jitter` and `rotation` vary them in training. `tokens` is
    the size of the vocabulary if the modality "text" holds token numbers. With an input "present" (a mask of
    modalities), a missing modality adds nothing to a row's features.
    """
    inputs, masked = _without_mask("late_fusion", inputs)
    words = _token_encoder("late_fusion", inputs, tokens, projection)
    inputs = {**inputs, **dict.fromkeys(words, projection)} if words else inputs
    known = inputs if isinstance(inputs, dict) else {}
    pictures = {name: shape for name, shape in known.items() if isinstance(shape, tuple) and len(shape) == 3}
    varied = bool(flip or jitter or rotation)
    if picture_encoder is None or not pictures:
        _refuse_idle(picture_encoder, picture_weights, varied or picture_trained, bool(pictures))
        sizes = modality_sizes("late_fusion", inputs)
        return LateFusion(sizes, classes=classes, projection=projection, dropout=dropout, encoders=words, masked=masked)
    encoders: dict[str, nn.Module] = dict(words)
    features: dict[str, Any] = {}
    for name, shape in pictures.items():
        if shape[0] != 3:
            raise Invalid(f"late_fusion.inputs.{name} = {shape!r} must be a colour picture, (3, height, width)")
        backbone = backbone_named("late_fusion.picture_encoder", picture_encoder, shape, classes, picture_options)
        if picture_weights is not None:
            load_weights(backbone, picture_weights, head=False)
        features[name] = head_shape(backbone)[0]
        augment = Augment(flip=flip, jitter=jitter, rotation=rotation) if varied else None
        encoders[name] = PictureEncoder(backbone, trained=picture_trained, augment=augment)
    sizes = modality_sizes("late_fusion", {**inputs, **features})
    return LateFusion(sizes, classes=classes, projection=projection, dropout=dropout, encoders=encoders, masked=masked)


@factory
def early_fusion(
    *,
    inputs: dict[str, Any],
    classes: Count,
    hidden: tuple[Count, ...] = (128,),
    dropout: Decay = 0.0,
    tokens: Count | None = None,
    embedding: Annotated[Count, OnlyWith("tokens")] = 64,
) -> nn.Module:
    """Multilayer perceptron on all modalities together, e.g. inputs={"text": 384, "picture": (3, 32, 32), "table": 9}.

    Pictures are flattened. `tokens` is the size of the vocabulary if the modality "text" holds token numbers, of which
    the mean embedding is taken. With an input "present" (a mask of modalities), a missing modality is 0 and marked.
    """
    if not hidden:
        raise Invalid("early_fusion.hidden = () has no layer: give at least one width, e.g. (128,)")
    inputs, masked = _without_mask("early_fusion", inputs)
    words = _token_encoder("early_fusion", inputs, tokens, embedding)
    flat = {
        name: value_count(f"early_fusion.inputs.{name}", shape) if isinstance(shape, tuple) else shape
        for name, shape in (inputs.items() if isinstance(inputs, dict) else ())
    }
    sizes = modality_sizes("early_fusion", {**flat, **dict.fromkeys(words, embedding)} or inputs)
    return EarlyFusion(sizes, classes=classes, hidden=hidden, dropout=dropout, encoders=words, masked=masked)


def _without_mask(model: str, inputs: Any) -> tuple[Any, bool]:
    """The modalities, and whether rows have a mask of present modalities."""
    if not isinstance(inputs, dict) or PRESENT not in inputs:
        return inputs, False
    rest = {name: shape for name, shape in inputs.items() if name != PRESENT}
    mask = inputs[PRESENT]
    if (mask if isinstance(mask, int) else tuple(mask)) not in (len(rest), (len(rest),)):
        names = ", ".join(sorted(rest))
        raise Invalid(f"{model}.inputs.{PRESENT} = {mask!r} must be a mask of the {len(rest)} modalities ({names})")
    return rest, True


def _token_encoder(model: str, inputs: Any, tokens: int | None, size: int) -> dict[str, nn.Module]:
    """An encoder of the modality "text" where it holds token numbers."""
    if tokens is None:
        return {}
    if not isinstance(inputs, dict) or "text" not in inputs:
        raise Invalid(f"{model}.tokens = {tokens} is for a modality named 'text', which these inputs do not have")
    return {"text": TokenEncoder(tokens, size)}


def _refuse_idle(encoder: str | None, weights: str | None, other: bool, pictures: bool) -> None:
    """Refuse picture options if there are no pictures to encode."""
    if pictures:  # `modality_sizes` raises with the fix
        return
    if encoder is not None or weights is not None or other:
        raise Invalid(
            "late_fusion.picture_encoder, picture_weights, picture_trained, flip, jitter and rotation are for raw "
            "pictures (3, height, width), but every modality here is a feature vector already: leave them out"
        )
