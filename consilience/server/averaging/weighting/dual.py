"""FedSiam-DA's weights: the cosine between each model and the mean (Yang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.remote import each
from consilience.core.rounds import Diverged
from consilience.core.settings import Checked
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class DualWeights(Checked):
    """xi_k = cos(w_k, f) / sum_j cos(w_j, f), f = the mean of the w_j, or their mean by examples (`first_stage`).

    Models trained from the same model all point in almost the same direction, so after the first rounds these weights
    equal those of the plain mean to a few thousandths or less; `compare_on="updates"` compares w_k - w instead, whose
    directions do differ. A zero update has cosine 0; if all are zero, the weights are equal.
    """

    compare_on: Literal["weights", "updates"] = "weights"
    # Paper: "consistent with FedAvg, the weighted average", but eq (13) is 1/K. Here: 1/K by default.
    first_stage: Literal["uniform", "examples"] = "uniform"
    needs_each_reply = True  # cosines need every model

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Eqs (13) to (15) over all parameters, as one vector."""
        start = model["params"] if self.compare_on == "updates" else None
        cosine = cosines_to_mean(cohort.reply["model"]["params"], start, first_weights(cohort, self.first_stage))
        weights = dual_weights(cosine, cohort.ids.tolist(), f"of their {self.compare_on}")
        notes = {"cosine": torch.nan_to_num(cosine), "no_direction": cosine.isnan().sum()}
        return weights.to(cohort.examples.device), state, notes


def first_weights(cohort: Cohort, first_stage: Literal["uniform", "examples"]) -> Tensor:
    """[m] weights of the first aggregation."""
    counts = torch.ones_like(cohort.examples) if first_stage == "uniform" else cohort.examples
    return counts / counts.sum()


def cosines_to_mean(stacked: Tree, start: Tree | None, weights: Tensor) -> Tensor:
    """[m] cosines of stacked vectors [m, ...] (less `start`) with their weighted mean, in float64.

    NaN for a zero vector, 0 if only the mean is zero. Vectors are divided by powers of two first, so that no square
    overflows; tensors are converted to float64 one at a time.
    """
    names = [name for name, value in stacked.items() if value.numel()]
    if not names:
        return torch.full_like(weights, torch.nan)

    columns = [stacked[name] for name in names], [None if start is None else start[name] for name in names]
    scale = _power_of_two(torch.stack(each(_largest, *columns)).amax(0))  # [m]
    mean = each(_mean, *columns, given=(weights.to(scale.device) * (scale / scale.amax()), scale))
    mean_scale = _power_of_two(torch.stack([part.abs().amax() for part in mean]).amax())
    mean = [part / mean_scale for part in mean]
    product, square, mean_square = (torch.zeros_like(scale) for _ in range(3))
    for part, (along, length) in zip(mean, each(_products, *columns, mean, given=(scale,))):
        product += along
        square += length
        mean_square += part.square().sum()
    cosine = (product / (square.sqrt() * mean_square.sqrt())).clamp(-1, 1)
    return torch.where((square > 0) & (mean_square == 0), 0.0, cosine)


def _wide(stacked: Tensor, start: Tensor | None) -> Tensor:
    """[m, P] one tensor's rows, minus the start."""
    rows = stacked.flatten(1).to(torch.float64)
    return rows if start is None else rows - start.flatten().to(torch.float64)


def _largest(stacked: Tensor, start: Tensor | None) -> Tensor:
    """[m] the largest entry of each row."""
    return _wide(stacked, start).abs().amax(1)


def _mean(stacked: Tensor, start: Tensor | None, weights: Tensor, scale: Tensor) -> Tensor:
    """[P] the weighted mean of the rows, each divided by its scale."""
    return weights @ (_wide(stacked, start) / scale[:, None])


def _products(stacked: Tensor, start: Tensor | None, mean: Tensor, scale: Tensor) -> Tensor:
    """[2, m] products of the rows with the mean, and their squared lengths."""
    rows = _wide(stacked, start) / scale[:, None]
    return torch.stack([rows @ mean, rows.square().sum(1)])


def dual_weights(cosine: Tensor, ids: list[int], what: str) -> Tensor:
    """[m] cosines -> weights that sum to one, negative where a cosine is; equal if all updates are zero."""
    if bool(cosine.isnan().all()):
        return torch.full_like(cosine, 1 / len(cosine))
    cosine = torch.nan_to_num(cosine, nan=0.0)
    total = cosine.sum()
    if not bool(total > 0):
        found = ", ".join(f"{client}: {value:.3g}" for client, value in list(zip(ids, cosine.tolist()))[:8])
        raise Diverged(
            f"dual aggregation cannot weigh these clients: the cosines {what} with their mean (client: cosine) {found} "
            f"sum to {float(total):.3g}, not to more than 0; lower the learning rate, or use weighting = 'uniform'"
        )
    return cosine / total


def _power_of_two(size: Tensor) -> Tensor:
    """A power of two near each size, 1 for 0: dividing by it is exact."""
    return torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - 1)
