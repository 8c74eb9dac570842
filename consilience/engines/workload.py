"""Which clients of a cohort work and how much, decided once for the whole cohort in every engine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from consilience.core.exchange import Cohort
from consilience.core.plans import Work
from consilience.core.tree import Tree
from consilience.environments.environment import Environment


class Workload(NamedTuple):
    """The clients that have work, ascending; `counts` gives the reasons for the others."""

    ids: np.ndarray  # [m]
    place: np.ndarray  # [m] their rows in the personal broadcast
    steps: np.ndarray  # [m]
    heard: np.ndarray  # [m] False: the broadcast model takes the place of its reply
    sizes: np.ndarray  # [m] rows each holds
    counts: dict[str, int]

    @staticmethod
    def of(
        environment: Environment, work: Work, ids: np.ndarray, sizes: np.ndarray, *, round: int, seed: int
    ) -> Workload:
        """The workload of these ids, with [m] rows, under the environment."""
        steps = planned_steps(environment, work, ids, sizes, round, seed)
        drawn = work.trains and not work.reliable
        heard = environment.reachable(round, ids, seed) if drawn else np.ones(len(ids), dtype=bool)
        has_rows = sizes > 0
        replaced = work.trains and environment.silent == "broadcast_model"
        keep = has_rows & (heard | replaced)
        counts = {"silent": int((~heard & has_rows).sum()), "empty_client": int((~has_rows).sum())}
        return Workload(
            ids=ids[keep],
            place=np.flatnonzero(keep),
            steps=np.where(heard, steps, 0)[keep],
            heard=heard[keep],
            sizes=sizes[keep],
            counts={reason: count for reason, count in counts.items() if count},
        )

    def longest_first(self) -> np.ndarray:
        """[m] places of the clients, most steps first, then by id."""
        return np.lexsort((self.ids, -self.steps))

    def only(self, mine: np.ndarray) -> Workload:
        """The flagged clients, for one of several engines that share the cohort; `counts` is empty."""
        return Workload(self.ids[mine], self.place[mine], self.steps[mine], self.heard[mine], self.sizes[mine], {})

    def cohort(self, reply: Tree, round: int, device: torch.device) -> Cohort:
        """The clients' replies, as a cohort."""
        return Cohort(
            reply=reply,
            ids=self.ids,
            examples=torch.from_numpy(self.sizes.astype(np.float64)).to(device, non_blocking=True),
            steps=self.steps,
            round=round,
            heard=self.heard,
            counts=self.counts,
        )


def planned_steps(
    environment: Environment, work: Work, ids: np.ndarray, sizes: np.ndarray, round: int, seed: int
) -> np.ndarray:
    """[m] steps that clients with [m] rows do; a pass without training always reads all rows once."""
    per_epoch = work.steps_per_epoch(sizes)
    if not work.trains:
        return per_epoch
    return environment.work(round, ids, seed, epochs=work.epochs, steps_per_epoch=per_epoch)


def heard_steps(
    environment: Environment, work: Work, ids: np.ndarray, sizes: np.ndarray, *, round: int, seed: int
) -> np.ndarray:
    """[m] steps of which a reply arrives: 0 for clients that are unreachable."""
    steps = planned_steps(environment, work, ids, sizes, round, seed)
    return np.where(environment.reachable(round, ids, seed), steps, 0)
