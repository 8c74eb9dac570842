"""Projection and prediction heads around any backbone, for siamese algorithms (MOON, FedSiam-DA)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from consilience.core.settings import Count
from consilience.models.arguments import Shape, factory
from consilience.models.backbones import backbone_named, head_shape


class SiameseNetwork(nn.Module):
    """x -> backbone -> projection z; logits = head(z); p = predict(z); all parts are sent and averaged."""

    def __init__(
        self, backbone: nn.Module, *, features: int, classes: int, projection: int, prediction_hidden: int
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, projection))
        self.prediction = nn.Sequential(
            nn.Linear(projection, prediction_hidden, bias=False),  # the batch norm has the bias
            nn.BatchNorm1d(prediction_hidden),
            nn.ReLU(),
            nn.Linear(prediction_hidden, projection),
        )
        self.head = nn.Linear(projection, classes)

    def features(self, x: Any) -> Tensor:
        """z [n, projection]: what the siamese losses compare and the classifier reads."""
        return self.projection(self.backbone.features(x))  # type: ignore[operator]

    def predict(self, z: Tensor) -> Tensor:
        """p = h(z) [n, projection]: the prediction head on one branch."""
        return self.prediction(z)

    def forward(self, x: Any) -> Tensor:
        return self.head(self.features(x))


def siamese_heads(
    backbone: nn.Module,
    features: int | None = None,
    *,
    classes: int | None = None,
    projection: int = 256,
    prediction_hidden: int | None = None,
) -> nn.Module:
    """A copy of `backbone` whose own head is replaced by projection, classifier and prediction heads.

    `features` (the length of `backbone.features(x)`) and `classes` default to those of the backbone's head.
    """
    # Paper: 2-layer projection with 256 outputs, 2-layer prediction with batch norm in its hidden layer;
    # hidden sizes and classifier are not given. Here: projection as MOON (hidden = features), prediction
    # hidden = a quarter of z as SimSiam, logits = linear(z) as MOON: FedSiam-DA builds on these two.
    if features is None or classes is None:
        size, outputs = head_shape(backbone)
        features, classes = features or size, classes or outputs
    backbone = copy.deepcopy(backbone)
    if isinstance(getattr(backbone, "head", None), nn.Module):
        backbone.head = nn.Identity()  # its parameters would never get a gradient, yet be sent
    return SiameseNetwork(
        backbone,
        features=features,
        classes=classes,
        projection=projection,
        prediction_hidden=prediction_hidden or max(projection // 4, 1),
    )


@factory
def siamese(
    *,
    inputs: Shape | dict[str, Any],
    classes: Count,
    backbone: str = "resnet18",
    backbone_options: Mapping[str, Any] | None = None,
    projection: Count = 256,
    prediction_hidden: Count | None = None,
) -> nn.Module:
    """Any model of the zoo with projection and prediction heads (FedSiam-DA: backbone="resnet50")."""
    made = backbone_named("siamese.backbone", backbone, inputs, classes, backbone_options)
    return siamese_heads(made, projection=projection, prediction_hidden=prediction_hidden)
