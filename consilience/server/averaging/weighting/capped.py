"""Upper limits on the weight of each client and of each group of clients with almost the same update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core.capabilities import Wraps
from consilience.core.exchange import Cohort, Notes
from consilience.core.rounds import Diverged
from consilience.core.settings import Fraction, Invalid, OnlyWith
from consilience.core.tree import Tree
from consilience.server.averaging.weighting.by_size import ByExamples
from consilience.server.geometry.geometry import measure_updates
from consilience.server.protocols import Weighting

ROUNDING = 1e-12  # a share this little beyond its cap is rounding


@dataclass(frozen=True, kw_only=True)
class CappedWeights(Wraps):
    """`inner`'s weights, of which no client has more than the share `max_client`, no group more than `max_group`.

    A group is a set of clients connected by update cosines of at least `min_cosine` (copies, also scaled ones). The
    weight above a cap goes to the others in proportion to their weights; a weight of 0 stays 0. If the caps cannot sum
    to one, the run stops and names caps that would work; `if_infeasible="loosen"` raises both caps as far as needed.
    """

    inner: Weighting = field(default_factory=ByExamples)
    max_client: Fraction | None = None
    max_group: Fraction | None = None
    min_cosine: Annotated[Fraction, OnlyWith("max_group")] = 0.99
    if_infeasible: Literal["stop", "loosen"] = "stop"
    holds = "inner"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_client is None and self.max_group is None:
            raise Invalid(
                "CappedWeights without max_client and without max_group has no effect: give at least one of them"
            )

    @property
    def needs_each_reply(self) -> bool:
        """Groups need every update."""
        return self.max_group is not None or self.inner.needs_each_reply

    def init(self, start: Tree, clients: int) -> Tree:
        """The inner weighting's state; infeasible caps are refused."""
        for name, cap in (("max_client", self.max_client), ("max_group", self.max_group)):
            if cap is not None and self.if_infeasible == "stop" and cap * clients < 1 - ROUNDING:
                raise Invalid(
                    f"CappedWeights.{name} = {cap:g} cannot hold: {clients} clients would have {cap * clients:g} of 1 "
                    f"together; at least 1/{clients} = {1 / clients:.4g} is needed, more if fewer reply"
                )
        return self.inner.init(start, clients)

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """The inner weights, capped; notes report the groups and the number of capped clients."""
        weights, state, notes = self.inner.weigh(cohort, model, state)
        given = weights.detach().to("cpu", torch.float64).numpy()
        if given.min() < 0 or not given.sum() > 0:
            raise Diverged(
                f"round {cohort.round + 1}: {type(self.inner).__name__} gives weights from {given.min():.3g} to "
                f"{given.max():.3g}; caps need weights of at least 0, not all of them 0"
            )
        labels = self._labels(cohort, model)
        caps, loosened = self._caps(given, labels, cohort.round)
        share = capped_shares(given / given.sum(), labels, *caps)
        cut = share < given / given.sum() * (1 - 1e-9)
        notes = {**notes, "near_groups": torch.from_numpy(labels), "capped": torch.tensor(int(cut.sum()))}
        notes["loosened"] = torch.tensor(loosened, dtype=torch.float64)
        if not cut.any():  # bit-identical where no cap applies
            return weights, state, notes
        return torch.from_numpy(share * given.sum()).to(weights), state, notes

    def _labels(self, cohort: Cohort, model: Tree) -> np.ndarray:
        """[m] each client's group, as the index of its first member."""
        if self.max_group is None or len(cohort) == 1:
            return np.arange(len(cohort))
        geometry = measure_updates(cohort.reply["model"]["params"], model["params"])
        alike = (geometry.cosine >= self.min_cosine) | (geometry.distance == 0)  # a zero update has no direction
        return connected(alike.cpu().numpy())

    def _caps(self, given: np.ndarray, labels: np.ndarray, round: int) -> tuple[tuple[float, float], float]:
        """((client, group) caps, factor by which both were raised), or `Diverged` if they are infeasible."""
        client, group = self.max_client or 1.0, self.max_group or 1.0
        sizes = np.unique(labels[given > 0], return_counts=True)[1]
        room = float(np.minimum(client * sizes, group).sum())
        if room >= 1 - ROUNDING:
            return (client, group), 1.0
        if self.if_infeasible == "loosen":
            return (client / room, group / room), 1 / room
        asked = (("max_client", self.max_client), ("max_group", self.max_group))
        enough = ", ".join(f"{name} = {min(1.0, cap / room):.4g}" for name, cap in asked if cap is not None)
        grouped = f" in {len(sizes)} groups of near-identical ones" if self.max_group is not None else ""
        raise Diverged(
            f"round {round + 1}: the caps of CappedWeights cannot hold: {int(sizes.sum())} replies of positive weight"
            f"{grouped} may have {room:.4g} of 1 together. {enough} would do (if_infeasible = 'loosen' does so in such "
            f"rounds), or {'a larger min_cosine, or ' if grouped else ''}more clients in a round"
        )


def connected(alike: np.ndarray) -> np.ndarray:
    """[m] the lowest index in each node's connected component of a graph [m, m]."""
    labels = np.arange(len(alike))
    reach = alike | alike.T | np.eye(len(alike), dtype=bool)  # cosines are symmetric but for rounding
    while True:
        least = np.where(reach, labels[None, :], len(alike)).min(1)  # the least label among neighbours
        if (least == labels).all():
            return labels
        labels = least


def capped_shares(shares: np.ndarray, labels: np.ndarray, client: float, group: float) -> np.ndarray:
    """[m] shares that sum to one, min(`client`, r a_i) with one r for all whose group is below its cap.

    In a group at its cap, r is smaller, so that the group's sum equals the cap. The caps must be feasible.
    """
    full: list[int] = []  # groups at their cap: once there, always there, since the others' r only grows
    found = np.zeros_like(shares)
    while True:
        free = ~np.isin(labels, full)
        found[free] = _filled(shares[free], client, 1 - group * len(full))
        sums = {int(label): found[labels == label].sum() for label in np.unique(labels[free])}
        over = [label for label, total in sums.items() if total > group * (1 + ROUNDING)]
        if not over:
            break
        full += over
    for label in full:
        found[labels == label] = _filled(shares[labels == label], client, group)
    return found


def _filled(shares: np.ndarray, cap: float, total: float) -> np.ndarray:
    """[m] min(cap, r a_i) with the r for which they sum to `total`."""
    at_cap = np.zeros(len(shares), dtype=bool)
    while True:
        rest = shares[~at_cap].sum()
        if not rest > 0:  # all are at the cap, or have weight 0
            return np.where(at_cap, cap, 0.0)
        grown = np.full(len(shares), cap)
        grown[~at_cap] = shares[~at_cap] / rest * max(total - cap * at_cap.sum(), 0.0)
        over = ~at_cap & (grown > cap * (1 + ROUNDING))
        if not over.any():
            return grown
        at_cap |= over
