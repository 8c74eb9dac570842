"""One tiny federation and model for every kind of task, which tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from consilience.core.federation import Federation
from consilience.models import build
from consilience.task.kinds import FACTORIES
from consilience.task.losses import IGNORED
from consilience.task.task import Task

SIZES = (6, 3, 5, 1, 4)


class Case(NamedTuple):
    """Rows of one client, and the model for them."""

    rows: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    model: str
    inputs: tuple[int, ...]
    outputs: int
    options: dict[str, object]


def _table(targets: Callable[[Tensor], Tensor], count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=draw)
    return x, targets(x)


def _text(shift: bool, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randint(1, 7, (count, 5), generator=draw)
    x[:, 4] = 0
    y = torch.where(x == 0, IGNORED, x if shift else x % 3)
    return x, y


def _pictures(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 1, 4, 4, generator=draw)
    y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    y[:, 0, 0] = IGNORED
    return x, y


MLP = {"hidden": (6,)}
TEXT = {"vocabulary": 7, "width": 4, "layers": 1, "heads": 1}
CASES: dict[str, Case] = {
    "classification": Case(functools.partial(_table, lambda x: (x[:, 0] > 0).long()), "mlp", (4,), 2, MLP),
    "binary": Case(functools.partial(_table, lambda x: (x[:, 0] > 0).long()), "mlp", (4,), 1, MLP),
    "multi_label": Case(functools.partial(_table, lambda x: (x[:, :3] > 0).long()), "mlp", (4,), 3, MLP),
    "regression": Case(functools.partial(_table, lambda x: x[:, :2] * 2), "mlp", (4,), 2, MLP),
    "tokens": Case(functools.partial(_text, False), "token_transformer", (5,), 3, {**TEXT, "causal": False}),
    "next_token": Case(functools.partial(_text, True), "token_transformer", (5,), 7, TEXT),
    "dense": Case(_pictures, "small_unet", (1, 4, 4), 3, {"width": 2}),
}
assert CASES.keys() == FACTORIES.keys()


def federation(kind: str) -> Federation:
    """Five clients, each with test rows of its own."""
    draw = torch.Generator().manual_seed(3)
    rows = CASES[kind].rows
    tests = [rows(4, draw) for _ in SIZES]
    return Federation.from_clients([rows(size, draw) for size in SIZES], client_tests=tests)


def module(kind: str) -> torch.nn.Module:
    """The model, with the same start every time."""
    case = CASES[kind]
    return build(case.model, case.inputs, case.outputs, seed=1, **case.options)


def task(kind: str, **settings: object) -> Task:
    """The model with its kind of task."""
    return Task(module(kind), kind, **settings)  # type: ignore[arg-type]
