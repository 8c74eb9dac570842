"""Models of dense layers only; examples of any shape are flattened."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from consilience.core.settings import Count, Decay
from consilience.models.arguments import Shape, factory, value_count
from consilience.models.layers import dropout as dropout_layer


class Perceptron(nn.Module):
    """Flatten, hidden dense layers with ReLU, and a linear head."""

    def __init__(self, sizes: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__()
        steps: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            steps += [nn.Linear(before, after), nn.ReLU(), dropout_layer(dropout)]
        self.hidden = nn.Sequential(*steps)
        self.head = nn.Linear(sizes[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        """[n, ...] -> [n, last hidden size]"""
        return self.hidden(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@factory
def logistic(*, inputs: Shape, classes: Count) -> nn.Module:
    """Multinomial logistic regression: one linear layer on the flattened example."""
    return Perceptron((value_count("logistic", inputs),), classes, 0.0)


@factory
def mlp(*, inputs: Shape, classes: Count, hidden: tuple[Count, ...] = (128, 128), dropout: Decay = 0.0) -> nn.Module:
    """Dense layers of the given hidden sizes with ReLU, each followed by `dropout`."""
    return Perceptron((value_count("mlp", inputs), *hidden), classes, dropout)
