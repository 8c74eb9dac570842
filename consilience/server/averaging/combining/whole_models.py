"""Helpers for combining rules on whole models: distances, coordinates and means."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from consilience.core.remote import each
from consilience.core.tree import Tree, map_rows, rows
from consilience.server.averaging.combining.coordinate_wise import median
from consilience.server.averaging.combining.weighted_mean import weighted_mean
from consilience.server.geometry import geometry


def distances(models: Tree) -> np.ndarray:
    """[m, m] float64 distances over the parameters, on the host, exactly symmetric; infinite where unusable."""
    params = models["params"]
    found = geometry.distances(params, rows(params, 0)).cpu().numpy()
    return np.nan_to_num((found + found.T) / 2, nan=np.inf, posinf=np.inf)  # rounding must not break a tie


def least(values: np.ndarray, count: int) -> np.ndarray:
    """[..., count] ascending places of the smallest values along the last axis.

    Ties at the boundary are resolved by NumPy's argpartition, as in `byzfl`: different models do not tie exactly after
    training, and for copies of one model the choice has no effect.
    """
    return np.sort(np.argpartition(values, count - 1, axis=-1)[..., :count], axis=-1)


def coordinates(models: Tree, centre: Tree) -> Tensor:
    """[m, r] the models minus the centre in an orthonormal basis of their span: same distances, r <= m.

    Iterations then cost m^2 instead of m P. A QR factorisation keeps the precision of every model, where a Gram matrix
    would lose that of near models if another is far away.
    """
    names = [name for name, value in models["params"].items() if value.numel()]
    factors = each(_factor, [models["params"][name] for name in names], [centre["params"][name] for name in names])
    return torch.linalg.qr(torch.cat(factors), mode="r").R.T


def _factor(value: Tensor, centre: Tensor) -> Tensor:
    """[min(P, m), m] one tensor's part of the models minus the centre, in a basis of its span."""
    flat = value.reshape(len(value), -1).to(torch.float64) - centre.reshape(1, -1)
    return torch.linalg.qr(flat.T, mode="r").R


def mean_of(models: Tree, weights: Tensor) -> Tree:
    """The mean of the parameters in float64, and the median of the buffers; models of weight 0 are skipped."""
    used = torch.nonzero(weights).flatten()
    params = map_rows(_mean, models["params"], given=(used, weights[used]))
    return {"params": params, "buffers": middle_buffers(models)}


def _mean(stacked: Tensor, used: Tensor, weights: Tensor) -> Tensor:
    return weighted_mean(stacked[used].to(torch.float64), weights).to(stacked.dtype)


def middle_buffers(models: Tree) -> Tree:
    """Coordinate-wise medians of all replies' buffers.

    Distances are over parameters only (a running variance would dominate them), so the buffers of a model that looks
    harmless may hold anything.
    """
    return map_rows(median, models["buffers"])
