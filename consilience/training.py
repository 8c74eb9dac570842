"""From your own module and tensors to a trained model, without a config or a folder."""

from __future__ import annotations

import inspect
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from consilience import algorithms, environments, models
from consilience.core import task as contract
from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import PoolsData, capability
from consilience.core.federation import Federation
from consilience.core.kind import Kind
from consilience.core.metrics import Loss
from consilience.core.rounds import Diverged, run
from consilience.core.screening import Limits
from consilience.core.settings import SYNONYMS, Count, Invalid, Whole, check_value, options_of, refuse_unknown
from consilience.core.tree import rows, to
from consilience.data.validation import held_back
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.experiments.client_tests import personal_test
from consilience.experiments.cohort_size import lone_client, try_selection
from consilience.experiments.config.catalogue import engine_options
from consilience.experiments.config.schedules import refuse_idle_rounds
from consilience.experiments.model_checks import try_client, try_model
from consilience.experiments.privacy_ledger import counted, refuse_overspending
from consilience.experiments.record import Observer
from consilience.experiments.stopping import Validation, best_so_far, placed
from consilience.options.parts import made, read_options
from consilience.reporting.progress import shown
from consilience.runs.observation import Observation
from consilience.runs.result import Result
from consilience.task.kinds import kind_named, kind_of_targets, kind_with_loss
from consilience.task.task import Task


def train(
    model: nn.Module | Task | str,
    federation: Federation | Sequence[tuple[Any, Tensor]],
    algorithm: Algorithm | str | Mapping[str, Any],
    *,
    rounds: Count = 10,
    seed: Whole = 0,
    kind: str | Kind | None = None,
    loss: str | Loss | None = None,
    environment: Environment | Mapping[str, Any] | str | None = None,
    evaluate_every: Whole = 1,
    evaluate_local: bool = False,
    progress: bool = True,
    limits: Limits | None = None,
    validation: Validation | None = None,
    **engine: Any,
) -> Result:
    """Train a module over a federation; `result.model` is the trained module, `result.history` one row per round.

        federation = cs.Federation.from_clients([(x1, y1), (x2, y2)], test=(x, y))
        result = cs.train(module, federation, cs.fedavg(lr=0.05, epochs=2), rounds=20)
        result.history[-1]["accuracy"], result.model(x)

    Ctrl-C ends training early: the result then has the rounds that were finished, and `result.stopped` says so. If
    training diverges, the error `cs.Diverged` has them as its `result`.

    model: any `nn.Module`, whose present values are the start and which is not changed; or a `Task`, which
        can have a kind of task and metrics of your own; or the name of a model of the library, such as "mlp".
    federation: `Federation.from_clients([(x, y), ...], test=(x, y))`, or the pairs alone if nothing is to be tested.
    algorithm: a recipe such as `simprox(lr=0.05)`, its name, or four parts of your own in an `Algorithm`.
    rounds: number of rounds (10).
    seed: decides the selection, the batches, dropout and the environment's draws (0): equal seeds give equal bits.
    kind: the kind of task, by name or a `Kind`; by default that of these targets: classification for class numbers,
        multi_label for several 0 and 1 a row, else regression. Tokens and pixels need their kind.
    loss: a name or a function (output, target) -> [B]; by default that of the kind.
    environment: which clients are slow, unavailable or silent, such as `{"stragglers": 0.5}` or the name
        of a preset, "duw_1"; by default none.
    evaluate_every: test after every so many rounds and after the last (1); 0 is never.
    evaluate_local: test the clients' own models as well, as they are before the server merges them.
    progress: show a progress bar.
    limits: what a client's update may be at most, and how many replies a round needs.
    validation: rows held back from training, which choose the best model and may end the run early.
    engine: settings of `Vectorised`, such as `device="cuda"`, `lane="batched"`, `dtype="float64"`.
    """
    _refuse_unknown(engine)
    rounds, seed = check_value("rounds", rounds, Count), check_value("seed", seed, Whole)
    evaluate_every = check_value("evaluate_every", evaluate_every, Whole)
    algorithm, environment = algorithms.given(algorithm), _environment(environment)
    if not isinstance(federation, Federation):
        federation = Federation.from_clients(federation)
    settings, held = validation or Validation(), None
    if settings.share is not None:
        nowhere = [np.arange(int(size)) for size in federation.train.sizes]
        federation, held, _ = held_back(federation, nowhere, share=settings.share, seed=seed)
    if capability(algorithm.selection, PoolsData) is not None:
        federation = federation.pooled()
    task = _task(model, federation, kind, loss, seed)
    task = try_model(task, federation, f"the model {type(task.module).__name__}", "the federation's data")
    task = try_client(algorithm, task, federation)
    refuse_idle_rounds(algorithm, rounds)
    try_selection(algorithm, federation, seed)
    options = read_options("train", engine, engine_options(), "train")
    vectorised = Vectorised(task, federation, environment=environment, rounds_ahead=rounds, **options)
    observer = Observer(
        task=vectorised.task,
        test=vectorised.test_rows,
        every=evaluate_every,
        rounds=rounds,
        local=evaluate_local,
        personal=personal_test(algorithm, vectorised, seed=seed),
        validation=placed(held, vectorised.start()),
        best=best_so_far(settings, task),
    )
    alone = lone_client(algorithm, len(federation), seed)
    if alone is not None:
        warnings.warn(alone, stacklevel=2)
    observations: Iterator[Observation]
    refuse_overspending(algorithm.server, vectorised.start(), clients=len(federation), rounds=rounds)
    finished = counted(run(algorithm, vectorised, rounds=rounds, seed=seed, limits=limits), algorithm.server)
    observations = observer.watch(finished, vectorised.start())
    history, values = [], vectorised.start()
    best = values
    stopped, diverged = 0, None
    try:
        for observation in shown(observations, rounds=rounds) if progress else observations:
            history.append(observation.row)
            values = observation.round.model
            if observation.is_best:
                best = values
            if observer.best is not None and observer.best.ends:
                break
    except KeyboardInterrupt:
        if not history:
            raise  # there is nothing to give back
        stopped = signal.SIGINT
        warnings.warn(f"interrupted: the result has {len(history)} of {rounds} rounds", stacklevel=2)
    except Diverged as problem:
        diverged = problem
    chosen = observer.best
    if chosen is not None and chosen.wants_best and chosen.round is not None:
        values = best
    example = to(rows(federation.train.x, slice(0, 2)), "cpu")
    result = Result(
        task=task,
        values=to(values, "cpu"),
        history=history,
        example=example,
        label_names=federation.label_names,
        best=chosen.facts if chosen else None,
        stopped=stopped,
    )
    if diverged is not None:
        diverged.result = result
        raise diverged
    return result


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    """Refuse what neither `train` nor the engine takes, before any work; algorithms' options have their own hint."""
    known = [*(name for name in inspect.signature(train).parameters if name != "engine"), *engine_options()]
    for name in given:
        meant = SYNONYMS.get(name, name)
        if name not in known and meant in options_of(algorithms.recipe("fedavg")):
            raise Invalid(f"{name} is an option of the algorithm, not of train: write cs.fedavg({meant}=...)")
    refuse_unknown(given, known, "train")


def _task(
    model: nn.Module | Task | str, federation: Federation, kind: str | Kind | None, loss: str | Loss | None, seed: int
) -> contract.Task:
    if isinstance(model, Task):
        if loss is not None or kind is not None:
            given = "loss" if loss is not None else "kind"
            raise Invalid(f"{given} is part of the Task already: give a module and a {given}, or a Task alone")
        return model
    if not isinstance(model, (nn.Module, str)):
        called = f": call it, {model.__name__}(...)" if isinstance(model, type) else ""
        raise Invalid(f"model is {type(model).__name__}, not an nn.Module, a Task or the name of a model{called}")
    if kind is None and not isinstance(loss, str):
        _refuse_one_hot(federation.train.y)
        kind = kind_of_targets(federation.train.y, federation.classes)
    if isinstance(model, str):
        x, y = federation.train.x, federation.train.y
        shapes: Any = {k: tuple(v.shape[1:]) for k, v in x.items()} if isinstance(x, Mapping) else tuple(x.shape[1:])
        asked = kind if kind is not None else kind_with_loss(str(loss))
        asked = kind_named(asked) if isinstance(asked, str) else asked
        model = models.build(model, shapes, asked.outputs(y, federation.classes), seed=seed)
    return Task(model, kind, loss=loss)


def _refuse_one_hot(y: Tensor) -> None:
    """Refuse targets with a single 1 in every row, where nothing says whether they are classes, labels or numbers."""
    if y.dim() == 2 and y.shape[1] > 1 and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all()):
        raise Invalid(
            "the targets are one-hot: give class numbers, y.argmax(1), or say kind='multi_label' or kind='regression'"
        )


def _environment(given: Environment | Mapping[str, Any] | str | None) -> Environment | None:
    if given is None or isinstance(given, Environment):
        return given
    if isinstance(given, str):
        return environments.environment(given)
    if not isinstance(given, Mapping):
        raise Invalid(f"environment = {given!r} is not an Environment: write cs.Environment(stragglers=0.5)")
    if "name" in given:
        return environments.environment(**given)
    return made("environment", Environment, read_options("environment", given, options_of(Environment), "environment"))
