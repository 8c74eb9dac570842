"""From settings to a simulation: data, federation, model, engine and algorithm, checked against each other."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from consilience import models
from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import ChecksRows, ChecksSurroundings, ChecksTask, PoolsData, capability
from consilience.core.federation import Federation, Rows
from consilience.core.kinds import Kind, kind_of_targets, kind_with_loss
from consilience.core.protocols import Engine, RunnerEngine
from consilience.core.settings import Invalid, options_of
from consilience.core.task import Task
from consilience.data import datasets
from consilience.data.dataset import Dataset
from consilience.data.federate import federate
from consilience.data.partition import fingerprint
from consilience.data.validation import held_back, validated
from consilience.environments.environment import Environment
from consilience.experiments.cohort_size import try_selection
from consilience.experiments.config.catalogue import ENGINES, KINDS
from consilience.experiments.config.config import Config
from consilience.experiments.experiment import Experiment
from consilience.experiments.privacy_ledger import refuse_overspending
from consilience.experiments.stopping import best_so_far
from consilience.options.parts import made


@dataclass(frozen=True, eq=False, kw_only=True)
class Simulation:
    """A run whose clients and their rows are all here: its pieces, checked against each other."""

    config: Config
    federation: Federation
    parts: list[np.ndarray]  # training rows of every client, as numbered in the data set
    task: Task
    environment: Environment
    engine: RunnerEngine
    algorithm: Algorithm
    data: Dataset
    prints: dict[str, str]  # fingerprints of the data and of their partition
    validation: Rows | None = None  # held back from training, by client

    @property
    def experiment(self) -> Experiment:
        """What the runner needs of it."""
        return Experiment(
            config=self.config,
            task=self.task,
            engine=self.engine,
            algorithm=self.algorithm,
            clients=len(self.federation),
            classes=self.federation.classes,
            inputs=tree.map_leaves(lambda x: list(x.shape[1:]), self.data.x),
            label_names=self.data.label_names,
            prints=self.prints,
            validation=self.validation,
        )

    def close(self) -> None:
        """End what the engine has started."""
        self.engine.close()


def assemble(config: Config, data: Dataset | None = None, *, resumed: bool = False) -> Simulation:
    """Build everything that the settings name; incompatible settings are refused here, by key.

    `data` are what `read_data` gave before, for many runs on one data set. resumed: the rest of a privacy budget
    is in the run's ledger.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    data = read_data(config) if data is None else data
    federation, rows = spread(config, data)
    validation = None
    if config.validation.share is not None:
        federation, validation, rows = held_back(federation, rows, share=config.validation.share, seed=config.seed)
    algorithm: Algorithm = config.algorithm.built
    if capability(algorithm.selection, PoolsData) is not None:
        federation = federation.pooled()
    kind = kind_of(config, data)
    task = Task(_model(config, data, kind), kind, loss=None if config.loss == "auto" else config.loss)
    task = try_model(task, federation, f"model.name = {config.model.name!r}", f"data.name = {config.data.name!r}")
    best_so_far(config.validation, task)  # refuses a metric that is not there
    environment = config.environment.built
    made("environment", lambda: environment.check_against(len(federation)), {})
    settings = {**config.engine, "environment": environment, "rounds_ahead": config.rounds}
    where = ENGINES[settings.pop("name", "vectorised")]
    engine = made("engine", lambda: where(task, federation, **settings), {})
    try_client(algorithm, task, federation)
    _try_surroundings(config, algorithm, engine)
    _try_budget(0 if resumed else config.rounds, algorithm, engine)
    try_selection(algorithm, federation, config.seed)
    prints = {"data": data_fingerprint(data), "partition": fingerprint(rows)}
    return Simulation(
        config=config,
        federation=federation,
        parts=rows,
        task=task,
        environment=environment,
        engine=engine,
        algorithm=algorithm,
        data=data,
        prints=prints,
        validation=validation,
    )


def read_data(config: Config) -> Dataset:
    """The data set that the settings name."""
    return datasets.load(config.data.name, data_dir=config.data_dir, **config.data.options)


def spread(config: Config, data: Dataset) -> tuple[Federation, list[np.ndarray]]:
    """The data over clients, with enough test rows for what is to be measured."""
    federation, rows = made("partition", lambda: federate(data, config.partition.built, seed=config.seed), {})
    if config.evaluation.validation is not None:
        federation, rows = validated(federation, rows, share=config.evaluation.validation, seed=config.seed)
    if config.evaluation.every and federation.test is None:
        hint = "set data.test_fraction" if "test_fraction" in options_of(_loader(config)) else "give a test set"
        raise Invalid(
            f"data = {data.name!r} has no test rows, so no model can be tested: {hint}, or evaluation.every=0"
        )
    return federation, rows


def kind_of(config: Config, data: Dataset) -> Kind:
    """The kind of task: what the loss belongs to, else the data's, else that of their targets."""
    if config.loss == "auto":
        return data.kind or kind_of_targets(data.y, data.classes)
    kind = kind_with_loss(config.loss)
    kind.refuse_targets(data.classes, config.loss, repr(data.name))
    return kind


def data_fingerprint(data: Dataset) -> str:
    """SHA-256 of every training and test row: types, shapes and bytes."""
    digest = hashlib.sha256()
    rows = {"x": data.x, "y": data.y, "test_x": data.test_x, "test_y": data.test_y}
    groups = {"groups": data.groups, "test_groups": data.test_groups}
    for path, leaf in tree.flatten({**rows, **{k: v for k, v in groups.items() if v is not None}}).items():
        digest.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
        digest.update(leaf.contiguous().view(-1).view(torch.uint8).numpy().data if leaf.numel() else b"")
    return digest.hexdigest()


def _loader(config: Config) -> Any:
    return KINDS["data"].find(config.data.name)[1]


def _model(config: Config, data: Dataset, kind: Kind) -> torch.nn.Module:
    name, options = config.model.name, dict(config.model.options)
    if "vocabulary" in options_of(models.find(name)) and "vocabulary" not in options:
        if not data.vocabulary:
            raise Invalid(f"model.vocabulary is missing: {name} reads tokens, and {data.name!r} does not say how many")
        options["vocabulary"] = len(data.vocabulary)
    shapes = {key: tuple(x.shape[1:]) for key, x in data.x.items()} if isinstance(data.x, Mapping) else None
    inputs = shapes or tuple(data.x.shape[1:])
    outputs = kind.outputs(data.y, data.classes)
    return made("model", lambda: models.build(name, inputs, outputs, seed=config.seed, **options), {})


@torch.no_grad()
def try_model(task: Task, federation: Federation, model: str, data: str) -> Task:
    """Pass two rows through the model, so that a model that does not fit the data is refused with the reason.

    The task is returned with metrics for the number of classes.
    """
    x, y = tree.rows(federation.train.x, slice(0, 2)), federation.train.y[:2]
    try:
        output, _ = task.apply(task.start(), x, train=False)
        losses = task.losses(output, y)
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as problem:
        shapes = [f"{k}: {tuple(v.shape[1:])} {v.dtype}" for k, v in tree.flatten({"x": x, "y": y}).items()]
        reason = str(problem).partition("\n")[0]
        raise Invalid(
            f"{model} with loss = {task.loss_name!r} does not fit {data} (a row is {', '.join(shapes)}): {reason}"
        ) from problem
    if losses.shape != y.shape[:1]:
        raise Invalid(f"loss = {task.loss_name!r} gives {tuple(losses.shape)} values for {len(y)} rows: choose another")
    if task.kind.multiclass:
        if y.is_floating_point():
            raise Invalid(
                f"{task.kind.name} needs class numbers, but {data} have real-valued targets: kind='regression'"
            )
        highest, outputs = int(federation.train.y.max()), output.shape[1] if output.dim() > 1 else 0
        if task.losses in task.kind.losses and highest >= outputs:
            raise Invalid(f"{model} has {outputs} outputs, but {data} have class number {highest}: give it more")
        task = task.knowing(max(federation.classes or 0, outputs))
    task.metrics.try_on(output, y)
    return task


def try_client(algorithm: Algorithm, task: Task, federation: Federation | None = None) -> None:
    """Refuse a model that lacks what the clients' rule or one of its terms calls, and rows that it cannot train on."""
    checking = capability(algorithm.client, ChecksTask)
    if checking is not None:
        made("algorithm", functools.partial(checking.check_against, task), {})
    if federation is None:
        return
    reading = capability(algorithm.client, ChecksRows)
    if reading is not None:
        made("algorithm", functools.partial(reading.check_rows, tree.rows(federation.train.x, slice(0, 2))), {})
    made("algorithm", functools.partial(algorithm.client.work.check_targets, federation.train.y), {})


def _try_surroundings(config: Config, algorithm: Algorithm, engine: Engine) -> None:
    """Refuse what breaks the guarantee of a server rule: of the environment, the limits, or how data were prepared."""
    careful = capability(algorithm.server, ChecksSurroundings)
    if careful is None:
        return
    careful.check_surroundings(algorithm, engine, config.limits)
    refuse_shared_preparation(config.data.name, config.data.options)


def _try_budget(rounds: int, algorithm: Algorithm, engine: Engine) -> None:
    """Refuse more rounds than a privacy budget holds, and models that would release more than the parameters."""
    clients = len(engine.sizes)
    refuse = functools.partial(refuse_overspending, algorithm.server, engine.start(), clients=clients)
    made("algorithm", functools.partial(refuse, rounds=rounds), {})


LEARNT = {
    **dict.fromkeys(("breast_cancer", "heart_disease", "uci_har_acc"), "scaled by statistics of all clients' rows"),
    "shakespeare": "numbered by the characters that all clients use",
}
"""Data sets of which this is true whatever their options."""
SCALES = "it scales every client's rows by statistics of all"
COUNTS = "it numbers tokens by how often all clients use them: use 'ngrams' or 'encoder'"


def refuse_shared_preparation(name: str, options: Mapping[str, Any]) -> None:
    """Refuse, for a private run, data that were prepared with what all clients' rows have in common."""
    if name in LEARNT:
        raise Invalid(f"a private run cannot have data.name = {name!r}: it is {LEARNT[name]}")
    form = "features" if "features" in options else "text"  # one of the two says how texts become numbers
    reasons = {
        "normalise": (options.get("normalise") == "standard", f"{SCALES}: use 'unit', 'signed' or 'none'"),
        "standardise": (options.get("standardise") is True, f"{SCALES}: use false"),
        "picture_encoder": (options.get("picture_encoder") is not None, SCALES),
        form: (options.get(form) in ("words", "characters"), COUNTS),
    }
    for option, (refused, reason) in reasons.items():
        if refused:
            raise Invalid(f"a private run cannot have data.{option} = {options[option]!r}: {reason}")
