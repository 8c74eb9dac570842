"""Work in progress: the simulated time, the clients at work, and the broadcasts still in use.

A reply is computed when it arrives, from the broadcast that its client received.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from consilience.core import tree
from consilience.core.exchange import Broadcast
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector

_WHOLE, _SECONDS, _FLAG = np.int64, np.float64, np.bool_
_COLUMNS = {"ids": _WHOLE, "version": _WHOLE, "dispatch": _WHOLE, "began": _SECONDS, "ends": _SECONDS, "lost": _FLAG}


@dataclass(frozen=True, eq=False, kw_only=True)
class Jobs:
    """One row per client at work."""

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, _WHOLE))
    version: np.ndarray = field(default_factory=lambda: np.empty(0, _WHOLE))  # rounds finished when it was dispatched
    dispatch: np.ndarray = field(default_factory=lambda: np.empty(0, _WHOLE))  # number of the selection that chose it
    began: np.ndarray = field(default_factory=lambda: np.empty(0, _SECONDS))
    ends: np.ndarray = field(default_factory=lambda: np.empty(0, _SECONDS))
    lost: np.ndarray = field(default_factory=lambda: np.empty(0, _FLAG))  # no reply: the job ends at the deadline
    personal: Tree = field(default_factory=dict)  # personal part of its broadcast

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, places: np.ndarray) -> Jobs:
        """The jobs at these positions."""
        where = torch.from_numpy(places)
        personal = tree.map_leaves(lambda leaf: leaf[where.to(leaf.device)], self.personal)
        return Jobs(**{name: getattr(self, name)[places] for name in _COLUMNS}, personal=personal)

    def join(self, other: Jobs) -> Jobs:
        """These jobs followed by the others."""
        if not len(self) or not len(other):
            return self if len(self) else other
        columns = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _COLUMNS}
        return Jobs(**columns, personal=tree.concatenate([self.personal, other.personal]))


@dataclass(frozen=True, eq=False, kw_only=True)
class PendingReplies:
    """The simulated time, the clients at work, and their broadcasts."""

    clock: float
    dispatches: int  # how often clients were chosen
    took: ClientVector  # [K] seconds of each client's last reply, NaN if it has sent none
    absent: ClientVector  # [K] how often each was not available when clients were chosen
    jobs: Jobs = field(default_factory=Jobs)
    sent: dict[int, Tree] = field(default_factory=dict)  # version -> shared broadcast

    def send(
        self, ids: np.ndarray, broadcast: Broadcast, version: int, seconds: np.ndarray, *, delay: float, limit: float
    ) -> PendingReplies:
        """Add jobs that start `delay` from now and take `seconds`, at most `limit`."""
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

    def pop_arrived(self, most: int, *, one_instant: bool) -> tuple[PendingReplies, Jobs]:
        """The next arrivals, in order of time: up to `most` replies, or only those of the next instant."""
        jobs = self.jobs
        order = np.lexsort((jobs.ids, jobs.dispatch, jobs.ends))
        if one_instant:
            order = order[jobs.ends[order] <= max(self.clock, jobs.ends[order[0]])]
        replies = np.cumsum(~jobs.lost[order])
        order = order[: int(np.searchsorted(replies, most)) + 1]
        arrived = jobs.take(order)
        last = np.unique(arrived.ids[::-1], return_index=True)[1]  # the latest reply of each client
        ended = arrived.take(len(arrived) - 1 - last)
        took = self.took.write(ended.ids, ended.ends - ended.began)
        clock = max(self.clock, float(arrived.ends.max()))
        remaining = np.setdiff1d(np.arange(len(jobs)), order)
        return replace(self, clock=clock, took=took, jobs=jobs.take(remaining)), arrived

    def received(self, arrived: Jobs) -> Broadcast:
        """The broadcast that the arrived clients received; if there are none, the current shared one."""
        versions = np.unique(arrived.version)
        if len(versions) < 2:
            version = int(versions[0]) if len(versions) else max(self.sent)
            return Broadcast(shared=self.sent[version], personal=arrived.personal)
        which = torch.from_numpy(np.searchsorted(versions, arrived.version))  # [m]
        stacked = tree.stack([self.sent[int(version)] for version in versions])  # [V, ...]
        each = tree.map_leaves(lambda leaf: leaf[which.to(leaf.device)], stacked)  # [m, ...]
        return Broadcast(shared={}, personal={**each, **arrived.personal})

    def tree(self) -> Tree:
        """As a tree of tensors, for checkpoints."""
        jobs = {name: torch.from_numpy(getattr(self.jobs, name)) for name in _COLUMNS}
        return {
            "clock": torch.tensor(self.clock, dtype=torch.float64),
            "dispatches": torch.tensor(self.dispatches),
            "took": self.took.leaf(),
            "absent": self.absent.leaf(),
            "jobs": jobs,
            "personal": self.jobs.personal,
            "sent": {str(version): shared for version, shared in self.sent.items()},
        }

    @staticmethod
    def of(saved: Tree, clients: int, rounds: int) -> PendingReplies:
        """The inverse of `tree`; {} means no client is at work after `rounds` rounds."""
        if not saved:
            took, absent = ClientVector.filled(clients, np.nan, _SECONDS), ClientVector.filled(clients, 0, _WHOLE)
            return PendingReplies(clock=0.0, dispatches=rounds, took=took, absent=absent)
        columns: dict[str, Any] = {
            name: saved["jobs"][name].cpu().numpy().astype(kind) for name, kind in _COLUMNS.items()
        }
        dispatches = int(saved["dispatches"])
        if "present" in saved:  # format 1 of checkpoints
            saved = {**saved, "took": saved["took"].cpu(), "absent": dispatches - saved["present"].cpu()}
        return PendingReplies(
            clock=float(saved["clock"]),
            dispatches=dispatches,
            took=ClientVector.of(saved["took"], np.nan),
            absent=ClientVector.of(saved["absent"], 0),
            jobs=Jobs(**columns, personal=saved.get("personal", {})),
            sent={int(version): shared for version, shared in saved.get("sent", {}).items()},
        )
