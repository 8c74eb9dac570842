"""Runs a study: every method is checked before the first trial, then searched in turn or in parallel processes."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from consilience.compare.results import qualities_of
from consilience.compare.running import Data, ending
from consilience.core.settings import Invalid, nearest
from consilience.experiments.assembly import assemble
from consilience.runs import canonical, identity
from consilience.runs.disk import explain, make_folder, read_file, replace_file
from consilience.runs.failures import explained
from consilience.runs.identity import changed_keys
from consilience.runs.interrupts import Interrupts
from consilience.runs.lock import RunLock
from consilience.runs.row_log import RecordError
from consilience.tuning import sampling
from consilience.tuning.plan import MethodStudy, Tuning
from consilience.tuning.results import write
from consilience.tuning.trials import Stopped, search

Notify = Callable[[str, int, str], None]
"""Called after every trial with the method's label, the trial's number and how it ended."""

_PLAN = "study.json"
_WAIT = 0.5  # seconds between two checks for signals and dead workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyEnd:
    """How a study ended: whether its budget is spent, else the signal that stopped it (0: none)."""

    complete: bool
    signal: int = 0
    problems: tuple[str, ...] = ()


def execute(tuning: Tuning, *, jobs: int = 1, minutes: float | None = None, notify: Notify) -> StudyEnd:
    """Search the rest of every method's budget; after `minutes` it stops, and can be continued later."""
    sampling.needed()
    until = time.monotonic() + (minutes * 60 if minutes is not None else 1e9)
    make_folder(tuning.folder)
    with RunLock(tuning.folder / "lock"):
        data = Data()
        tuning = dataclasses.replace(tuning, studies=tuple(checked(study, data) for study in tuning.studies))
        _check_plan(tuning)
        try:
            if jobs > 1 and len(tuning.studies) > 1:
                return _side_by_side(tuning.studies, min(jobs, len(tuning.studies)), notify, until)
            return _in_turn(tuning.studies, data, notify, until)
        finally:
            write(tuning)


def checked(study: MethodStudy, data: Data) -> MethodStudy:
    """The study with the direction of its metric; incompatible settings are refused with the method's name."""
    config = study.configs(study.start)[0]
    try:
        with contextlib.closing(assemble(config, data.of(config))) as simulation:
            known = {quality.key: quality for quality in qualities_of(simulation.task.metrics.rows)}
    except Invalid as problem:
        raise Invalid(f"{study.method.label}: {problem}") from problem
    metric = study.metric or next(iter(known))
    if metric not in known:
        raise Invalid(f"tune.metric = {metric!r} is not one of {', '.join(known)}{nearest(metric, known)}")
    return dataclasses.replace(study, metric=metric, better=known[metric].better)


def _check_plan(tuning: Tuning) -> None:
    """Refuse a folder whose trials were made with other settings; methods and trials may be added."""
    path = tuning.folder / _PLAN
    try:
        before = canonical.decode(read_file(path))
        stored, methods = before["base"], before["methods"]
    except FileNotFoundError:
        stored, methods = None, {}
    except OSError as problem:
        raise RecordError(explain("read", path, problem)) from problem
    except (ValueError, KeyError, TypeError) as problem:
        raise RecordError(f"{path} is damaged: {problem}") from problem
    base = identity.settings(tuning.base.table())
    now = {study.method.label: canonical.to_json_types(study.plain(), "study") for study in tuning.studies}
    found = [] if stored is None else changed_keys({"rounds": stored.get("rounds")}, {"rounds": base["rounds"]})
    found += [] if stored is None else identity.differences(stored, base)
    for label, spec in now.items():
        found += [f"{label}: {change}" for change in changed_keys(methods.get(label, spec), spec)]
    if found:
        shown = "\n  ".join(found[:20]) + (f"\n  and {len(found) - 20} more" if len(found) > 20 else "")
        raise Invalid(
            f"{tuning.folder} holds another study, whose trials have other settings:\n  {shown}\n"
            "undo the change, or give this study a folder of its own with --out"
        )
    replace_file(path, canonical.encode({"format": 1, "base": base, "methods": {**methods, **now}}, pretty=True))


def _in_turn(studies: Sequence[MethodStudy], data: Data, notify: Notify, until: float) -> StudyEnd:
    for study in studies:

        def notify_study(number: int, text: str, label: str = study.method.label) -> None:
            notify(label, number, text)

        stopped = search(study, data, notify_study, until)
        if stopped is not None:
            return StudyEnd(complete=False, signal=stopped.signal)
    return StudyEnd(complete=True)


def _side_by_side(studies: Sequence[MethodStudy], jobs: int, notify: Notify, until: float) -> StudyEnd:
    """Workers take methods from a queue; a signal to this process is passed on to them, and they save and stop."""
    context = multiprocessing.get_context("spawn")  # a forked CUDA context or thread pool would hang
    tasks, events = context.Queue(), context.Queue()
    tasks.cancel_join_thread()  # stopped workers leave methods in it: this process must not wait for them on exit
    for study in studies:
        tasks.put(study)
    for _ in range(jobs):
        tasks.put(None)
    workers = [context.Process(target=work, args=(tasks, events, until)) for _ in range(jobs)]
    ended, problems = set[str](), list[str]()
    asked = 0
    with Interrupts() as interrupts, ending(workers):
        for kind, label, number, text in _events(events, workers):
            if interrupts.asked and not asked:
                asked = interrupts.asked
                for worker in workers:
                    worker.terminate()  # SIGTERM: they finish the round and save
            if kind == "trial":
                notify(label, number, text)
            elif kind == "ended":
                ended.add(label)
            elif kind == "failed":
                problems.append(f"{label}: {text}")
    return StudyEnd(complete=len(ended) == len(studies), signal=asked, problems=tuple(problems))


def _events(events: Any, workers: Sequence[Any]) -> Iterator[tuple[str, str, int, str]]:
    """Events of the workers while any is alive; an empty event from time to time, so that signals are handled."""
    while True:
        alive = any(worker.is_alive() for worker in workers)
        try:
            yield events.get(timeout=_WAIT)
        except queue.Empty:
            if not alive:
                return
            yield "", "", 0, ""


def work(tasks: Any, events: Any, until: float) -> None:
    """The main function of a worker: methods from the queue, until none is left or a signal or the time stops it."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C at the terminal is handled by the parent, which passes it on once
    parent, data = os.getppid(), Data()
    while (study := tasks.get()) is not None:
        label = study.method.label

        def notify(number: int, text: str, label: str = label) -> None:
            events.put(("trial", label, number, text))
            if os.getppid() != parent:
                raise SystemExit(1)  # the parent has ended; every trial so far is in the journal

        try:
            stopped = search(study, data, notify, until)
        except Exception as problem:  # the other methods are still searched
            events.put(("failed", label, 0, explained(problem)[0]))
            continue
        if isinstance(stopped, Stopped):
            return
        events.put(("ended", label, 0, ""))
