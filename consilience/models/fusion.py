"""Late fusion: features of several encoders, projected one by one, concatenated and classified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core.settings import Count, Decay, Invalid, NonNegative, Probability
from consilience.models.arguments import factory, modality_sizes
from consilience.models.augmentation import Augment
from consilience.models.backbones import backbone_named, head_shape
from consilience.models.encoders import IMAGENET_MEAN, IMAGENET_STD
from consilience.models.frozen import Constant
from consilience.models.layers import dropout as dropout_layer
from consilience.models.weights import load_weights


class LateFusion(nn.Module):
    """One projection per modality, ReLU, concatenation in order of name, dropout, linear head.

    A modality with an encoder goes through it first; the others are feature vectors already.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        classes: int,
        projection: int,
        dropout: float,
        encoders: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.projections = nn.ModuleDict({name: nn.Linear(size, projection) for name, size in sizes.items()})
        self.dropout = dropout_layer(dropout)
        self.head = nn.Linear(projection * len(sizes), classes)

    def features(self, x: dict[str, Tensor]) -> Tensor:
        """{name: [n, ...]} -> [n, projection * modalities]"""
        seen = {name: self.encoders[name](x[name]) if name in self.encoders else x[name] for name in self.projections}
        # a frozen encoder may compute in another precision
        parts = [F.relu(project(seen[name].to(self.head.weight.dtype))) for name, project in self.projections.items()]
        return self.dropout(torch.cat(parts, -1))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.head(self.features(x))


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
    picture_options: Mapping[str, Any] | None = None,
    picture_trained: bool = False,
    flip: Probability = 0.0,
    jitter: Decay = 0.0,
    rotation: NonNegative = 0.0,
) -> nn.Module:
    """Classifier on features of several modalities, e.g. inputs={"text": 384, "picture": 512}.

    The multimodal model of the SimProx paper; feature vectors come from frozen encoders (see `models.encoders`).
    Colour pictures [3, h, w] in [0, 1] need `picture_encoder`, a model of the zoo: frozen, with `picture_weights` from
    a file or else random ones, or `picture_trained`. `flip`, `jitter` and `rotation` vary them in training.
    """
    known = inputs if isinstance(inputs, dict) else {}
    pictures = {name: shape for name, shape in known.items() if isinstance(shape, tuple) and len(shape) == 3}
    varied = bool(flip or jitter or rotation)
    if picture_encoder is None or not pictures:
        _refuse_idle(picture_encoder, picture_weights, varied or picture_trained, bool(pictures))
        sizes = modality_sizes("late_fusion", inputs)
        return LateFusion(sizes, classes=classes, projection=projection, dropout=dropout)
    encoders: dict[str, nn.Module] = {}
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
    return LateFusion(sizes, classes=classes, projection=projection, dropout=dropout, encoders=encoders)


def _refuse_idle(encoder: str | None, weights: str | None, other: bool, pictures: bool) -> None:
    """Refuse options about pictures where there are none to encode here."""
    if pictures:  # `modality_sizes` says what to do
        return
    if encoder is not None or weights is not None or other:
        raise Invalid(
            "late_fusion.picture_encoder, picture_weights, picture_trained, flip, jitter and rotation are for raw "
            "pictures (3, height, width), but every modality here is a feature vector already: leave them out"
        )
