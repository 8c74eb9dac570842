"""Late fusion: features of several frozen encoders, projected one by one, concatenated and classified."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core.checks import Count, Decay
from consilience.models.arguments import factory, modality_sizes
from consilience.models.layers import dropout as dropout_layer


class LateFusion(nn.Module):
    """One projection per modality, ReLU, concatenation in order of name, dropout, linear head."""

    def __init__(self, sizes: dict[str, int], *, classes: int, projection: int, dropout: float) -> None:
        super().__init__()
        self.projections = nn.ModuleDict({name: nn.Linear(size, projection) for name, size in sizes.items()})
        self.dropout = dropout_layer(dropout)
        self.head = nn.Linear(projection * len(sizes), classes)

    def features(self, x: dict[str, Tensor]) -> Tensor:
        """{name: [n, size]} -> [n, projection * modalities]"""
        parts = [F.relu(project(x[name])) for name, project in self.projections.items()]
        return self.dropout(torch.cat(parts, -1))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.head(self.features(x))


@factory
def late_fusion(*, inputs: dict[str, Any], classes: Count, projection: Count = 256, dropout: Decay = 0.0) -> nn.Module:
    """Classifier on features of several modalities, e.g. inputs={"text": 384, "picture": 512}.

    The multimodal model of the SimProx paper: text and picture go through frozen encoders first
    (`consilience.models.encoders`), x is the dict of their outputs.
    """
    sizes = modality_sizes("late_fusion", inputs)
    return LateFusion(sizes, classes=classes, projection=projection, dropout=dropout)
