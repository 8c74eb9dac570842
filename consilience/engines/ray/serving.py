"""Which process serves which share of the clients: one each where there is room, moved as processes come and go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from consilience.engines.ray import session
from consilience.engines.ray.processes import Process, Processes
from consilience.engines.ray.resources import WorkerResources

log = logging.getLogger(__name__)


class Serving:
    """`weights` are the rows of each share, `machines` those that have them (None: any may serve it).

    `opened(share, process)` is called whenever a process begins to serve a share.
    """

    def __init__(
        self,
        weights: Sequence[float],
        machines: Sequence[frozenset[str] | None],
        resources: WorkerResources,
        opened: Callable[[int, Process], None],
    ) -> None:
        self._weights, self.machines, self._opened = weights, list(machines), opened
        self.processes = Processes(resources)
        self.by: list[Process | None] = [None] * len(weights)

    def begin(self, least: int) -> None:
        """Start processes, and wait for `least` of them."""
        self.processes.begin(self._places(), least)
        self._assign(self.unserved)

    @property
    def unserved(self) -> list[int]:
        """Shares without a process at present."""
        return [share for share, process in enumerate(self.by) if process is None]

    @property
    def served(self) -> list[int]:
        """The other shares."""
        return [share for share, process in enumerate(self.by) if process is not None]

    def refresh(self) -> None:
        """Add processes for which there is room now, and find a process for every share."""
        for machine in self._places():
            self.processes.spawn(machine)
        joined = self.processes.joined()
        self._assign(self.unserved)
        if joined:
            self._balance()

    def replace(self, failed: Process, problem: Exception) -> None:
        """Serve the shares of a process that died, and of all that died with its machine, by new ones or by others."""
        if failed not in self.processes.running:
            return  # done before
        gone = [failed, *(process for process in self.processes.lost() if process is not failed)]
        orphans = [share for share, process in enumerate(self.by) if process in gone]
        log.warning("worker %s is replaced: %s", ", ".join(map(str, orphans)), str(problem).partition("\n")[0])
        for share in orphans:
            self.by[share] = None
        self.processes.drop(gone)
        self.processes.fill(self._places())
        self._assign(orphans)

    def _places(self) -> list[str | None]:
        """Where processes are missing: on a machine that has the rows of a share, or anywhere."""
        missing = max(0, self.processes.missing(len(self.by)))
        if not missing or self.machines[0] is None:
            return [None] * missing
        alive = session.machines().keys()
        found = [sorted((self.machines[share] or frozenset()) & alive) for share in self.unserved]
        places: list[str | None] = [machines[0] for machines in found if machines]
        return places[:missing]

    def _assign(self, shares: Sequence[int]) -> None:
        """Give each of these shares the process with the fewest rows that may serve it, if there is one."""
        for share in sorted(shares, key=lambda share: (-self._weights[share], share)):
            allowed = [process for process in self.processes.running if self._may_serve(process, share)]
            if allowed:
                self._open(share, min(allowed, key=self._load))
            else:
                log.warning("no machine can serve the clients of worker %d at present: they are unavailable", share)

    def _balance(self) -> None:
        """Move shares to processes that have less to do, as long as that lowers the load of the busiest."""
        while True:
            loads = {process: self._load(process) for process in self.processes.running}
            idlest = min(loads, key=lambda process: loads[process])
            moves = [
                (share, process)
                for share, process in enumerate(self.by)
                if process is not None
                and loads[idlest][0] + self._weights[share] < loads[process][0]
                and self._may_serve(idlest, share)
            ]
            if not moves:
                return
            share, busiest = max(moves, key=lambda move: (loads[move[1]], self._weights[move[0]], -move[0]))
            busiest.actor.close.remote(share)
            self._open(share, idlest)

    def _load(self, process: Process) -> tuple[float, int]:
        """(rows, shares) that a process serves."""
        mine = [self._weights[share] for share, server in enumerate(self.by) if server is process]
        return sum(mine), len(mine)

    def _may_serve(self, process: Process, share: int) -> bool:
        machines = self.machines[share]
        return machines is None or process.node in machines

    def _open(self, share: int, process: Process) -> None:
        self.by[share] = process
        self._opened(share, process)
