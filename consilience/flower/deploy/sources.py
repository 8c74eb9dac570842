"""Sources of an app's model and rows: the user's federation.py, or the data and model that a config names."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from consilience.core import task as contract
from consilience.core import tree
from consilience.core.class_names import are_names
from consilience.core.federation import Federation, Rows
from consilience.core.settings import Invalid
from consilience.data.validation import held_back_at_home
from consilience.experiments.assembly import assemble
from consilience.experiments.model_checks import try_model
from consilience.flower.deploy.settings import FEDERATION, DeployedConfig
from consilience.task.kinds import kind_with_loss
from consilience.task.task import Task

HOW = "federation.py must have model() and data(client, node); see `consilience deploy init`"


class OwnFederation:
    """Model and rows from the functions of a federation.py."""

    def __init__(self, folder: Path, config: DeployedConfig) -> None:
        self._module, self._config = _loaded(Path(folder) / FEDERATION), config

    @functools.cached_property
    def task(self) -> contract.Task:
        """What model() gives, initialised from the run's seed on both sides; a Task has its own kind and metrics."""
        return self._config.build_algorithm().prepared(self._given_task())

    def _given_task(self) -> Task:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._config.seed)
            module = self._function("model")()
        task, width = self._config.task, self._config.task.outputs or self.classes
        if isinstance(module, Task):
            return module.knowing(width)
        if not isinstance(module, nn.Module):
            raise Invalid(f"{FEDERATION}: model() gave {type(module).__name__}, not a torch.nn.Module or cs.Task")
        settings = task.of_kind()
        if settings.get("class_weights") == "balanced":
            raise Invalid("task.class_weights = 'balanced' needs all clients' labels, which are not here: give numbers")
        kind = "regression" if self.classes is None else "classification"
        if task.kind != "auto":
            kind = task.kind
        elif self._config.loss != "auto":
            kind = kind_with_loss(self._config.loss).name
        loss = None if self._config.loss == "auto" else self._config.loss
        made = Task(module, kind, loss=loss, **settings)
        if made.kind.multiclass and made.kind.axes is not None and width is None:
            raise Invalid(f"task.kind = {kind!r} needs deploy.classes: how many classes there are")
        return made.knowing(width)

    @property
    def classes(self) -> int | None:
        """Of the targets; None where they are not class numbers."""
        return self._config.deploy.classes

    def held(self, hosts: np.ndarray, node: Mapping[str, Any]) -> Federation:
        """The rows of these clients only."""
        given = [self._rows(int(client), node) for client in hosts]
        pairs = [(*rows[:2], *rows[len(rows) - len(rows) % 2 :]) for rows in given]  # the weights are last
        tests = [rows[2:4] if len(rows) > 3 else () for rows in given]
        if any(len(rows) not in (2, 3, 4, 5) for rows in given) or len({len(rows) for rows in given}) > 1:
            raise Invalid(
                f"{FEDERATION}: data() must give (x, y) or (x, y, test_x, test_y), with weights of the training rows "
                "behind them or without, the same for every client"
            )
        federation = Federation.from_clients(
            pairs,
            client_tests=tests if tests and tests[0] else None,
            names=[str(client) for client in hosts],
            classes=self.classes,
            label_names=self._config.task.labels,
        )
        dtype = next(iter(self.task.start()["params"].values())).dtype  # the engine will cast rows and model alike
        tried = try_model(self.task, _cast(federation, dtype), f"the model of {FEDERATION}", "its data")
        if not tried.kind.multiclass and tried.metrics.shapes != self.task.metrics.shapes:
            targets = tried.kind.outputs(federation.train.y, None)
            raise Invalid(f"{FEDERATION}: a row has {targets} targets, which the server must know: set task.outputs")
        share, seed = self._config.validation.share, self._config.seed
        return federation if share is None else held_back_at_home(federation, hosts, share=share, seed=seed)

    def validation(self) -> Rows | None:
        """None: the clients hold these rows back."""
        return None

    def test(self) -> Rows | None:
        """Rows that the server may test on, if federation.py has any for it."""
        give = getattr(self._module, "test", None)
        rows = give() if give is not None else None
        if rows is None:
            return None
        none = torch.zeros(self._config.deploy.clients, dtype=torch.int64)
        return Rows(x=rows[0], y=rows[1], starts=none, sizes=none)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Those of the config."""
        return self._config.task.labels

    def _rows(self, client: int, node: Mapping[str, Any]) -> tuple[Any, ...]:
        rows = self._function("data")(client, node)
        if not isinstance(rows, (tuple, list)):
            raise Invalid(f"{FEDERATION}: data({client}, ...) gave {type(rows).__name__}, not (x, y)")
        return tuple(part if are_names(part) else tree.map_leaves(torch.as_tensor, part) for part in rows)

    def _function(self, name: str) -> Any:
        found = getattr(self._module, name, None)
        if not callable(found):
            raise Invalid(f"{FEDERATION} has no function {name}: {HOW}")
        return found


class NamedFederation:
    """Model and rows from a config's data, partition and model sections."""

    def __init__(self, config: DeployedConfig) -> None:
        self._simulation = assemble(config)  # only its parts are used, not its engine

    @property
    def task(self) -> contract.Task:
        """The config's model and loss."""
        return self._simulation.task

    @property
    def classes(self) -> int | None:
        """Of the targets."""
        return self._simulation.federation.classes

    def held(self, hosts: np.ndarray, node: Mapping[str, Any]) -> Federation:
        """The rows of some clients."""
        if int(hosts.max()) >= len(self._simulation.federation):
            raise Invalid(f"client {hosts.max()} is none of the {len(self._simulation.federation)} of the partition")
        return self._simulation.federation.among(hosts)

    def test(self) -> Rows | None:
        """The config's test rows, each client's own among them."""
        return self._simulation.federation.test

    def validation(self) -> Rows | None:
        """The rows that the config holds back from all clients' training."""
        return self._simulation.validation

    @property
    def label_names(self) -> tuple[str, ...]:
        """What the classes are called."""
        return self._simulation.data.label_names


Source = OwnFederation | NamedFederation


def _cast(federation: Federation, dtype: torch.dtype) -> Federation:
    """The first rows in another floating type: enough to try a model on."""
    rows = federation.train
    few = replace(rows, x=tree.rows(rows.x, slice(0, 2))).to("cpu", dtype)
    return replace(federation, train=few, test=None)


def source_of(folder: Path, config: DeployedConfig) -> Source:
    """The source of this app's model and rows."""
    return OwnFederation(folder, config) if config.own else NamedFederation(config)


def _loaded(file: Path) -> ModuleType:
    """Import federation.py under a unique module name, whatever the working directory."""
    spec = importlib.util.spec_from_file_location("consilience_deployed_federation", file)
    if spec is None or spec.loader is None or not file.exists():
        raise Invalid(f"{file} is missing: {HOW}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
