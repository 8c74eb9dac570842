"""Tests a run's latest model on its own test rows or those of other data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from consilience.core import tree
from consilience.core.settings import Invalid
from consilience.data.dataset import Dataset
from consilience.data.relabel import relabelled
from consilience.experiments.assembly import Simulation, assemble, read_data
from consilience.experiments.client_tests import personal_test
from consilience.experiments.config.config import from_table
from consilience.experiments.evaluation import evaluate
from consilience.experiments.stopping import best_so_far
from consilience.runs import canonical
from consilience.runs.checkpoint import Checkpoint
from consilience.runs.folder import RecordError, RunFolder
from consilience.runs.result import Result
from consilience.runs.toml_text import loads
from consilience.runs.verification import newest_checkpoint
from consilience.task.scores import ClientScores, Scores

CHANGEABLE = ("data", "data_dir", "partition", "engine", "threads", "task.metrics")


@dataclass(frozen=True, eq=False, kw_only=True)
class Retest:
    """Scores of the model after `round` rounds, and the clients' names; `personal` where clients have own models.

    `notes` says why it is not the model of the last round, or which other files of the folder are damaged.
    """

    round: int
    scores: Scores
    names: Sequence[str]
    personal: ClientScores | None = None
    notes: tuple[str, ...] = ()


def latest(path: Path, *, best: bool = False) -> tuple[Result, int]:
    """(the latest or best model of the newest whole checkpoint with example rows, its number of rounds)."""
    return latest_simulation(path, best=best)[:2]


def latest_simulation(path: Path, *, best: bool = False) -> tuple[Result, int, Dataset]:
    """As `latest`, with the run's data set."""
    folder = RunFolder.open(Path(path))
    saved = newest_checkpoint(folder)
    if saved is None:
        raise Invalid(f"{folder.path} has no checkpoint yet: let at least one round finish")
    if saved.skipped:
        raise RecordError(f"{saved.skipped[0]}; resume the run, which does the rounds after {saved.round} again")
    config = from_table(loads(folder.config_text()), source=str(folder.path / "config.toml"))
    simulation = assemble(config, relabelled(read_data(config), _class_names(folder)))
    _refuse_other_weights(folder, simulation.prints)
    model, done = simulation.algorithm.server.model(simulation.engine.place(saved.trees["server"])), saved.round
    if best:
        model, done = _best(folder, saved, simulation)
    example = tree.rows(simulation.federation.train.x, slice(0, 2))
    result = Result(
        task=simulation.task,
        values=tree.to(model, "cpu"),
        history=folder.rows().rows,
        folder=folder.path,
        example=tree.to(example, "cpu"),
        label_names=simulation.data.label_names,
    )
    return result, done, simulation.data


def retest(path: Path, overrides: Iterable[str] = (), *, best: bool = False) -> Retest:
    """Test the model of the newest whole checkpoint; data, partition and engine may be replaced.

    best: the best model on the validation rows instead.
    """
    overrides = list(overrides)
    for override in overrides:
        key = override.partition("=")[0]
        if key not in CHANGEABLE and key.split(".")[0] not in CHANGEABLE:
            raise Invalid(f"{key} cannot be changed for a test: only {', '.join(CHANGEABLE)} can")
    folder = RunFolder.open(Path(path))
    saved = newest_checkpoint(folder)
    if saved is None:
        raise Invalid(f"{folder.path} has no checkpoint yet: let at least one round finish")
    config = from_table(loads(folder.config_text()), overrides, source=str(folder.path / "config.toml"))
    simulation = assemble(config, relabelled(read_data(config), _class_names(folder)))
    _refuse_other_weights(folder, simulation.prints)
    engine = simulation.engine
    if engine.test_rows is None:
        raise Invalid(f"data.name = {config.data.name!r} has no test rows")
    state, done = engine.place(saved.trees["server"]), saved.round
    model = simulation.algorithm.server.model(state)
    if best:
        model, done = _best(folder, saved, simulation)
    _refuse_other_shapes(model, engine.start(), config.data.name)
    scores = evaluate(engine.task, model, engine.test_rows)
    own = None
    same_rows = all(override.startswith("task.metrics=") for override in overrides)
    if same_rows and not best:  # other data have other clients; personal models go with the last round
        engine.restore(saved.trees["memory"])
        sample = config.evaluation.client_sample
        test = personal_test(simulation.algorithm, engine, sample=sample, seed=config.seed)
        own = test(state) if test else None
    return Retest(round=done, scores=scores, names=simulation.federation.names, personal=own, notes=saved.skipped)


def _best(folder: RunFolder, saved: Checkpoint, simulation: Simulation) -> tuple[tree.Tree, int]:
    """(the best model on the validation rows, its round)."""
    if "best" not in saved.trees:
        raise Invalid(f"{folder.path} has no best model: it was run without validation.share")
    settings, rows = simulation.config.validation, folder.rows().rows[: saved.round]
    progress = best_so_far(settings, simulation.task, rows)
    assert progress is not None and progress.round is not None
    return simulation.engine.place(saved.trees["best"]), progress.round


def _refuse_other_weights(folder: RunFolder, prints: dict[str, str]) -> None:
    before, now = folder.facts().get("prints", {}).get("frozen_weights"), prints.get("frozen_weights")
    if before is not None and before != now:
        raise Invalid(
            f"the frozen weights of {folder.path} are not those it was trained with: their digest was "
            f"{str(before)[:12]} and is {str(now)[:12]}; restore what model.weights named then"
        )


def _class_names(folder: RunFolder) -> tuple[str, ...]:
    """The classes that the run was trained on, in the order of their numbers; () where none are stored."""
    try:
        found = canonical.decode(folder.read(folder.federation.name)).get("labels")
    except (FileNotFoundError, ValueError, AttributeError):
        return ()
    return tuple(found) if isinstance(found, list) and all(isinstance(name, str) for name in found) else ()


def _refuse_other_shapes(saved: tree.Tree, fresh: tree.Tree, data: str) -> None:
    before, now = ({path: tuple(leaf.shape) for path, leaf in tree.flatten(t).items()} for t in (saved, fresh))
    for path, shape in before.items():
        if now.get(path) != shape:
            raise Invalid(
                f"the model does not fit data.name = {data!r}: {path} has shape {shape}, "
                f"and these data need {now.get(path, 'none')}"
            )
