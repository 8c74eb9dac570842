"""Base class of simulation engines: a known federation under an environment."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from consilience.core.client_flags import AllBut
from consilience.core.federation import Federation
from consilience.core.protocols import ClientRule
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.placement import Placement
from consilience.engines.workload import heard_steps
from consilience.environments import clock
from consilience.environments.environment import Environment


class SimulatedEngine:
    """A task and a federation on one device of the server, under an environment; how clients run is the engine's."""

    def __init__(self, task: Task, federation: Federation, environment: Environment | None, placement: Placement):
        self._placement, self.federation = placement, federation
        self.device, self.dtype = placement
        self.environment = environment or Environment()
        self.sizes = federation.train.sizes.numpy()  # [K] training rows of every client
        self._everyone = AllBut(len(federation))
        self.wait_policy = clock.wait_policy(self.environment)  # how long the server waits, in simulated time
        self._task = placement.task(task)

    @property
    def task(self) -> Task:
        """The task, with its constants on the device."""
        return self._task

    @property
    def test_sizes(self) -> np.ndarray | None:
        """[K] test rows of every client; None where there are no test rows."""
        return None if self.federation.test is None else self.federation.test.sizes.numpy()

    def start(self) -> Tree:
        """The task's initial model, on the device."""
        return self._placement.start(self._task)

    def place(self, values: Tree) -> Tree:
        """A saved tree, moved to the device."""
        return self._placement.saved(values)

    @cached_property
    def empty(self) -> np.ndarray:
        """Ascending ids of the clients without training rows."""
        return np.flatnonzero(self.sizes == 0)

    def available(self, round: int, seed: int) -> np.ndarray | AllBut:
        """[K] which clients are available."""
        if self.environment.availability == 1:
            return self._everyone
        return self.environment.available(round, len(self.federation), seed)

    def planned(self, client: ClientRule, ids: np.ndarray, *, round: int, seed: int) -> np.ndarray:
        """[m] steps that clients will do in a round's exchange; 0 for clients whose reply will not arrive."""
        return heard_steps(self.environment, client.work, ids, self.sizes[ids], round=round, seed=seed)
