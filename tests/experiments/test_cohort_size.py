"""A selection that leaves one client is a warning in Python, a note in a run, and nothing where it is normal."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import consilience as cs
from consilience.algorithms.centralised import centralised
from consilience.algorithms.fedasync import fedasync
from consilience.algorithms.fedswap import fedswap
from consilience.algorithms.local_only import local_only
from consilience.cli import app
from consilience.core.settings import Invalid
from consilience.experiments.cohort_size import lone_client
from consilience.selection.poisson import Poisson


@pytest.mark.parametrize(
    ("algorithm", "clients", "warned"),
    [
        (cs.simprox(), 4, True),  # 30 % of four
        (cs.simprox(), 7, False),
        (cs.simprox(), 1, False),
        (cs.fedavg(selection=cs.Uniform(count=1)), 4, True),
        (cs.fedavg(selection=cs.Uniform(count=2)), 4, False),
        (cs.fedavg(), 2, False),
        (fedswap(selection=cs.Uniform(fraction=0.3)), 4, True),
        (cs.fedavg(selection=Poisson(rate=0.3)), 4, False),  # one by chance, now and then
        (fedasync(selection=cs.Uniform(count=1)), 4, False),
        (local_only(selection=cs.Uniform(count=1)), 4, False),
        (centralised(), 1, False),
    ],
)
def test_who_is_warned(algorithm: cs.Algorithm, clients: int, warned: bool) -> None:
    note = lone_client(algorithm, clients, seed=0)
    assert (note is not None) == warned
    if note is not None:
        assert f"leaves one of {clients} clients in a round" in note


def test_python_warns_and_refuses_more_clients_than_there_are() -> None:
    rows = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(5)]
    module, federation = torch.nn.Linear(3, 2), cs.Federation.from_clients(rows)
    options: dict[str, Any] = {"rounds": 1, "progress": False, "evaluate_every": 0, "lane": "serial"}
    with pytest.warns(UserWarning, match="leaves one of 5 clients in a round"):
        cs.train(module, federation, cs.simprox(lr=0.05), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cs.train(module, federation, cs.fedavg(lr=0.05), **options)
    with pytest.raises(Invalid, match=r"algorithm\.selection\.count = 6 is more than the 5 clients there are"):
        cs.train(module, federation, cs.fedavg(selection=cs.Uniform(count=6)), **options)


def test_a_run_says_so_at_the_start_and_in_its_folder(tmp_path: Path) -> None:
    usual = ["run", f"runs={tmp_path}", "rounds=1", "threads=1", "algorithm.epochs=1", "--no-report"]
    outcome = CliRunner().invoke(app, [*usual, "partition.clients=4", "name=alone"])
    assert outcome.exit_code == 0, outcome.output
    assert "note: SlidingWindow(fraction=0.3) leaves one of 4 clients in a round" in outcome.stderr
    facts = json.loads((tmp_path / "alone" / "run.json").read_text())
    assert len(facts["notes"]) == 1 and "leaves one of 4 clients" in facts["notes"][0]
    outcome = CliRunner().invoke(app, [*usual, "partition.clients=8", "name=two"])
    assert "note:" not in outcome.stderr and "notes" not in json.loads((tmp_path / "two" / "run.json").read_text())
