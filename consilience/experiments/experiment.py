"""The parts of a run on any engine, from which a run folder is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from consilience.core.algorithm import Algorithm
from consilience.core.federation import Rows
from consilience.core.protocols import RunnerEngine
from consilience.core.task import Task
from consilience.experiments.config.config import Config
from consilience.runs.metric_table import FACT, stored


@dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """All parts of a run, ready to start; of the clients' data only a description is known here."""

    config: Config
    task: Task
    engine: RunnerEngine
    algorithm: Algorithm
    clients: int
    classes: int | None  # number of classes; None: targets are not class numbers
    inputs: Any  # shape of one row's features, or a dict of such shapes; {} where no row was seen
    label_names: tuple[str, ...]
    prints: dict[str, str]  # fingerprints of the data and of their partition
    validation: Rows | None = None  # held back from training, by client

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return sum(leaf.numel() for leaf in self.task.start()["params"].values())

    def facts(self, code: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """The facts that a new run folder stores."""
        return {
            "config": settings,
            "code": code,
            "prints": self.prints,
            "algorithm": self.algorithm.spelled(),
            "clients": self.clients,
            "parameters": self.parameters,
            FACT: stored(self.task.metrics.rows),
            "status": "created",
        }
