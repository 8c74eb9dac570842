"""Shared by clients that learn synthetic rows: row shape, initial rows, and class membership of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from consilience.client.solvers import Solver
from consilience.core import rng
from consilience.core.plans import Batch
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.task.latent import classifier

Start = Literal["noise", "means", "rows"]
"""noise: standard normal numbers; means: random averages of rows of the class; rows: real rows of the class."""


def row_shape(params: Tree, shape: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of one row: as given, or the input size of the model's first dense layer."""
    if shape is not None:
        return tuple(shape)
    first = next(iter(params.values()))
    if first.dim() != 2:
        raise Invalid("shape is missing: say what one row looks like, such as shape = [1, 28, 28]")
    return (first.shape[1],)


def no_rows_yet(params: Tree, per_class: int, shape: Sequence[int] | None, solver: Solver) -> Tree:
    """The carry before the first step: zero rows [C, n, ...], which that step initialises, and zero sums."""
    head = params[classifier(params).weight]
    rows = torch.zeros((len(head), per_class, *row_shape(params, shape)), dtype=head.dtype, device=head.device)
    none = torch.zeros(len(head), dtype=torch.float64, device=head.device)
    return {"x": rows, "solver": solver.init({"x": rows}), "labels": none, "loss": none[0], "steps": none[0]}


def first_rows(x: Tensor, batch: Batch, start: Start) -> Tensor:
    """[C, n, ...] initial rows, from the batch if `start` says so (any rows for a class that does not occur)."""
    if not isinstance(batch.x, Tensor) or not batch.x.is_floating_point():
        parts = isinstance(batch.x, dict)
        found = "several parts: load one alone" if parts else "whole numbers: load features, such as n-grams of texts"
        raise Invalid(f"condensed rows are tensors of floats, but the rows of this data set are {found}")
    own, wanted = batch.x.shape[1:], x.shape[2:]
    if own != wanted and wanted != (own.numel(),):  # a model's first dense layer may flatten its rows
        raise Invalid(f"shape = {list(wanted)} of a condensed row does not fit rows of shape {list(own)}: leave it out")
    keys = rng.fold(rng.fold(batch.key, 2**33), torch.arange(x.shape[0] * x.shape[1], device=x.device))
    if start == "means":
        return _averages(x, batch, keys)
    noise = rng.normals(keys, math.prod(x.shape[2:])).reshape(x.shape).to(x.dtype)
    if start == "noise":
        return noise
    live = torch.ones_like(batch.y) if batch.mask is None else batch.mask
    every = torch.arange(len(x), device=batch.y.device).unsqueeze(1)
    member = (batch.y == every) & (live > 0)  # [C, B]
    order = member.to(torch.int64).argsort(dim=1, descending=True, stable=True)  # members first
    turn = torch.arange(x.shape[1], device=x.device) % member.sum(1, keepdim=True).clamp(min=1)  # [C, n]
    # a little noise distinguishes rows that were taken twice
    return batch.x[order.gather(1, turn)].reshape(x.shape) + 0.01 * noise


def membership(batch: Batch, classes: int, dtype: torch.dtype) -> Tensor:
    """[B, C] 1 where a live row is of the class."""
    every = torch.arange(classes, device=batch.y.device)
    member = (batch.y.unsqueeze(1) == every).to(dtype)
    return member if batch.mask is None else member * batch.mask.unsqueeze(1)


def outputs_and_features(task: Task, model: Tree, x: Tensor) -> Tensor:
    """[n, d] the output, concatenated with the features if the module has them."""
    output = task.apply(model, x, train=False)[0]
    if not hasattr(task.module, "features"):
        return output
    return torch.cat([output, task.features(model, x)], 1)


def _averages(x: Tensor, batch: Batch, keys: Tensor) -> Tensor:
    """[C, n, ...] means of a random half of the class's rows in the batch, or of all of them if none is drawn."""
    member = membership(batch, len(x), x.dtype).T.unsqueeze(1)  # [C, 1, B]
    draws = rng.uniforms(keys, len(batch.y)).reshape(x.shape[0], x.shape[1], -1)
    drawn = member * (draws < 0.5).to(x.dtype)  # [C, n, B]
    chosen = torch.where(drawn.sum(2, keepdim=True) > 0, drawn, member.expand_as(drawn))
    shares = chosen / chosen.sum(2, keepdim=True).clamp(min=1)
    return (shares @ batch.x.flatten(1).to(x.dtype)).reshape(x.shape)
