"""Label and quantity skew: the rows and classes of each client, compared with a random assignment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.federation import Rows
from consilience.core.rng import host

DEALS = 50  # random assignments for the baseline
BINS = 10  # classes that real-valued targets are cut into


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelSkew:
    """Distances of clients' label distributions from the overall one; `chance_*`: of random clients of equal size."""

    counts: np.ndarray  # [K, C] rows
    total_variation: np.ndarray  # [K] in [0, 1): 0.5 sum |p_k - p|; NaN without rows
    jensen_shannon: np.ndarray  # [K] in [0, 1]: the square root of the divergence in bits
    entropy: np.ndarray  # [K] in [0, 1]: of the client's labels, over the logarithm of the number of classes
    mean: float  # total variation, weighted by rows
    chance_mean: float
    chance_high: float  # 95th percentile of random assignments
    binned: bool  # targets are real-valued, cut at their quantiles


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantitySkew:
    """How unequal clients' sizes are."""

    sizes: np.ndarray  # [K]
    gini: float  # 0: all equal; (K - 1) / K: one has everything
    ratio: float  # largest over smallest that is not empty
    half: int  # fewest clients that hold half of the rows
    empty: int


def gini(values: np.ndarray) -> float:
    """sum_ij |x_i - x_j| / (2 K^2 mean), by the sorted form."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    count, total = len(ordered), ordered.sum()
    if not count or total == 0:
        return 0.0
    ranks = np.arange(1, count + 1)
    return float((2 * ranks - count - 1) @ ordered / (count * total))


def quantity_skew(sizes: np.ndarray) -> QuantitySkew:
    """Of [K] rows per client."""
    held = sizes[sizes > 0]
    falling = np.sort(sizes)[::-1]
    half = int(np.searchsorted(np.cumsum(falling), sizes.sum() / 2) + 1)
    return QuantitySkew(
        sizes=sizes,
        gini=gini(sizes),
        ratio=float(held.max() / held.min()),
        half=half,
        empty=int((sizes == 0).sum()),
    )


def label_skew(counts: np.ndarray, *, seed: int, binned: bool = False) -> LabelSkew:
    """Of [K, C] rows per client and class."""
    sizes = counts.sum(1)
    distances = total_variation(counts)
    chance = [_weighted(total_variation(dealt), sizes) for dealt in _random_deals(counts, seed)]
    return LabelSkew(
        counts=counts,
        total_variation=distances,
        jensen_shannon=jensen_shannon(counts),
        entropy=entropy(counts),
        mean=_weighted(distances, sizes),
        chance_mean=float(np.mean(chance)),
        chance_high=float(np.quantile(chance, 0.95)),
        binned=binned,
    )


def total_variation(counts: np.ndarray) -> np.ndarray:
    """[K] total variation distance between a client's label shares and the overall ones."""
    own, whole = _shares(counts)
    return 0.5 * np.abs(own - whole).sum(1)


def jensen_shannon(counts: np.ndarray) -> np.ndarray:
    """[K] Jensen-Shannon distance (base 2) between a client's label shares and the overall ones."""
    own, whole = _shares(counts)
    middle = (own + whole) / 2
    divergence = (_relative_entropy(own, middle) + _relative_entropy(np.broadcast_to(whole, own.shape), middle)) / 2
    return np.sqrt(np.clip(divergence, 0, 1))


def entropy(counts: np.ndarray) -> np.ndarray:
    """[K] entropy of a client's labels, divided by its maximum log(classes)."""
    own, whole = _shares(counts)
    bits = -_times_log(own, own).sum(1)
    classes = int((whole > 0).sum())
    return bits / np.log2(classes) if classes > 1 else np.where(np.isnan(bits), np.nan, 0.0)


def label_counts(rows: Rows, classes: int | None) -> tuple[np.ndarray, bool]:
    """([K, C] rows per client and class, whether targets were cut into classes); several labels a row all count."""
    targets = rows.y.reshape(len(rows.y), -1).cpu().numpy()  # [N, labels per row]
    binned = classes is None
    if classes is None:
        edges = np.unique(np.quantile(targets[:, 0], np.linspace(0, 1, BINS + 1)[1:-1]))
        targets, classes = np.searchsorted(edges, targets[:, :1], side="right"), len(edges) + 1
    found = np.zeros((len(rows.sizes), classes), dtype=np.int64)
    for client, (start, size) in enumerate(zip(rows.starts.tolist(), rows.sizes.tolist())):
        own = targets[start : start + size].ravel().astype(np.int64)
        found[client] = np.bincount(own[own >= 0], minlength=classes)[:classes]  # negative: a target that is ignored
    return found, binned


def _shares(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([K, C] shares of each client, NaN without rows; [C] shares of all rows)."""
    sizes = counts.sum(1, keepdims=True).astype(np.float64)
    own = np.divide(counts, sizes, out=np.full(counts.shape, np.nan), where=sizes > 0)
    return own, counts.sum(0) / counts.sum()


def _times_log(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """p log2 q, with 0 log 0 = 0."""
    return np.where(p > 0, p * np.log2(np.where(q > 0, q, 1.0)), p * 0.0)


def _relative_entropy(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (_times_log(p, p) - _times_log(p, q)).sum(1)


def _weighted(values: np.ndarray, sizes: np.ndarray) -> float:
    return float(np.nansum(values * sizes) / sizes.sum())


def _random_deals(counts: np.ndarray, seed: int) -> list[np.ndarray]:
    """Label counts of clients of the same sizes whose labels are drawn from all rows without replacement."""
    rng = host(seed, "label deals")
    labels = np.repeat(np.arange(counts.shape[1]), counts.sum(0))
    owners = np.repeat(np.arange(len(counts)), counts.sum(1))
    dealt = []
    for _ in range(DEALS):
        found = np.zeros(counts.shape, dtype=np.int64)
        np.add.at(found, (owners, rng.permutation(labels)), 1)
        dealt.append(found)
    return dealt
