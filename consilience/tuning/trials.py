"""One method's search: trial after trial, each an ordinary run for every seed, pruned if it falls behind."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from consilience.compare.cells import OVER, status_of
from consilience.compare.results import qualities
from consilience.compare.running import Data
from consilience.core.rounds import Diverged
from consilience.experiments import runner
from consilience.experiments.config.config import Config
from consilience.experiments.live_run import Run
from consilience.runs.disk import make_folder
from consilience.runs.failures import explained
from consilience.runs.folder import RunFolder
from consilience.runs.lock import RunLock
from consilience.runs.metric_table import read as read_metrics
from consilience.runs.observation import Observation
from consilience.tuning.plan import MethodStudy
from consilience.tuning.sampling import current, opened

if TYPE_CHECKING:
    import optuna

Notify = Callable[[int, str], None]
"""Called after every trial with its number and how it ended."""

Judge = Callable[[int, float], bool]
"""Whether a run shall end after this round, given the validation metric there."""

PRUNED = "pruned"


class Stopped(NamedTuple):
    """A search that was stopped before its budget was spent, by a signal or (0) by the clock."""

    signal: int


class Outcome(NamedTuple):
    """How one run of a trial ended."""

    status: str  # finished, pruned, diverged, stopped
    value: float | None = None
    signal: int = 0


def search(study: MethodStudy, data: Data, notify: Notify, until: float) -> Stopped | None:
    """Try options until the budget is spent; earlier trials count."""
    make_folder(study.folder)
    with RunLock(study.folder / "lock"):
        journal = opened(study)
        while _ended(journal) < study.search.trials:
            if time.monotonic() >= until:
                return Stopped(0)
            trial = current(journal, study)
            stopped = _tried(journal, trial, study, data, notify, until)
            if stopped is not None:
                return stopped
    return None


def _ended(journal: optuna.Study) -> int:
    return sum(trial.state.is_finished() for trial in journal.get_trials(deepcopy=False))


def _tried(
    journal: optuna.Study, trial: optuna.Trial, study: MethodStudy, data: Data, notify: Notify, until: float
) -> Stopped | None:
    """Run one trial to its end, and record the outcome."""
    from optuna.trial import TrialState

    try:
        values = []
        for number, config in enumerate(study.configs(trial.params)):
            path = study.folder / f"trial{trial.number:04d}-seed{config.seed}"
            found = _run(path, config, study, data, _judge(trial, number * config.rounds), until)
            if found.status == "stopped":
                return Stopped(found.signal)
            if found.status != "finished" or found.value is None:
                if found.status == "diverged":
                    trial.set_user_attr("diverged", True)
                journal.tell(trial, state=TrialState.PRUNED)
                notify(trial.number, found.status)
                return None
            values.append(found.value)
    except Exception as problem:  # the other trials are still run
        trial.set_user_attr("reason", explained(problem)[0][:1000])
        journal.tell(trial, state=TrialState.FAIL)
        notify(trial.number, f"failed: {explained(problem)[0]}")
        return None
    journal.tell(trial, sum(values) / len(values))
    notify(trial.number, f"{study.metric} {sum(values) / len(values):.4f}")
    return None


def _judge(trial: optuna.Trial, offset: int) -> Judge:
    known = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values

    def judge(round: int, value: float) -> bool:
        if offset + round not in known:  # reported before the study was stopped
            trial.report(value, offset + round)
        return trial.should_prune()

    return judge


def _run(path: Path, config: Config, study: MethodStudy, data: Data, judge: Judge, until: float) -> Outcome:
    """Start or resume one run of a trial."""
    status = status_of(path)
    if status not in (*OVER, PRUNED):
        status, signalled = _carried_out(path, config, study, data, judge, until, resume=bool(status))
        if status == "stopped":
            return Outcome("stopped", signal=signalled)
    if status != "finished":
        return Outcome(status)
    folder = RunFolder.open(path)
    rows = folder.rows().rows
    return Outcome("finished", qualities(rows, read_metrics(folder.facts(), rows)).get(study.metric))


def _carried_out(
    path: Path, config: Config, study: MethodStudy, data: Data, judge: Judge, until: float, *, resume: bool
) -> tuple[str, int]:
    ended = [""]

    def watch(run: Run) -> Iterator[Observation]:
        for observation in run.observations():
            yield observation
            if observation.round.number == config.rounds:
                return
            value = qualities([observation.row], observation.metrics).get(study.metric)
            if value is not None and judge(observation.round.number, value):
                ended[0] = PRUNED
            elif time.monotonic() >= until:
                ended[0] = "stopped"
            if ended[0]:
                run.stopped = signal.SIGTERM  # not finished: the rounds after the last checkpoint are run again
                return

    try:
        opening = runner.resume(path) if resume else runner.start(config, folder=path, data=data.of(config))
        with opening as run:
            run.folder.record(tuning={"method": study.method.label})
            found = run.complete(watch)
            if ended[0] == PRUNED:
                run.folder.record(status=PRUNED)
    except Diverged:
        return "diverged", 0
    finally:
        gc.collect()  # an engine and its programs are a reference cycle
    if ended[0]:
        return ended[0], 0
    return ("stopped", found.stopped) if found.stopped else ("finished", 0)
