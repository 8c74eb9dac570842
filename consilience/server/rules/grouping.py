"""Several averaging servers side by side: each group of clients has a model, and a server state, of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.capabilities import (
    Buffers,
    MovesWithoutReplies,
    Reasons,
    ReceivesSchedule,
    ReceivesSizes,
    TrainsModel,
)
from consilience.core.exchange import Cohort
from consilience.core.tree import Tree
from consilience.privacy import SpendsPrivacy
from consilience.server.averaging.averaging import Averaging

UNGROUPED: Reasons = {
    Buffers: "moves when a buffer is full, and the groups of a round move together",
    MovesWithoutReplies: "moves without replies, and a group moves only with those of its clients",
    TrainsModel: "trains its model, and one of several groups cannot do so alone",
    ReceivesSizes: "is told the clients' sizes, and each of several groups would need those of its own",
    ReceivesSchedule: "sends what depends on the work ahead, and the model sent is that of a group",
    SpendsPrivacy: "counts what its rounds cost in privacy, and several groups cost more than one",
}
"""Why a server rule with several averaging servers side by side cannot take one that offers more."""


def open_groups(averaging: Averaging, starts: list[Tree], clients: int) -> Tree:
    """Stacked states [G, ...], one for each start model; the models are under "model"."""
    return tree.stack([averaging.init(start, clients) for start in starts])


def update_groups(averaging: Averaging, groups: Tree, cohort: Cohort, group: np.ndarray) -> tuple[Tree, Tensor]:
    """(states after each group has averaged its own replies, [m] weights); `group` [m] is each client's group.

    The weights are those within a group times the group's share of the cohort, so that they sum to one.
    """
    count = len(next(tree.leaves(groups)))
    states = [tree.rows(groups, place) for place in range(count)]
    weights = torch.zeros_like(cohort.examples)
    for place in np.unique(group).tolist():
        mine = group == place
        states[place], notes = averaging.update(states[place], cohort.only(mine))
        where = torch.from_numpy(np.flatnonzero(mine)).to(weights.device)
        weights = weights.index_copy(0, where, notes["weights"] * (mine.sum() / len(cohort)))
    return tree.stack(states), weights


def largest(cluster: Tensor, groups: int) -> int:
    """The group that most clients belong to, the first of several; negative numbers belong to none."""
    known = cluster[cluster >= 0]
    return int(torch.bincount(known, minlength=groups).argmax())
