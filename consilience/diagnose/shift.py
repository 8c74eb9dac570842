"""Feature shift: whether clients' inputs differ by more than chance, and by more than their labels explain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.rng import host

DEALS = 99  # random assignments: the smallest p is 0.01
MOST_ROWS = 6000  # of all clients together
FEATURES = 128

Encoder = Callable[[Any], Tensor]
"""[n, ...] inputs -> [n, d] features."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureShift:
    """The share of the features' variance that lies between clients, and that of random assignments.

    `given_label` compares clients within each class, so that label skew alone does not count as shift.
    """

    encoder: str
    rows: int  # looked at
    share: float
    chance: float
    p: float
    given_label: float | None
    given_label_chance: float | None
    given_label_p: float | None
    distances: np.ndarray  # [K] |mean of the client - mean of all| / deviation within clients; NaN without rows

    @property
    def excess(self) -> float:
        """The share beyond chance, within classes if labels are known."""
        if self.given_label is None or self.given_label_chance is None:
            return max(0.0, self.share - self.chance)
        return max(0.0, self.given_label - self.given_label_chance)

    @property
    def is_shown(self) -> bool:
        """Whether the shift is significant."""
        p = self.p if self.given_label_p is None else self.given_label_p
        return p <= 0.01


def feature_shift(rows: Rows, encoder: Encoder, name: str, *, labels: bool, seed: int) -> FeatureShift:
    """The shift of all clients' training rows, or of a sample within the limit."""
    picked, owners = sample(rows, MOST_ROWS, seed)
    features = standardised(encoder(tree.rows(rows.x, picked)))
    clients = len(rows.sizes)
    classes = rows.y[picked].cpu().numpy().astype(np.int64) if labels else None
    rng = host(seed, "feature deals")
    share = between_share(features, owners, clients)
    plain = [between_share(features, rng.permutation(owners), clients) for _ in range(DEALS)]
    given = chance = p_given = None
    if classes is not None:
        residual = features - group_means(features, classes, int(classes.max()) + 1)[classes]
        cells = owners + clients * classes  # a client's rows of one class
        many = clients * (int(classes.max()) + 1)
        given = between_share(residual, cells, many)
        dealt = [between_share(residual, _dealt_within(cells, classes, rng), many) for _ in range(DEALS)]
        chance, p_given = float(np.mean(dealt)), chance_of(given, dealt)
    return FeatureShift(
        encoder=name,
        rows=len(picked),
        share=share,
        chance=float(np.mean(plain)),
        p=chance_of(share, plain),
        given_label=given,
        given_label_chance=chance,
        given_label_p=p_given,
        distances=client_distances(features, owners, clients),
    )


def between_share(features: np.ndarray, owners: np.ndarray, groups: int) -> float:
    """sum_k n_k |m_k - m|^2 / sum_i |f_i - m|^2, from 0 (equal means) to 1 (nothing varies within a group)."""
    centred = features - features.mean(0)
    total = float((centred**2).sum())
    if total == 0:
        return 0.0
    sizes = np.bincount(owners, minlength=groups)
    means = group_means(centred, owners, groups)
    return float(sizes @ (means**2).sum(1) / total)


def group_means(features: np.ndarray, owners: np.ndarray, groups: int) -> np.ndarray:
    """[groups, d]; 0 for a group without rows."""
    sums = np.zeros((groups, features.shape[1]))
    np.add.at(sums, owners, features)
    return sums / np.maximum(np.bincount(owners, minlength=groups), 1)[:, None]


def client_distances(features: np.ndarray, owners: np.ndarray, clients: int) -> np.ndarray:
    """[K] distance of each client's mean from the overall mean, in standard deviations within clients."""
    means = group_means(features, owners, clients)
    within = float(np.sqrt(((features - means[owners]) ** 2).sum(1).mean()))
    far = np.linalg.norm(means - features.mean(0), axis=1)
    present = np.bincount(owners, minlength=clients) > 0
    return np.where(present, far / within if within else 0.0, np.nan)


def chance_of(found: float, dealt: list[float]) -> float:
    """p: the share of assignments, the actual one included, whose value is at least as high."""
    return (1 + sum(value >= found - 1e-12 for value in dealt)) / (1 + len(dealt))


def random_encoder(width: int, seed: int) -> Encoder:
    """Standardised flat inputs through a random ReLU layer, whose means change with shifts of mean, scale and shape."""
    rng = host(seed, "random encoder", width)
    weights = torch.from_numpy(rng.normal(0, 1 / np.sqrt(width), (width, FEATURES)))
    offsets = torch.from_numpy(rng.normal(0, 1, FEATURES))

    def encode(x: Tensor) -> Tensor:
        flat = x.reshape(len(x), -1).to(torch.float64)
        scaled = (flat - flat.mean(0)) / flat.std().clamp(min=1e-12)
        return torch.relu(scaled @ weights.to(x.device) * np.sqrt(2) + offsets.to(x.device))

    return encode


def standardised(features: Tensor) -> np.ndarray:
    """[n, d] float64, every feature with mean 0 and deviation 1 (0 where it is constant)."""
    found = features.reshape(len(features), -1).to(torch.float64).cpu().numpy()
    found = found - found.mean(0)
    deviation = found.std(0)
    return found / np.where(deviation > 1e-12, deviation, 1.0) * (deviation > 1e-12)


def sample(rows: Rows, most: int, seed: int) -> tuple[Tensor, np.ndarray]:
    """(row numbers, owners): all rows, or the same share of every client's, at least two if it has them."""
    sizes, starts = rows.sizes.numpy(), rows.starts.numpy()
    share = min(1.0, most / max(1, sizes.sum()))
    rng = host(seed, "diagnosed rows")
    picked, owners = [], []
    for client, (start, size) in enumerate(zip(starts, sizes)):
        count = min(size, max(2, round(share * size))) if size else 0
        picked.append(start + np.sort(rng.permutation(size)[:count]))
        owners.append(np.full(count, client))
    return torch.from_numpy(np.concatenate(picked).astype(np.int64)), np.concatenate(owners)


def _dealt_within(cells: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Owners shuffled among the rows of each class, so that label counts stay."""
    keys = rng.random(len(cells))
    by_class = np.argsort(classes, kind="stable")
    shuffled = np.lexsort((keys, classes))
    dealt = np.empty_like(cells)
    dealt[by_class] = cells[shuffled]
    return dealt
