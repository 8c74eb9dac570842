"""Pairings: which disjoint pairs of clients swap models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from consilience.core.settings import Invalid

TIE = 1e-12  # similarities closer than this share of the largest count as equal

Pairs = list[tuple[int, int]]


@runtime_checkable
class Pairing(Protocol):
    """Chooses the pairs that swap."""

    @property
    def needs_similarity(self) -> bool:
        """False if it ignores the similarities."""
        ...

    def pairs(self, similarity: np.ndarray, count: int, draw: np.random.Generator) -> Pairs:
        """`count` pairs of places in [0, m), no place twice; `similarity` is [m, m] and symmetric."""
        ...


@dataclass(frozen=True, kw_only=True)
class Random:
    """FedSwap: any pairs, all equally likely."""

    needs_similarity = False  # it ignores them

    def pairs(self, similarity: np.ndarray, count: int, draw: np.random.Generator) -> Pairs:
        """Neighbours in a shuffled list."""
        order = draw.permutation(len(similarity))[: 2 * count]
        return [(int(a), int(b)) for a, b in order.reshape(count, 2)]


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """SimFedSwap's Algorithm 1 (GS): a random client swaps with the least similar of those left, and so on."""

    needs_similarity = True  # it reads one row at a time

    def pairs(self, similarity: np.ndarray, count: int, draw: np.random.Generator) -> Pairs:
        """Draws among those left, ties to the first."""
        left, found = list(range(len(similarity))), []
        slack = _slack(similarity)
        for _ in range(count):
            # Paper: an index "between 0 and length". Here: below the length, because at it the list has ended.
            base = left.pop(int(draw.integers(len(left))))
            partner = left.pop(_first_lowest(similarity[base, left], slack))
            found.append((base, partner))
        return found


@dataclass(frozen=True, kw_only=True)
class MinimumSimilarity:
    """SimFedSwap's Algorithm 2 (MSS): the least similar pair of all swaps, then the least similar of the rest."""

    needs_similarity = True  # it reads all pairs

    # Paper: called globally optimal. Here: greedy on the matrix, as printed, which need not give the least total;
    # `ExactMatching` does.

    def pairs(self, similarity: np.ndarray, count: int, draw: np.random.Generator) -> Pairs:
        """Row by row over the upper triangle, ties to the first; both rows and both columns of a pair are struck."""
        m, found = len(similarity), []
        left = np.where(np.triu(np.ones((m, m), dtype=bool), 1), similarity, np.inf)
        slack = _slack(similarity)
        for _ in range(count):
            row, column = divmod(_first_lowest(left.ravel(), slack), m)
            left[[row, column], :] = np.inf
            left[:, [row, column]] = np.inf
            found.append((row, column))
        return found


@dataclass(frozen=True, kw_only=True)
class ExactMatching:
    """The pairs with the least total similarity: a minimum-weight matching (Edmonds 1965), about m^3 operations."""

    needs_similarity = True  # it reads all pairs

    def pairs(self, similarity: np.ndarray, count: int, draw: np.random.Generator) -> Pairs:
        """Blossoms on whole numbers; m - 2 `count` added nodes are matched with the clients that stay out."""
        try:
            from networkx import Graph, max_weight_matching  # type: ignore[import-untyped]
        except ImportError as problem:  # it comes with torch
            raise Invalid("ExactMatching needs networkx, which is not installed: pip install networkx") from problem
        m = len(similarity)
        off = similarity[~np.eye(m, dtype=bool)]
        low, span = (off.min(), np.ptp(off)) if len(off) else (0.0, 0.0)
        # whole numbers, because Edmonds' algorithm is exact on them; 2^40 steps are finer than a similarity's rounding
        cost = np.round((similarity - low) / (span or 1.0) * 2**40).astype(np.int64)
        graph = Graph()
        graph.add_weighted_edges_from((a, b, -int(cost[a, b])) for a in range(m) for b in range(a + 1, m))
        graph.add_weighted_edges_from((a, b, 0) for a in range(m) for b in range(m, 2 * m - 2 * count))
        found = max_weight_matching(graph, maxcardinality=True)
        return sorted((min(pair), max(pair)) for pair in found if max(pair) < m)


def _slack(similarity: np.ndarray) -> float:
    return TIE * float(np.abs(similarity).max(initial=0.0))


def _first_lowest(values: np.ndarray, slack: float) -> int:
    """The first place whose value is the lowest, up to rounding."""
    return int(np.argmax(values <= values.min() + slack))
