"""The results of a study: every trial in the journals, and each method's best options."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from consilience.compare import tuned
from consilience.compare.tuned import TunedMethod, TunedTrial, TuningResult
from consilience.options import parts
from consilience.runs import canonical, identity
from consilience.runs.disk import replace_file
from consilience.tuning.plan import MethodStudy, Tuning
from consilience.tuning.sampling import JOURNAL, opened

_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


def collect(tuning: Tuning) -> TuningResult:
    """Read the journals as they are now."""
    search = tuning.search
    return TuningResult(
        base=identity.settings(tuning.base.table()),
        compare=canonical.to_json_types(tuning.compare, "compare"),
        trials=search.trials,
        seeds=search.seeds,
        seed=search.seed,
        validation=search.validation,
        sampler=search.sampler,
        pruner=search.pruner,
        methods=tuple(_method(study) for study in tuning.studies),
    )


def write(tuning: Tuning) -> Path:
    """tuned.json in the study's folder, for `consilience compare`."""
    found = canonical.to_json_types(dataclasses.asdict(collect(tuning)), tuned.NAME)
    found = {"format": tuned.FORMAT, "digest": tuned.digest_of(found), **found}
    path = tuning.folder / tuned.NAME
    replace_file(path, canonical.encode(found, pretty=True))
    return path


def _method(study: MethodStudy) -> TunedMethod:
    trials = _trials(study)
    # of equal trials the first: the options without tuning, if nothing was better
    sign = 1 if study.better == "higher" else -1
    done = [trial for trial in trials if trial.state == "complete" and trial.value is not None]
    best = max(done, key=lambda trial: (sign * (trial.value or 0.0), -trial.number), default=None)
    fixed = parts.write(study.method.options)
    return TunedMethod(
        label=study.method.label,
        algorithm=study.method.algorithm,
        metric=study.metric,
        better=study.better,
        fixed=fixed,
        settings=study.method.settings,
        ranges={key: dataclasses.asdict(found) for key, found in study.space.items()},
        options=None if best is None else {**fixed, **best.options},
        best=None if best is None else best.value,
        trials=tuple(trials),
    )


def _trials(study: MethodStudy) -> list[TunedTrial]:
    if not (study.folder / JOURNAL).exists():
        return []
    ended = [trial for trial in opened(study).get_trials(deepcopy=False) if trial.state.is_finished()]
    return [
        TunedTrial(number=t.number, state=_STATES[t.state.name], value=t.value, options=dict(t.params)) for t in ended
    ]
