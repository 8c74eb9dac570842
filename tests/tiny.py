"""Small federations, models, engines and comparisons that the tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.tree import Tree
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.lanes.cpu import Threads
from consilience.models.adapted import LoRALinear
from consilience.models.siamese import siamese_heads
from consilience.task.task import Task

SIZES = (9, 4, 1, 12, 6)  # five clients of unequal size, one with a single row
CLASSES = 3


def federation(sizes: Sequence[int] = SIZES, *, seed: int = 0, side: int = 6, test: int = 3) -> Federation:
    """Pictures [1, side, side] whose mean says the class; each client has `test` test rows of its own."""
    draw = torch.Generator().manual_seed(seed)

    def client(rows: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, CLASSES, (rows,), generator=draw)
        x = torch.randn(rows, 1, side, side, generator=draw, dtype=torch.float64)
        return x + y.view(-1, 1, 1, 1) - 1.0, y

    clients = [client(rows) for rows in sizes]
    return Federation.from_clients(clients, client_tests=[client(test) for _ in sizes], classes=CLASSES)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module initialised from a seed, leaving torch's global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def convnet() -> nn.Module:
    """Convolution, batch norm over pixels and over rows, dropout.

    With the usual eps of 1e-5, normalising a batch of two rows magnifies rounding by thousands: a larger one keeps the
    model well-conditioned, so that lanes can be compared at 1e-12.
    """
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.BatchNorm2d(3, eps=0.01),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(27, 8),
            nn.BatchNorm1d(8, eps=0.01),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(8, CLASSES),
        )
    )


def mlp() -> nn.Module:
    """Two dense layers."""
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, CLASSES)))


MODELS = {"convnet": convnet, "mlp": mlp}


def plain_convnet() -> nn.Module:
    """Convolution, group norm, dropout: nothing that keeps statistics of the data."""
    layers = lambda: (nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3, eps=0.01), nn.ReLU(), nn.MaxPool2d(2))  # noqa: E731
    return seeded(lambda: nn.Sequential(*layers(), nn.Flatten(), nn.Dropout(0.25), nn.Linear(27, CLASSES)))


MODELS_WITHOUT_STATISTICS = {"convnet": plain_convnet, "mlp": mlp}


class Backbone(nn.Module):
    """A chain of layers as features and a linear head."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.features, self.head = layers[:-1], layers[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def with_heads(build: Callable[[], nn.Module]) -> nn.Module:
    """A tiny model with projection and prediction heads; see `convnet` for the eps of its batch norm."""
    model = seeded(lambda: siamese_heads(Backbone(build()), projection=4))  # type: ignore[arg-type]
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.eps = 0.01
    return model


MODELS_WITH_HEADS = {name: functools.partial(with_heads, build) for name, build in MODELS.items()}


def lora_mlp(rank: int = 2) -> nn.Module:
    """Two frozen dense layers with adapters and a trained head."""

    def build() -> nn.Module:
        layers = [LoRALinear(nn.Linear(sizes[0], sizes[1]), rank, 4.0) for sizes in ((36, 8), (8, 8))]
        return nn.Sequential(nn.Flatten(), layers[0], nn.Tanh(), layers[1], nn.Tanh(), nn.Linear(8, CLASSES))

    return seeded(build)


def lora_convnet() -> nn.Module:
    """The convolutional network, in which the first dense layer is frozen and has an adapter."""
    layers = list(convnet())
    return seeded(lambda: nn.Sequential(*layers[:5], LoRALinear(layers[5], 2, 4.0), *layers[6:]))


MODELS_WITH_ADAPTERS = {"convnet": lora_convnet, "mlp": lora_mlp}


def module_for(algorithm: Algorithm, build: Callable[[], nn.Module]) -> nn.Module:
    """The module in the form that an algorithm trains."""
    return algorithm.prepared(Task(build())).module


def engine(model: Callable[[], nn.Module] = mlp, data: Federation | None = None, **options: Any) -> Vectorised:
    """A float64 CPU engine; the serial lane unless told otherwise, three workers in the streams lane."""
    options = {"device": "cpu", "dtype": "float64", "lane": "serial", "clients_at_once": 64, **options}
    workers = options.pop("workers", 3)
    made = Vectorised(Task(model()), federation() if data is None else data, **options)
    made._tuner._lanes["streams"] = Threads(workers)  # whatever the number of cores here
    return made


def structure(value: Tree) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes."""
    return {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in tree.flatten(value).items()}


def same(a: Tree, b: Tree) -> bool:
    """Bit-equal: same names, shapes, dtypes and values (NaN equals NaN)."""
    left, right = tree.flatten(a), tree.flatten(b)
    if structure(a) != structure(b):
        return False
    return all(torch.equal(torch.nan_to_num(left[n], 7.0), torch.nan_to_num(right[n], 7.0)) for n in left)


def gap(a: Tree, b: Tree) -> float:
    """The largest difference, relative to values above one in size; structures must agree."""
    assert structure(a) == structure(b)
    left, right = tree.flatten(a), tree.flatten(b)
    largest = 0.0
    for name, value in left.items():
        if value.numel():
            one, other = value.to(torch.float64), right[name].to(torch.float64)
            difference = (one - other).abs() / other.abs().clamp(min=1)
            largest = max(largest, float(torch.nan_to_num(difference, nan=float("inf")).max()))
    return largest


def finite(value: Tree) -> bool:
    """Whether every floating value is finite."""
    return all(bool(leaf.isfinite().all()) for leaf in tree.leaves(value) if leaf.is_floating_point())
