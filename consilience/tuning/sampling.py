"""Proposes the next options: Optuna's samplers and pruners, with a journal from which a killed study continues.

The sampler is made anew for every trial, from the study's seed, the method and the number of the trial: what trial n
tries depends only on the trials before it, not on how often the study was stopped or what runs in parallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from consilience.core.rng import subseed
from consilience.options.ranges import SearchRange
from consilience.runs.disk import cut_file, read_file
from consilience.tuning.plan import MethodStudy

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution

JOURNAL = "journal.jsonl"


def needed() -> Any:
    """Import Optuna; the error says how to install it."""
    try:
        import optuna
    except ImportError as problem:
        raise ImportError('tune needs optuna: pip install "consilience[tune]"') from problem
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def opened(study: MethodStudy) -> Study:
    """Open the method's study with all trials so far; only one process may have it open."""
    optuna = needed()
    from optuna.storages.journal import JournalFileBackend

    path = study.folder / JOURNAL
    _mend(study)
    # a stale lock of a killed process would be waited for half a minute, and our own lock is held already
    path.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)
    found: Study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(path))),
        study_name=study.method.label,
        direction="maximize" if study.better == "higher" else "minimize",
        pruner=_pruner(study),
        load_if_exists=True,
    )
    return found


def current(journal: Study, study: MethodStudy) -> Trial:
    """The trial to work on: one that was begun and not ended, else the next."""
    optuna = needed()
    states = optuna.trial.TrialState
    begun = journal.get_trials(deepcopy=False, states=(states.RUNNING,))
    if begun:
        trial = optuna.trial.Trial(journal, begun[0]._trial_id)
    else:
        if not journal.get_trials(deepcopy=False, states=(states.WAITING,)):
            journal.enqueue_trial(_proposed(journal, study))  # one record, written completely or not at all
        trial = journal.ask()
    for key, range_ in study.space.items():
        if range_.whole:
            trial.suggest_int(key, int(range_.low), int(range_.high), log=range_.log)
        else:
            trial.suggest_float(key, range_.low, range_.high, log=range_.log)
    found: Trial = trial
    return found


def _proposed(journal: Study, study: MethodStudy) -> dict[str, Any]:
    """The options of the next trial, drawn in a copy of the study."""
    optuna = needed()
    before = journal.get_trials(deepcopy=False)
    if not before:
        return study.start
    seed = subseed(study.search.seed, "tune", study.method.label, len(before)) % 2**32
    if study.search.sampler == "random":
        sampler = optuna.samplers.RandomSampler(seed=seed)
    else:
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(4, study.search.trials // 4))
    copy = optuna.create_study(direction=journal.direction, sampler=sampler)
    copy.add_trials(before)
    proposed: dict[str, Any] = copy.ask({key: _distribution(found) for key, found in study.space.items()}).params
    return proposed


def _distribution(range_: SearchRange) -> BaseDistribution:
    kinds = needed().distributions
    kind = kinds.IntDistribution if range_.whole else kinds.FloatDistribution
    found: BaseDistribution = kind(*range_.ends, log=range_.log)
    return found


def _pruner(study: MethodStudy) -> Any:
    optuna = needed()
    if study.search.pruner == "none":
        return optuna.pruners.NopPruner()
    if study.search.pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner()
    rounds = study.configs(study.start)[0].rounds
    # not in the first half of a run: a method that starts slowly would lose its best options
    return optuna.pruners.MedianPruner(n_startup_trials=max(3, study.search.trials // 4), n_warmup_steps=rounds // 2)


def _mend(study: MethodStudy) -> None:
    """Remove an incomplete last record of a killed process: Optuna would append the next one to it."""
    path = study.folder / JOURNAL
    if path.exists():
        text = read_file(path)
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            cut_file(path, whole)
