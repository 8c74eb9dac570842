"""Dense layers with low-rank adapters: the layer's own weight is frozen, the adapter is trained."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor, nn

from consilience.core.settings import Count, Invalid, Positive
from consilience.models.arguments import Shape, factory, value_count


class LoRALinear(nn.Module):
    """W x + b + scaling B A x with W and b frozen (Hu et al. 2022); names, initial values and scaling as in `peft`.

    A [r, in] is drawn as a linear layer's weight is, B [out, r] is 0, scaling is alpha / r.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


class AdaptedPerceptron(nn.Module):
    """Flatten, frozen random dense layers with adapters and ReLU, and a trained linear head."""

    def __init__(self, sizes: tuple[int, ...], classes: int, rank: int, alpha: float) -> None:
        super().__init__()
        steps: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            steps += [LoRALinear(nn.Linear(before, after), rank, alpha), nn.ReLU()]
        self.hidden = nn.Sequential(*steps)
        self.head = nn.Linear(sizes[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        """[n, ...] -> [n, last hidden size]"""
        return self.hidden(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@factory
def lora_mlp(
    *, inputs: Shape, classes: Count, hidden: tuple[Count, ...] = (128, 128), rank: Count = 8, alpha: Positive = 8.0
) -> nn.Module:
    """Frozen random dense layers of the given sizes, each with an adapter of this rank, and a trained head.

    A small model for the rules that average adapters; the random layers are drawn from the model seed, the same at
    every client. The adapter adds alpha / rank B A x.
    """
    sizes = (value_count("lora_mlp", inputs), *hidden)
    if rank > min(sizes):
        raise Invalid(f"lora_mlp.rank = {rank} is above the smallest layer's {min(sizes)}: use at most that")
    return AdaptedPerceptron(sizes, classes, rank, alpha)
