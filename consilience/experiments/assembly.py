"""From settings to a simulation: data, federation, model, engine and algorithm, checked against each other."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from consilience import models
from consilience.core import task as contract
from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import ChecksSurroundings, PoolsData, capability
from consilience.core.federation import Federation, Rows
from consilience.core.kind import Kind
from consilience.core.protocols import Engine, RunnerEngine
from consilience.core.settings import Invalid, options_of
from consilience.core.stored_rows import is_stored
from consilience.data import datasets
from consilience.data.dataset import Dataset, Texts
from consilience.data.federate import federate
from consilience.data.partition import fingerprint
from consilience.data.relabel import relabelled
from consilience.data.tokenized import tokenized
from consilience.data.validation import held_back, validated
from consilience.environments.environment import Environment
from consilience.experiments.cohort_size import try_selection
from consilience.experiments.config.catalogue import ENGINES, KINDS
from consilience.experiments.config.config import Config
from consilience.experiments.experiment import Experiment
from consilience.experiments.model_checks import try_client, try_model
from consilience.experiments.node_rows import described, example_of, refuse_reading_here
from consilience.experiments.privacy_ledger import refuse_overspending
from consilience.experiments.stopping import best_so_far
from consilience.options.parts import made
from consilience.task.kinds import KINDS as BUILT_IN
from consilience.task.kinds import kind_named, kind_of_targets, kind_with_loss
from consilience.task.task import Task


@dataclass(frozen=True, eq=False, kw_only=True)
class Simulation:
    """The parts of a run whose clients' rows are all in this process, checked against each other."""

    config: Config
    federation: Federation
    parts: list[np.ndarray]  # training rows of every client, as numbered in the data set
    task: contract.Task
    environment: Environment
    engine: RunnerEngine
    algorithm: Algorithm
    data: Dataset
    prints: dict[str, str]  # fingerprints of the data and of their partition
    validation: Rows | None = None  # held back from training, by client

    @property
    def experiment(self) -> Experiment:
        """The `Experiment` for the runner."""
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
        """Close the engine."""
        self.engine.close()


def assemble(config: Config, data: Dataset | None = None, *, resumed: bool = False) -> Simulation:
    """Build everything that the settings name; incompatible settings are refused here, by key.

    `data`: the result of an earlier `read_data`, for many runs on one data set. resumed: the remaining privacy budget
    is in the run's ledger.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.data.name == "node_files" and data is None:
        return _on_nodes(config, resumed)
    data = _readable(config, read_data(config) if data is None else data)
    federation, rows = spread(config, data)
    validation = None
    if config.validation.share is not None:
        federation, validation, rows = held_back(federation, rows, share=config.validation.share, seed=config.seed)
    algorithm: Algorithm = config.algorithm.built
    if capability(algorithm.selection, PoolsData) is not None:
        federation = federation.pooled()
    kind = kind_of(config, data)
    task: contract.Task = Task(_model(config, data, kind), kind, loss=None if config.loss == "auto" else config.loss)
    task = try_model(task, federation, f"model.name = {config.model.name!r}", f"data.name = {config.data.name!r}")
    task = try_client(algorithm, task, federation)
    best_so_far(config.validation, task)  # raises for an unknown metric
    engine = _engine(config, task, federation, resumed)
    prints = {"data": data_fingerprint(data), "partition": fingerprint(rows)}
    if task.frozen_digest:
        prints["frozen_weights"] = task.frozen_digest
    return Simulation(
        config=config,
        federation=federation,
        parts=rows,
        task=task,
        environment=config.environment.built,
        engine=engine,
        algorithm=algorithm,
        data=data,
        prints=prints,
        validation=validation,
    )


def _engine(config: Config, task: contract.Task, federation: Any, resumed: bool) -> RunnerEngine:
    """The engine of the settings, checked against the algorithm's requirements."""
    environment = config.environment.built
    made("environment", lambda: environment.check_against(len(federation)), {})
    settings = {**config.engine, "environment": environment, "rounds_ahead": config.rounds}
    where = ENGINES[settings.pop("name", "vectorised")]
    engine = made("engine", lambda: where(task, federation, **settings), {})
    algorithm = config.algorithm.built
    try_surroundings(config, algorithm, engine)
    _try_budget(0 if resumed else config.rounds, algorithm, engine)
    try_selection(algorithm, federation, config.seed)
    return engine


def _on_nodes(config: Config, resumed: bool) -> Simulation:
    """A run whose rows stay on the machines of a Ray cluster; only their description is known here."""
    refuse_reading_here(config)
    found = described(config)
    data, parts = example_of(found, config.data.name)
    example = Federation.from_clients([(data.x, data.y)], classes=found.classes)
    kind = kind_of(config, data)
    task: contract.Task = Task(_model(config, data, kind), kind, loss=None if config.loss == "auto" else config.loss)
    task = try_model(task, example, f"model.name = {config.model.name!r}", f"data.name = {config.data.name!r}")
    task = try_client(config.algorithm.built, task, example)
    prints = {"data": found.fingerprint, "partition": fingerprint(parts)}
    if task.frozen_digest:
        prints["frozen_weights"] = task.frozen_digest
    return Simulation(
        config=config,
        federation=cast(Federation, found),
        parts=parts,
        task=task,
        environment=config.environment.built,
        engine=_engine(config, task, found, resumed),
        algorithm=config.algorithm.built,
        data=data,
        prints=prints,
    )


def read_data(config: Config) -> Dataset:
    """The data set that the settings name."""
    data = datasets.load(config.data.name, data_dir=config.data_dir, **config.data.options)
    return relabelled(data, config.task.labels)


def spread(config: Config, data: Dataset) -> tuple[Federation, list[np.ndarray]]:
    """The data partitioned over clients, with enough test rows for the evaluation settings."""
    data = _readable(config, data)
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
    """The kind of task: as named, else by the loss, else the data's, else inferred from the targets."""
    named = config.task.kind
    settings = config.task.of_kind()
    if named == "auto" and config.loss == "auto":
        kind = data.kind or kind_of_targets(data.y, data.classes)
    else:
        kind = kind_with_loss(config.loss) if named == "auto" else kind_named(named)
        setting = f"loss = {config.loss!r}" if named == "auto" else f"task.kind = {named!r}"
        kind.refuse_targets(data.classes, setting, repr(data.name))
    if not settings:
        return kind
    if kind.name not in BUILT_IN:
        raise Invalid(f"task.{next(iter(settings))} is for built-in kinds: {data.name!r} has its own, {kind.name!r}")
    if settings.get("class_weights") == "balanced":
        settings["class_weights"] = balanced(kind, data)
    if "per_class" in settings.get("metrics", ()):
        settings["class_names"] = data.label_names
    return made("task", lambda: kind_named(kind.name, **settings).knowing(kind.outputs(data.y, data.classes)), {})


def balanced(kind: Kind, data: Dataset) -> tuple[float, ...]:
    """N / (C n_c) for each class c of the training rows, as in scikit-learn; 0 for a class without any."""
    if data.classes is None or not kind.multiclass:
        raise Invalid(f"task.class_weights = 'balanced' needs class numbers: {kind.name} has none, give numbers")
    counts = torch.bincount(data.y[data.y >= 0].flatten(), minlength=data.classes).to(torch.float64)
    shares = counts.sum() / (int((counts > 0).sum()) * counts)
    return tuple(torch.where(counts > 0, shares, 0).tolist())


def data_fingerprint(data: Dataset) -> str:
    """SHA-256 of every training and test row: types, shapes and bytes."""
    digest = hashlib.sha256()
    rows = {"x": data.x, "y": data.y, "test_x": data.test_x, "test_y": data.test_y}
    groups = {"groups": data.groups, "test_groups": data.test_groups}
    for path, leaf in tree.flatten({**rows, **{k: v for k, v in groups.items() if v is not None}}).items():
        digest.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
        if is_stored(leaf):
            digest.update(leaf.source.print_of(leaf.rows).encode())  # type: ignore[attr-defined]
            continue
        digest.update(leaf.contiguous().view(-1).view(torch.uint8).numpy().data if leaf.numel() else b"")
    return digest.hexdigest()


def _readable(config: Config, data: Dataset) -> Dataset:
    """The data as the model reads them: texts as the numbers of its tokens."""
    if not isinstance(data.x, Texts):
        return data
    reads = getattr(models.find(config.model.name), "reads_texts", None)
    if reads is None:
        raise Invalid(
            f"data.features = 'raw' are texts, and model.name = {config.model.name!r} has no tokenizer: use "
            "model.name = 'hugging_face', or data.features = 'words', 'characters' or 'ngrams'"
        )
    reader = made("model", lambda: reads(**config.model.options), {})
    head = config.model.options["head"]
    return made("data", lambda: tokenized(data, reader, head=head, seed=config.seed), {})


def _loader(config: Config) -> Any:
    return KINDS["data"].find(config.data.name)[1]


def _model(config: Config, data: Dataset, kind: Kind) -> torch.nn.Module:
    name, options = config.model.name, dict(config.model.options)
    vocabulary = options_of(models.find(name)).get("vocabulary")
    if vocabulary is not None and options.get("vocabulary") is None:
        if data.vocabulary:
            options["vocabulary"] = len(data.vocabulary)
        elif vocabulary.required:
            raise Invalid(f"model.vocabulary is missing: {name} reads tokens, and {data.name!r} does not say how many")
    shapes = {key: tuple(x.shape[1:]) for key, x in data.x.items()} if isinstance(data.x, Mapping) else None
    inputs = shapes or tuple(data.x.shape[1:])
    outputs = kind.outputs(data.y, data.classes)
    return made("model", lambda: models.build(name, inputs, outputs, seed=config.seed, **options), {})


def try_surroundings(config: Config, algorithm: Algorithm, engine: Any) -> None:
    """Refuse an environment, limits or data preparation that break the guarantee of a server rule."""
    surroundings = capability(algorithm.server, ChecksSurroundings)
    if surroundings is None:
        return
    surroundings.check_surroundings(algorithm, engine, config.limits)
    if config.task.class_weights == "balanced":
        raise Invalid("a private run cannot have task.class_weights = 'balanced': it counts all clients' labels")
    refuse_shared_preparation(config.data.name, config.data.options)


def _try_budget(rounds: int, algorithm: Algorithm, engine: Engine) -> None:
    """Refuse more rounds than a privacy budget holds, and models that would release more than the parameters."""
    clients = len(engine.sizes)
    refuse = functools.partial(refuse_overspending, algorithm.server, engine.start(), clients=clients)
    made("algorithm", functools.partial(refuse, rounds=rounds), {})


LEARNT = {
    **dict.fromkeys(
        ("breast_cancer", "diabetes", "heart_disease", "uci_har_acc"), "scaled by statistics of all clients' rows"
    ),
    "shakespeare": "numbered by the characters that all clients use",
}
"""Data sets for which this holds whatever their options."""
SCALES = "it scales every client's rows by statistics of all"
COUNTS = "it numbers tokens by how often all clients use them: use 'ngrams' or 'encoder'"


def refuse_shared_preparation(name: str, options: Mapping[str, Any]) -> None:
    """Refuse, for a private run, data whose preparation used statistics over all clients' rows."""
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
