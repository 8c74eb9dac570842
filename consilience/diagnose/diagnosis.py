"""All measurements of one federation, from a config or from a run with its trained model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.compare.plan import carried
from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.diagnose import effort, holdings, probe, shift
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.experiments.assembly import Simulation, assemble
from consilience.experiments.config import config
from consilience.experiments.config.catalogue import KINDS, engine_options
from consilience.runs import canonical
from consilience.runs.folder import RunFolder
from consilience.runs.toml_text import loads
from consilience.runs.verification import newest_checkpoint
from consilience.selection.uniform import Uniform

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Diagnosis:
    """How heterogeneous the clients are, in each way."""

    title: str
    names: tuple[str, ...]  # of all clients
    probed: np.ndarray  # ids of the clients whose gradients and models were compared
    labels: holdings.LabelSkew
    quantity: holdings.QuantitySkew
    features: shift.FeatureShift | None
    no_features: str  # why there is none
    start: probe.Dissimilarity
    later: probe.Dissimilarity
    later_round: int
    later_by: str  # which algorithm made those rounds
    similarity: probe.Similarity
    effort: effort.Effort
    normalisation: bool  # the model has such layers
    local_epochs: float

    def table(self) -> dict[str, Any]:
        """Every number, in JSON's own types."""
        return canonical.to_json_types(_plain(self), "diagnosis", nonfinite_as_null=True)

    def __repr__(self) -> str:
        skew = f"label skew {self.labels.mean:.2f} (chance {self.labels.chance_mean:.2f})"
        return f"Diagnosis({self.title}: {len(self.names)} clients, {skew}, quantity skew {self.quantity.gini:.2f})"


def diagnose(
    source: Path | None, overrides: Iterable[str] = (), *, rounds: int = 5, encoder: str = "random", say: Say = print
) -> Diagnosis:
    """Diagnose a config file, the default run, or a run folder, whose trained model is then analysed too."""
    saved = None
    if source is not None and (source / "run.json").exists():
        folder = RunFolder.open(source)
        settings = config.from_table(loads(folder.config_text()), overrides, source=str(source / "config.toml"))
        saved = newest_checkpoint(folder)
        if saved is not None and saved.skipped:
            say(f"warning: round {saved.round} is looked at, because {'; '.join(saved.skipped)}")
    else:
        settings = config.load(source, overrides)
    say("reading the data")
    with contextlib.closing(assemble(settings)) as simulation:
        return examine(
            simulation.federation,
            simulation.task,
            _fedavg(simulation),
            environment=simulation.environment,
            seed=settings.seed,
            rounds=rounds,
            encoder=encoder,
            title=settings.label,
            engine={key: value for key, value in settings.engine.items() if key in engine_options()},
            trained=None if saved is None else (simulation.algorithm.server.model(saved.trees["server"]), saved.round),
            trained_by=settings.algorithm.name,
            say=say,
        )


def examine(
    federation: Federation,
    task: Task,
    fedavg: Algorithm,
    *,
    environment: Environment,
    seed: int,
    rounds: int,
    encoder: str,
    title: str,
    engine: Mapping[str, Any],
    trained: tuple[Tree, int] | None = None,
    trained_by: str = "",
    say: Say,
) -> Diagnosis:
    """Diagnose a federation and a task, by rounds of FedAvg with this local work or by a `trained` (model, round)."""
    say(f"labels and inputs of {len(federation)} clients")
    counts, binned = holdings.label_counts(federation.train, federation.classes)
    found, why = _features(federation, task, encoder, seed)
    here = Vectorised(task, federation, **engine)
    dealt = Vectorised(task, probe.dealt_at_random(federation, seed), **engine)
    parameters = sum(leaf.numel() for leaf in task.start()["params"].values())
    ids = probe.probed(federation, parameters, seed)
    if len(ids) < len(federation):
        fedavg = dataclasses.replace(fedavg, selection=Uniform(count=len(ids)))
    say(f"gradients of {len(ids)} clients at the start")
    start = probe.dissimilarity(here, dealt, here.start(), ids)
    say("gradients and client models after some rounds")
    if trained is not None:
        model, done = tree.to(trained[0], here.device), trained[1]
    else:
        model, done = _after_rounds(fedavg, here, rounds, seed), rounds
    return Diagnosis(
        title=title,
        names=tuple(federation.names),
        probed=ids,
        labels=holdings.label_skew(counts, seed=seed, binned=binned),
        quantity=holdings.quantity_skew(federation.train.sizes.numpy()),
        features=found,
        no_features=why,
        start=start,
        later=probe.dissimilarity(here, dealt, model, ids),
        later_round=done,
        later_by=trained_by if trained is not None else "fedavg",
        similarity=probe.similarity(here, dealt, fedavg, model, ids, seed),
        effort=effort.effort(
            environment, fedavg.client.work, federation.train.sizes.numpy(), tree.nbytes(here.start()), seed
        ),
        normalisation=any("Norm" in type(part).__name__ for part in task.module.modules()),
        local_epochs=float(fedavg.client.work.epochs),
    )


def _fedavg(simulation: Simulation) -> Algorithm:
    """FedAvg with the run's own local work, with which the federation is probed whatever the run's algorithm is."""
    options = {key: value for key, value in carried(simulation.config, "fedavg").items() if key != "selection"}
    read = config.from_table({"algorithm": {"name": "fedavg", **options}}).algorithm
    found: Algorithm = KINDS["algorithm"].build("fedavg", read.options)
    return found


def _after_rounds(algorithm: Algorithm, engine: Vectorised, rounds: int, seed: int) -> Tree:
    model = engine.start()
    for round in run(algorithm, engine, rounds=rounds, seed=seed):
        model = round.model
    return model


def _features(federation: Federation, task: Task, encoder: str, seed: int) -> tuple[shift.FeatureShift | None, str]:
    """The shift of the inputs or of the model's features; or the reason why it cannot be measured."""
    x = federation.train.x
    labelled = bool(federation.classes) and federation.train.y.dim() == 1
    if encoder not in ("random", "model"):
        raise Invalid(f"encoder = {encoder!r} is not one of random, model")
    is_plain = isinstance(x, Tensor) and x.is_floating_point()
    if encoder == "random" and is_plain:
        width = int(np.prod(x.shape[1:]))
        used = shift.random_encoder(width, seed)
        return shift.feature_shift(federation.train, used, "random", labels=labelled, seed=seed), ""
    if not hasattr(task.module, "features"):
        return None, f"inputs are not plain numbers, and {type(task.module).__name__} has no features(x)"
    start = task.start()

    @torch.no_grad()
    def encode(rows: Any) -> Tensor:
        return task.features(start, rows)

    found = shift.feature_shift(federation.train, encode, "the model at its start", labels=labelled, seed=seed)
    return found, ""


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        extra = {name: getattr(value, name) for name in _derived(type(value))}
        return {**fields, **extra}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _derived(kind: type) -> list[str]:
    return [name for name, member in vars(kind).items() if isinstance(member, property)]
