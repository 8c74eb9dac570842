"""The list of mutants fits the code: each fault can be planted, and its tests exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_listed_mutant_can_be_planted() -> None:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "benchmarks" / "mutants.py")
    assert spec is not None and spec.loader is not None
    mutants = sys.modules["mutants"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    listed = mutants.listed()
    wrong = []
    for mutant in listed:
        if (ROOT / mutant.file).exists():
            stands = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.before)
        else:
            stands = 0
        if stands != 1 or mutant.before == mutant.after:
            wrong.append(f"{mutant.name}: its text stands {stands} times in {mutant.file}")
        gone = [test for test in mutant.tests if not (ROOT / test.partition("::")[0]).exists()]
        wrong += [f"{mutant.name}: {test} does not exist" for test in gone]
    assert not wrong, "\n".join(wrong)
    assert len({mutant.name for mutant in listed}) == len(listed) > 100
