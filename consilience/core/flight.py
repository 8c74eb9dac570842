"""Work that clients were sent and have not returned: simulated time passes from one arrival to the next, nobody waits.

A reply is computed when it arrives, from the message its client was sent. What is kept of work in flight is therefore
who is at work, since when and until when, and the broadcasts that are still out there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.tree import Tree

_WHOLE, _SECONDS, _FLAG = np.int64, np.float64, np.bool_
_COLUMNS = {"ids": _WHOLE, "version": _WHOLE, "dispatch": _WHOLE, "began": _SECONDS, "ends": _SECONDS, "lost": _FLAG}


class Patience(NamedTuple):
    """How long the server waits: replies that take longer than `deadline` are lost; the `first` so many are enough."""

    deadline: float | None = None
    first: int | None = None
    partial_work: bool = False  # whether a reply's duration hangs on how much of its work is drawn for the round


@dataclass(frozen=True, eq=False, kw_only=True)
class Jobs:
    """One row per client at work."""

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, _WHOLE))
    version: np.ndarray = field(default_factory=lambda: np.empty(0, _WHOLE))  # rounds finished when it was sent out
    dispatch: np.ndarray = field(default_factory=lambda: np.empty(0, _WHOLE))  # which choice of clients it was part of
    began: np.ndarray = field(default_factory=lambda: np.empty(0, _SECONDS))
    ends: np.ndarray = field(default_factory=lambda: np.empty(0, _SECONDS))
    lost: np.ndarray = field(default_factory=lambda: np.empty(0, _FLAG))  # it ends at the deadline, with nothing
    personal: Tree = field(default_factory=dict)  # what it alone was sent

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, places: np.ndarray) -> Jobs:
        """The rows at these places."""
        where = torch.from_numpy(places)
        personal = tree.map_leaves(lambda leaf: leaf[where.to(leaf.device)], self.personal)
        return Jobs(**{name: getattr(self, name)[places] for name in _COLUMNS}, personal=personal)

    def join(self, other: Jobs) -> Jobs:
        """These rows, then the other ones."""
        if not len(self) or not len(other):
            return self if len(self) else other
        columns = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _COLUMNS}
        return Jobs(**columns, personal=tree.concatenate([self.personal, other.personal]))


@dataclass(frozen=True, eq=False, kw_only=True)
class Flight:
    """The simulated time, who is at work, and what they were sent."""

    clock: float
    dispatches: int  # how often clients were chosen
    took: np.ndarray  # [K] seconds of each client's last reply, NaN where it has sent none
    present: np.ndarray  # [K] how often each was available when clients were chosen
    jobs: Jobs = field(default_factory=Jobs)
    sent: dict[int, Tree] = field(default_factory=dict)  # version -> what all were sent

    def send(
        self, ids: np.ndarray, broadcast: Broadcast, version: int, seconds: np.ndarray, *, delay: float, limit: float
    ) -> Flight:
        """With these clients at work, `delay` from now, for so many seconds but for no more than `limit`."""
        start = self.clock + delay
        new = Jobs(
            ids=ids,
            version=np.full(len(ids), version),
            dispatch=np.full(len(ids), self.dispatches),
            began=np.full(len(ids), start),
            ends=start + np.minimum(seconds, limit),
            lost=seconds > limit,
            personal=broadcast.personal,
        )
        return replace(self, jobs=self.jobs.join(new), sent={**self.sent, version: broadcast.shared})

    def land(self, most: int, *, one_instant: bool) -> tuple[Flight, Jobs]:
        """What ends next, in order of time: up to `most` replies, or only those of the next instant."""
        jobs = self.jobs
        order = np.lexsort((jobs.ids, jobs.dispatch, jobs.ends))
        if one_instant:
            order = order[jobs.ends[order] <= max(self.clock, jobs.ends[order[0]])]
        replies = np.cumsum(~jobs.lost[order])
        order = order[: int(np.searchsorted(replies, most)) + 1]
        landed = jobs.take(order)
        took = self.took.copy()
        took[landed.ids] = landed.ends - landed.began
        clock = max(self.clock, float(landed.ends.max()))
        aloft = np.setdiff1d(np.arange(len(jobs)), order)
        return replace(self, clock=clock, took=took, jobs=jobs.take(aloft)), landed

    def tidy(self) -> Flight:
        """Without the broadcasts that nobody is working on any more."""
        return replace(self, sent={version: self.sent[version] for version in np.unique(self.jobs.version).tolist()})

    def received(self, landed: Jobs) -> Broadcast:
        """What the clients that have landed were sent; if there are none, what all would have been."""
        versions = np.unique(landed.version)
        if len(versions) < 2:
            version = int(versions[0]) if len(versions) else max(self.sent)
            return Broadcast(shared=self.sent[version], personal=landed.personal)
        which = torch.from_numpy(np.searchsorted(versions, landed.version))  # [m]
        stacked = tree.stack([self.sent[int(version)] for version in versions])  # [V, ...]
        each = tree.map_leaves(lambda leaf: leaf[which.to(leaf.device)], stacked)  # [m, ...]
        return Broadcast(shared={}, personal={**each, **landed.personal})

    def tree(self) -> Tree:
        """As a tree of tensors, to be saved."""
        jobs = {name: torch.from_numpy(getattr(self.jobs, name)) for name in _COLUMNS}
        return {
            "clock": torch.tensor(self.clock, dtype=torch.float64),
            "dispatches": torch.tensor(self.dispatches),
            "took": torch.from_numpy(self.took),
            "present": torch.from_numpy(self.present),
            "jobs": jobs,
            "personal": self.jobs.personal,
            "sent": {str(version): shared for version, shared in self.sent.items()},
        }

    @staticmethod
    def of(saved: Tree, clients: int, rounds: int) -> Flight:
        """The flight that a tree describes; {} is that of a run with nobody at work after `rounds` rounds."""
        if not saved:
            took, present = np.full(clients, np.nan), np.full(clients, rounds, dtype=_WHOLE)
            return Flight(clock=0.0, dispatches=rounds, took=took, present=present)
        columns: dict[str, Any] = {
            name: saved["jobs"][name].cpu().numpy().astype(kind) for name, kind in _COLUMNS.items()
        }
        return Flight(
            clock=float(saved["clock"]),
            dispatches=int(saved["dispatches"]),
            took=saved["took"].cpu().numpy(),
            present=saved["present"].cpu().numpy(),
            jobs=Jobs(**columns, personal=saved.get("personal", {})),
            sent={int(version): shared for version, shared in saved.get("sent", {}).items()},
        )


def labelled(cohort: Cohort, landed: Jobs, received: Broadcast, round: int, late: int) -> Cohort:
    """A cohort that knows how old the models are that its clients started from, if any is old."""
    counts = {**cohort.counts, "late": late} if late else cohort.counts
    staleness = round - landed.version[np.searchsorted(landed.ids, cohort.ids)]
    if not staleness.any():
        return replace(cohort, counts=counts)
    return replace(cohort, counts=counts, staleness=staleness, received=received.among(landed.ids, cohort.ids))
