"""The classifier on top of a model and a small generator of its inputs, used by FedGen's clients and server."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.core import rng
from consilience.core.settings import Invalid
from consilience.core.tree import Tree


class Classifier(NamedTuple):
    """The names of the last layer's weight [..., C, d] and bias [..., C]."""

    weight: str
    bias: str | None

    def logits(self, params: Tree, z: Tensor) -> Tensor:
        """[n, d] -> [n, C]."""
        return F.linear(z, params[self.weight], None if self.bias is None else params[self.bias])


def classifier(params: Tree) -> Classifier:
    """The last layer that the module defines, which must be linear."""
    layer = next(reversed(params)).rpartition(".")[0]
    mine = {name: leaf for name, leaf in params.items() if name.rpartition(".")[0] == layer}
    matrices = [name for name, leaf in mine.items() if leaf.dim() == 2]
    vectors = [name for name, leaf in mine.items() if leaf.dim() == 1]
    fitting = len(matrices) == 1 and len(mine) == 1 + len(vectors) and len(vectors) <= 1
    if not fitting or any(len(mine[name]) != len(mine[matrices[0]]) for name in vectors):
        raise Invalid(f"the model's last layer ({', '.join(mine)}) is not a linear classifier, which is needed here")
    return Classifier(matrices[0], vectors[0] if vectors else None)


def new_generator(classes: int, latent: int, *, noise: int, hidden: int, like: Tensor) -> Tree:
    """z = V relu(U_y + W e + b) + a, with He's initial values, the same every time."""
    sizes = {"label": (classes, hidden), "noise": (noise, hidden), "output": (hidden, latent)}
    made: Tree = {}
    for name, (rows, columns) in sizes.items():
        draws = rng.normals(torch.tensor(rng.key(0, "generator", name)), rows * columns)
        scale = (2 / (rows if name == "output" else noise + 1)) ** 0.5
        made[name] = (scale * draws.reshape(rows, columns)).to(like)
    return {**made, "bias": torch.zeros(hidden).to(like), "shift": torch.zeros(latent).to(like)}


def generate(params: Tree, labels: Tensor, noise: Tensor) -> Tensor:
    """[n] labels, [n, e] noise -> [n, d] features."""
    hidden = F.relu(params["label"][labels] + noise @ params["noise"] + params["bias"])
    return hidden @ params["output"] + params["shift"]


def draw_labels(shares: Tensor, key: Tensor, count: int) -> Tensor:
    """[..., count] class numbers for each key, drawn by [C] shares, which sum to one."""
    return labels_at(shares, rng.uniforms(key, count))


def labels_at(shares: Tensor, places: Tensor) -> Tensor:
    """The class numbers whose shares of [0, 1) hold these places."""
    edges = shares.to(torch.float64).cumsum(0)[:-1]
    return (places.unsqueeze(-1) >= edges).sum(-1)
