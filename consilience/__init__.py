"""Federated learning for clients that differ.

    import consilience as cs

    federation = cs.Federation.from_clients([(x1, y1), (x2, y2)], test=(x, y))
    result = cs.train(module, federation, cs.simprox(lr=0.05), rounds=20)

Names are looked up when they are first used, so that importing the package alone is instant.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consilience.algorithms.fedavg import fedavg
    from consilience.algorithms.fedprox import fedprox
    from consilience.algorithms.simprox import simprox
    from consilience.compare.compare import compare
    from consilience.core.algorithm import Algorithm
    from consilience.core.federation import Federation, Rows
    from consilience.core.kind import Kind
    from consilience.core.metrics import Metric
    from consilience.core.plans import Work
    from consilience.core.rounds import Diverged, run
    from consilience.core.settings import Invalid
    from consilience.data.dataset import Dataset
    from consilience.data.datasets import load as load_data
    from consilience.data.federate import federate
    from consilience.data.frames import from_frames
    from consilience.data.hugging_face import from_hugging_face
    from consilience.data.partition import partition
    from consilience.data.tokenized import tokenized
    from consilience.diagnose.diagnose import diagnose
    from consilience.engines.vectorised.engine import Vectorised
    from consilience.environments.environment import Environment
    from consilience.estimators import FederatedClassifier, FederatedRegressor
    from consilience.experiments.loading import load
    from consilience.experiments.stopping import Validation
    from consilience.meta import Schedule, learn_schedule
    from consilience.models import build as build_model
    from consilience.models.hugging_face import HuggingFace
    from consilience.runs.result import Result
    from consilience.selection import Everyone, SlidingWindow, Uniform
    from consilience.server.averaging.weighting.schedule import ScheduleWeights
    from consilience.stores.array_files import open_rows
    from consilience.task.task import Task
    from consilience.training import train
    from consilience.tuning.tune import tune

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Dataset",
    "Diverged",
    "Environment",
    "Everyone",
    "FederatedClassifier",
    "FederatedRegressor",
    "Federation",
    "HuggingFace",
    "Invalid",
    "Kind",
    "Metric",
    "Result",
    "Rows",
    "Schedule",
    "ScheduleWeights",
    "SlidingWindow",
    "Task",
    "Uniform",
    "Validation",
    "Vectorised",
    "Work",
    "build_model",
    "compare",
    "diagnose",
    "fedavg",
    "federate",
    "fedprox",
    "from_frames",
    "from_hugging_face",
    "learn_schedule",
    "load",
    "load_data",
    "open_rows",
    "partition",
    "run",
    "simprox",
    "tokenized",
    "train",
    "tune",
]

_MODULES = {
    "Algorithm": "core.algorithm",
    "Dataset": "data.dataset",
    "Diverged": "core.rounds",
    "Environment": "environments.environment",
    "Everyone": "selection",
    "FederatedClassifier": "estimators",
    "FederatedRegressor": "estimators",
    "Federation": "core.federation",
    "HuggingFace": "models.hugging_face",
    "Invalid": "core.settings",
    "Kind": "core.kind",
    "Metric": "core.metrics",
    "Result": "runs.result",
    "Rows": "core.federation",
    "Schedule": "meta",
    "ScheduleWeights": "server.averaging.weighting.schedule",
    "SlidingWindow": "selection",
    "Task": "task.task",
    "Uniform": "selection",
    "Vectorised": "engines.vectorised.engine",
    "Validation": "experiments.stopping",
    "Work": "core.plans",
    "build_model": "models:build",
    "federate": "data.federate",
    "from_frames": "data.frames",
    "from_hugging_face": "data.hugging_face",
    "learn_schedule": "meta",
    "load": "experiments.loading",
    "load_data": "data.datasets:load",
    "open_rows": "stores.array_files",
    "partition": "data.partition",
    "run": "core.rounds",
    "tokenized": "data.tokenized",
    "train": "training",
    "tune": "tuning.tune",
}

_PACKAGES = ("compare", "diagnose")  # which can be called


def __getattr__(name: str) -> Any:
    """A public name from its module, or an algorithm by its own."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MODULES:
        module, _, original = _MODULES[name].partition(":")
        found = getattr(importlib.import_module(f"{__name__}.{module}"), original or name)
    else:
        found = _recipe(name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PACKAGES, *_algorithms()})


def _algorithms() -> list[str]:
    """Names of the recipes, by their files alone: asking for them must not import PyTorch."""
    files = (Path(__path__[0]) / "algorithms").glob("[!_]*.py")
    return sorted(file.stem for file in files)


def _recipe(name: str) -> Any:
    if name not in _algorithms():
        close = difflib.get_close_matches(name, [*__all__, *_algorithms()], n=1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(f"{__name__}.algorithms.{name}"), name)
