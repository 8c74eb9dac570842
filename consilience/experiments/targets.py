"""Refuses targets and weights that do not fit the kind of task, before anything is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.core.federation import Federation, Rows
from consilience.core.kind import Kind
from consilience.core.settings import Invalid


def refuse_wrong(kind: Kind, federation: Federation, width: int | None, where: str) -> None:
    """Refuse targets and weights that are not of this kind, by client and row, before anything is trained.

    width: the number of outputs for a row or an entry, where that is the number of classes; else None.
    """
    for part, rows in (("training", federation.train), ("test", federation.test)):
        if rows is None or not len(rows.y):
            continue
        _refuse_shape(kind, rows.y, where)
        wrong = _wrong(kind, rows.y, width)
        if wrong is not None:
            row, reason = wrong
            raise Invalid(f"{where}: {part} row {federation.place_of(rows, row)} {reason}")
        if kind.entries is not None:
            _refuse_uncounted(kind, federation, rows, part, where)
    _refuse_weights(federation, where)


def _refuse_shape(kind: Kind, y: Tensor, where: str) -> None:
    if kind.multiclass and (y.is_floating_point() or y.dtype is torch.bool):
        fitting = "binary" if y.dtype is torch.bool else "regression"
        given = str(y.dtype).removeprefix("torch.")
        raise Invalid(
            f"{where}: {kind.name} needs class numbers, but the targets are {given}: use kind='{fitting}', or .long()"
        )
    if kind.axes is not None and y.dim() != 1 + kind.axes:
        wanted = {"multi_label": "[rows, labels]", "dense": "[rows, height, width]"}.get(kind.name, "[rows, length]")
        raise Invalid(f"{where}: targets of shape {tuple(y.shape)} are not {wanted}, as {kind.name} needs them")
    if kind.axes is not None and not y[:1].numel():
        raise Invalid(f"{where}: targets of shape {tuple(y.shape)} are empty: remove empty sequences and pictures")


def _wrong(kind: Kind, y: Tensor, width: int | None) -> tuple[int, str] | None:
    """(row, problem) of the first target that does not fit the kind."""
    if y.is_floating_point() and not bool(y.sum().isfinite()):
        row = _first(~y.isfinite())
        if row is not None:
            return row, "has a target that is NaN or infinite: remove the row, or fill in the value"
    counts = torch.ones_like(y, dtype=torch.bool) if kind.ignored is None else y != kind.ignored
    ignored = "" if kind.ignored is None else f" (ignore_index = {kind.ignored} is what does not count)"
    if kind.yes_no:
        neither = counts & (y != 0) & (y != 1)
        row = _first(neither) if bool(neither.any()) else None
        if row is not None:
            return row, f"has the target {_value(y, row, neither)}: {kind.name} needs 0 or 1{ignored}"
    if kind.multiclass and width is not None:
        outside = counts & ((y < 0) | (y >= width))
        row = _first(outside) if bool(outside.any()) else None
        if row is not None:
            value = _value(y, row, outside)
            return row, f"has the class number {value}, and classes are 0 .. {width - 1}{ignored}"
    return None


def _first(wrong: Tensor) -> int | None:
    rows = torch.nonzero(wrong.reshape(len(wrong), -1).any(1))
    return int(rows[0]) if len(rows) else None


def _value(y: Tensor, row: int, wrong: Tensor) -> float | int:
    return y[row][wrong[row]].reshape(-1)[0].item()


def _refuse_uncounted(kind: Kind, federation: Federation, rows: Rows, part: str, where: str) -> None:
    """Refuse sequences without a target that counts, and clients without one."""
    assert kind.entries is not None
    counts = kind.entries(rows.y).reshape(len(rows.y), -1).any(1)
    if bool(counts.all()):
        return
    if kind.name in ("tokens", "next_token"):
        row = federation.place_of(rows, int(torch.nonzero(~counts)[0]))
        raise Invalid(f"{where}: {part} row {row} has no target that counts: remove empty sequences")
    totals = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cpu().cumsum(0)])
    owned = totals[rows.starts + rows.sizes] - totals[rows.starts]
    for client in torch.nonzero((owned == 0) & (rows.sizes > 0)).flatten().tolist():
        raise Invalid(
            f"{where}: all {part} targets of client {federation.names[client]!r} are ignore_index = {kind.ignored}: "
            "leave the client out, or label some of its rows"
        )


def _refuse_weights(federation: Federation, where: str) -> None:
    weight = federation.train.weight
    if weight is None:
        return
    row = _first(~(weight.isfinite() & (weight >= 0)))
    if row is not None:
        place = federation.place_of(federation.train, row)
        raise Invalid(f"{where}: training row {place} has the weight {weight[row].item()}: weights are numbers >= 0")
    for client, (start, size) in enumerate(zip(federation.train.starts.tolist(), federation.train.sizes.tolist())):
        if size and not bool((weight[start : start + size] > 0).any()):
            raise Invalid(f"{where}: all rows of client {federation.names[client]!r} have the weight 0: leave it out")
