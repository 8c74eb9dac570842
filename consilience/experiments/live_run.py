"""A running experiment: every round is saved before it is shown, so that only the round in progress can be lost."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from consilience.core import tree
from consilience.core.protocols import RunnerEngine
from consilience.core.rounds import Diverged, Snapshot, run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector
from consilience.experiments import privacy_ledger, trackers, update_log
from consilience.experiments.client_tests import federated_test, federated_validation, personal_test, sampled_rows
from consilience.experiments.cohort_size import lone_client
from consilience.experiments.config.config import Config
from consilience.experiments.experiment import Experiment
from consilience.experiments.export import MANIFEST, MODEL, export
from consilience.experiments.record import Observer
from consilience.experiments.stopping import best_so_far, placed
from consilience.runs import checkpoint, identity
from consilience.runs.checkpoint import Checkpoint
from consilience.runs.client_log import ClientLog
from consilience.runs.folder import CONFIG, RunFolder
from consilience.runs.interrupts import Interrupts
from consilience.runs.observation import Observation
from consilience.runs.redact import secrets_in
from consilience.runs.result import Result
from consilience.runs.row_log import RecordError

TOKENIZER = "tokenizer"
_NOTHING = 0, hashlib.sha256().hexdigest()  # the position in a log without rows

Watch = Callable[["Run"], Iterator[Observation]]
"""Shows the observations of a run and passes them on."""

Report = Callable[[Result], Path | None]
"""Draws the page of a finished run and returns its path."""


class Run:
    """A run that holds its folder's lock: iterate over `observations()`, then ask for `result()`."""

    def __init__(self, folder: RunFolder, experiment: Experiment, saved: Checkpoint | None) -> None:
        self.folder, self.experiment = folder, experiment
        self.config = experiment.config
        self.stopped = 0
        self._model = experiment.engine.start()
        self._resume: Snapshot | None = None
        self._traffic = (0, 0)
        self._reached = 0  # rounds finished
        self._logged = (_NOTHING, _NOTHING)  # positions in the logs of metrics and clients
        self._client_log = ClientLog()
        self._tracker: trackers.Tracking | None = None
        self.on_round: Callable[[Observation], None] = lambda observation: None  # called before the round is saved
        self._best: Tree | None = None  # the best model on the validation rows
        alone = lone_client(experiment.algorithm, experiment.clients, self.config.seed)
        self.notes: list[str] = [alone] if alone is not None else []
        if saved is not None and self.config.rounds < saved.round:
            raise Invalid(f"rounds = {self.config.rounds}, but {saved.round} rounds are finished: give at least that")
        deployed = bool(folder.facts().get("deployed"))
        self._maps = update_log.recorded(self.config.evaluation.maps, experiment.algorithm.server, deployed=deployed)
        self._privacy = privacy_ledger.opened(folder, experiment.algorithm.server, saved)
        if self._privacy is not None:
            first = (saved.round if saved else 0) + 1
            self._privacy.begin(self._model, clients=experiment.clients, first=first, last=self.config.rounds)
        if saved is not None:
            self._continue(saved)
        else:
            folder.cut_back(_NOTHING, _NOTHING)
        self._progress = best_so_far(self.config.validation, experiment.task, folder.rows().rows)

    @property
    def done(self) -> int:
        """Rounds finished before this start."""
        return self._resume.round if self._resume else 0

    @property
    def model(self) -> Tree:
        """The model as it is now."""
        return self._model

    def observations(self) -> Iterator[Observation]:
        """Train; each round is saved before it is yielded."""
        experiment, config = self.experiment, self.config
        engine = experiment.engine
        sample, seed = config.evaluation.client_sample, config.seed
        test, sampled_from = sampled_rows(engine.test_rows, sample, seed)
        observer = Observer(
            task=engine.task,
            test=test,
            sampled_from=sampled_from,
            every=config.evaluation.every,
            rounds=config.rounds,
            local=config.evaluation.local,
            personal=personal_test(experiment.algorithm, engine, sample=sample, seed=seed),
            remote=federated_test(engine, sample=sample, seed=seed),
            validation=placed(experiment.validation, self._model),
            remote_validation=federated_validation(engine),
            best=self._progress,
            maps=self._maps,
        )
        if self._ends:  # patience was exhausted before
            return
        with Interrupts() as interrupts:
            rounds = run(
                experiment.algorithm,
                engine,
                rounds=config.rounds,
                seed=config.seed,
                resume=self._resume,
                limits=config.limits,
                keys=None if self._privacy is None else self._privacy.round_key,
            )
            traffic, began = self._traffic, time.perf_counter()
            for done in rounds:
                if self._privacy is not None:
                    done = self._privacy.accounted(done)
                observation = observer.observe(done, self._model, traffic, time.perf_counter() - began)
                number = done.number
                due = number % config.checkpoint.every == 0 or number == config.rounds or self._ends
                self._record(observation, sync=due)
                self._model = done.model
                if observation.is_best:
                    self._best = self._model
                if due:
                    self._save(observation)
                self._reached = number
                yield observation
                if self._ends:
                    return
                if interrupts.asked and number < config.rounds:
                    self.stopped = interrupts.asked
                    if not due:
                        self.folder.clients.sync()
                        self.folder.timing.sync()
                        self._save(observation)
                    return
                traffic, began = observation.traffic, time.perf_counter()

    def complete(self, watch: Watch | None = None, report: Report | None = None) -> Result:
        """Run to the end (or to a signal), export the model and return the result.

        report: draws the page of the finished run; a tracker gets that page with the model.
        """
        self._tracker = trackers.opened(self.config.log, self.folder, self.config.table())
        self.folder.record(status="running", **({"notes": self.notes} if self.notes else {}))
        status, drawn = "failed", None
        try:
            for _ in watch(self) if watch else self.observations():
                pass
            status = "interrupted" if self.stopped else "finished"
            if self.stopped:
                self.folder.record(status=status)
            else:
                self._export()
                self.folder.record(status=status, **self._outcome())
            result = self.result()
            drawn = report(result) if report is not None and self._tracker is not None else None
            return result
        except Diverged as problem:
            with contextlib.suppress(RecordError):
                self.folder.record(status="diverged", reason=str(problem))
            raise
        finally:
            if self._tracker is not None:
                self._tracker.finish(status, self._artefacts(status, drawn))

    def _artefacts(self, status: str, drawn: Path | None) -> list[Path]:
        """The settings, and of a run that has finished the model, with its report."""
        kept = [CONFIG, *((MODEL, MANIFEST) if status == "finished" else ())]
        return [*(self.folder.path / name for name in kept), *([drawn] if drawn is not None else [])]

    def result(self) -> Result:
        """The model as it is now, and every row so far."""
        history = self.folder.rows().rows
        return Result(
            task=self.experiment.task,
            values=tree.to(self._ended_with[0], "cpu"),
            history=history,
            folder=self.folder.path,
            stopped=self.stopped,
            best=self._outcome().get("best"),
            example=_example(self.experiment.engine),
            label_names=tuple(self.experiment.label_names),
        )

    @property
    def _ends(self) -> bool:
        """Whether the run stops early because the model has stopped improving."""
        return self._progress is not None and self._progress.ends

    @property
    def _ended_with(self) -> tuple[Tree, int]:
        """(the model that the run ends with, its round)."""
        progress = self._progress
        if progress is not None and progress.wants_best and self._best is not None and progress.round is not None:
            return self._best, progress.round
        return self._model, self._reached

    def _outcome(self) -> dict[str, Any]:
        """Facts about the best model, and about a run that stopped early."""
        if self._progress is None:
            return {}
        early = self._reached if self._ends and self._reached < self.config.rounds else None
        return {"best": self._progress.facts, "stopped_early": early}

    def _continue(self, saved: Checkpoint) -> None:
        """Restore a checkpoint: server, memories, losses, and the metrics as they were then."""
        engine, algorithm, clients = self.experiment.engine, self.experiment.algorithm, self.experiment.clients
        server, losses = engine.place(saved.trees["server"]), ClientVector.of(saved.trees["losses"]["last"], np.nan)
        fresh = algorithm.server.init(self._model, clients)
        _refuse_other_model(server, fresh, self.folder.path)
        if len(losses) != clients:
            raise Invalid(f"{self.folder.path} was saved with {len(losses)} clients, and now there are {clients}")
        self.folder.cut_back(saved.facts["metrics"], saved.facts.get("clients"))
        self._resume = Snapshot(
            round=saved.round,
            server=server,
            memory=saved.trees["memory"],
            losses=losses,
            bad_rounds=saved.facts["bad_rounds"],
            lengths=tuple(saved.facts.get("lengths", ())),
            pending=engine.place(saved.trees.get("pending", {})),
        )
        self._model = algorithm.server.model(server)
        self._reached = saved.round
        if "best" in saved.trees:
            self._best = engine.place(saved.trees["best"])
        self._traffic = (saved.facts["bytes_up"], saved.facts["bytes_down"])
        self.notes += [f"fell back to round {saved.round}: {reason}" for reason in saved.skipped]

    def _record(self, observation: Observation, *, sync: bool) -> None:
        """Write the round's rows; with `sync` all are durable before the checkpoint that refers to them."""
        known = self.experiment.engine.resolved_settings
        if any(self.config.engine.get(key) != value for key, value in known.items()):
            self.config = self.config.changed(**known)
            store_config(self.folder, self.config)  # before anything depends on what the engine measured
        metrics, clients = self.folder.metrics, self.folder.clients
        self._logged = (metrics.append(observation.row), clients.append(observation.clients, sync=sync))
        kept = getattr(self.experiment.engine, "memory_bytes", {})
        self.folder.timing.append(observation.timing | ({"memory_bytes": kept} if kept else {}), sync=sync)
        if self._tracker is not None:
            self._tracker.add(observation.row)
        self.on_round(observation)

    def _save(self, observation: Observation) -> None:
        """Write a checkpoint of this round."""
        here, (up, down) = observation.round.snapshot, observation.traffic
        checkpoint.save(
            self.folder.checkpoints,
            here.round,
            {
                "server": here.server,
                "memory": here.memory,
                "losses": {"last": here.losses.leaf()},
                "pending": here.pending,
                **({} if self._best is None else {"best": self._best}),
            },
            {
                "metrics": self._logged[0],
                "clients": self._logged[1],
                "bad_rounds": here.bad_rounds,
                "bytes_up": up,
                "bytes_down": down,
            }
            | ({"lengths": list(here.lengths)} if here.lengths else {})
            | ({} if self._privacy is None else {"privacy": self._privacy.position()}),
            keep=self.config.checkpoint.keep,
            clients=self._client_log,
        )
        if self._privacy is not None:
            self._privacy.keys.erase(here.round)

    def _export(self) -> None:
        experiment, config = self.experiment, self.config
        model, reached = self._ended_with
        values = tree.to(model, "cpu")
        facts = {
            "round": reached,
            "model": config.table()["model"],
            "inputs": experiment.inputs,
            "classes": experiment.classes,
            "label_names": experiment.label_names,
            "kind": experiment.task.kind.name,
            "loss": experiment.task.loss_name,
            "data": experiment.prints["data"],
            "config": config.digest(),
        }
        if experiment.task.frozen_digest:
            facts["frozen_weights"] = experiment.task.frozen_digest
        self.folder.uncover(MODEL, MANIFEST, *self._tokenizer_files())
        export(self.folder.path, experiment.task, values, facts)
        save_tokenizer = getattr(experiment.task.module, "save_tokenizer", None)
        if save_tokenizer is not None:
            save_tokenizer(self.folder.path / TOKENIZER)
        self.folder.cover(MODEL, MANIFEST, *self._tokenizer_files())

    def _tokenizer_files(self) -> list[str]:
        return sorted(f"{TOKENIZER}/{file.name}" for file in (self.folder.path / TOKENIZER).glob("*") if file.is_file())


def _example(engine: RunnerEngine) -> Any:
    """Two rows that the model reads, where the server has any."""
    test = engine.test_rows
    return None if test is None else tree.to(tree.rows(test.x, slice(0, 2)), "cpu")


def store_config(folder: RunFolder, config: Config) -> None:
    """Replace the stored config: the file first, then the facts that resumes compare it with."""
    path, found = folder.path / "config.toml", secrets_in(config.table())
    if found:
        raise Invalid(f"{', '.join(found)} looks like a secret and would be stored in {path}: leave it out")
    folder.store(path.name, config.toml().encode(), doing="store the config")
    folder.record(config=identity.settings(config.table()))


def _refuse_other_model(saved: Tree, fresh: Tree, folder: Path) -> None:
    """Refuse, even with --force, a checkpoint whose tensors do not match this algorithm and model."""
    before, now = ({path: tuple(leaf.shape) for path, leaf in tree.flatten(t).items()} for t in (saved, fresh))
    # a leaf that starts without rows grows with every round
    grown = {path for path, shape in now.items() if shape[:1] == (0,) and before.get(path, ())[1:] == shape[1:]}
    differing = [path for path in {**before, **now} if before.get(path) != now.get(path) and path not in grown]
    if differing:
        path = differing[0]
        raise Invalid(
            f"the checkpoint in {folder} does not fit this model and algorithm: {path} has shape "
            f"{before.get(path, 'none')} there and {now.get(path, 'none')} here"
        )
