"""Checks on two rows, before a run begins, that model, data and algorithm are compatible."""

from __future__ import annotations

import functools
from typing import Any

import torch

from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import ChecksRows, capability
from consilience.core.federation import Federation
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.experiments.targets import refuse_wrong
from consilience.options.parts import made
from consilience.task.kinds import KINDS

_FIXES = {
    "same dtype": "; convert the features, such as by x.float(), or use a model of tokens if they are token numbers",
    "not tuple": "; forward must return one tensor",
}
"""Parts of torch's messages, and what to do."""


@torch.no_grad()
def try_model(task: Task, federation: Federation, model: str, data: str) -> Task:
    """Pass two rows through the model; a model that does not fit the data is refused with the reason.

    The task is returned with metrics for the number of classes.
    """
    refuse_wrong(task.kind, federation, None, data)
    x, y = tree.rows(federation.train.x, slice(0, 2)), federation.train.y[:2]
    start = task.start()
    floating = next((leaf.dtype for leaf in tree.leaves(start) if leaf.is_floating_point()), torch.get_default_dtype())
    # as engines do
    converted = tree.map_leaves(lambda leaf: leaf.to(floating) if leaf.is_floating_point() else leaf, x)
    start["params"] = tree.map_leaves(lambda value: value.detach().requires_grad_(), start["params"])
    try:
        with torch.enable_grad():
            output, _ = task.apply(start, converted, train=False)
            refuse_other_size(task, output, y, model, data)
            losses = task.losses(output, y)
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as problem:
        shapes = [f"{k}: {tuple(v.shape[1:])} {v.dtype}" for k, v in tree.flatten({"x": x, "y": y}).items()]
        reason = str(problem).partition("\n")[0]
        fix = next((fix for part, fix in _FIXES.items() if part in reason), "")
        raise Invalid(
            f"{model} with loss = {task.loss_name!r} does not fit {data} (a row is {', '.join(shapes)}): {reason}{fix}"
        ) from problem
    _try_draws(task, converted)
    if losses.shape != y.shape[:1]:
        how = "it must give one loss for each row, such as by reduction='none'"
        raise Invalid(f"loss = {task.loss_name!r} gives the shape {tuple(losses.shape)} for {len(y)} rows: {how}")
    if not losses.requires_grad:
        raise Invalid(
            f"loss = {task.loss_name!r} does not depend on the parameters of {model}: nothing can be learned; use "
            "operations that have a gradient (argmax, comparisons, .item() and .detach() have none)"
        )
    if not bool(losses.isfinite().all()):
        raise Invalid(
            f"loss = {task.loss_name!r} of {model} is {losses[~losses.isfinite()][0].item()} at the start, "
            f"before any training: check the loss, the initial parameters and the scale of {data}"
        )
    output = tree.map_leaves(torch.Tensor.detach, output)
    width = task.kind.outputs(y, federation.classes)
    if task.kind.multiclass:
        highest, outputs = int(federation.train.y.max()), output.shape[task.kind.class_axis] if output.dim() > 1 else 0
        if task.losses in task.kind.losses and highest >= outputs and highest != task.kind.ignored:
            row = federation.place_of(
                federation.train,
                int((federation.train.y == highest).reshape(len(federation.train.y), -1).any(1).nonzero()[0]),
            )
            raise Invalid(
                f"{model} has {outputs} outputs, but {data} have class number {highest} (training row {row}): "
                "give it more"
            )
        width = max(federation.classes or 0, outputs)
        if width == 1:
            raise Invalid(f"{data}: every training row has the class 0, so there is nothing to tell apart")
        refuse_wrong(task.kind, federation, width, data)
    task = task.knowing(width)
    task.metrics.try_on(output, y)
    return task


def refuse_other_size(task: Task, output: Any, y: torch.Tensor, model: str, data: str) -> None:
    """Refuse outputs of another size than the targets, where the kind of task says what they must be."""
    kind = task.kind
    if kind.name not in KINDS or task.losses not in kind.losses or not isinstance(output, torch.Tensor):
        return
    if kind.multiclass and output.dim() > 1:
        kind.knowing(output.shape[kind.class_axis])  # raises for a wrong number of class weights
    if not kind.multiclass and output.numel() != y.numel():
        have, need = output[:1].numel(), y[:1].numel()
        whole = need == 1 and bool((y == y.round()).all())
        right = "y.long()" if y.is_floating_point() else "y.squeeze(1)"
        classes = f"; class numbers must be one whole number a row, {right}" if whole else ""
        raise Invalid(
            f"{model} gives {have} numbers a row, but {data} have {need} targets: change its last layer{classes}"
        )
    if kind.axes is None:
        return
    axes = list(output.shape)
    if len(axes) == y.dim() + 1:
        del axes[kind.class_axis]
    if kind.multiclass and axes != list(y.shape):
        given, wanted = (" x ".join(map(str, shape[1:])) for shape in (axes, y.shape))
        what = "pixels" if kind.name == "dense" else "tokens"
        raise Invalid(f"{model} gives outputs for {given} {what}, but {data} have targets of {wanted}: make them equal")


def try_client(algorithm: Algorithm, task: Task, federation: Federation | None = None) -> Task:
    """The task as the clients train it; a model without the methods they call, or unsuitable rows, are refused."""
    prepared: Task = made("algorithm", functools.partial(algorithm.prepared, task), {})
    if federation is not None:
        reading = capability(algorithm.client, ChecksRows)
        if reading is not None:
            made("algorithm", functools.partial(reading.check_rows, tree.rows(federation.train.x, slice(0, 2))), {})
        made("algorithm", functools.partial(algorithm.client.work.check_targets, federation.train.y), {})
    return prepared


def _try_draws(task: Task, x: Any) -> None:
    """Refuse a model whose random numbers in training are not reproducible."""
    try:
        task.apply(task.start(), x, train=True, key=torch.zeros((), dtype=torch.int64))
    except Invalid:
        raise
    except Exception:  # other errors are raised in training, with the client's own rows
        return
