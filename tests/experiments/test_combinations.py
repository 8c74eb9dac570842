"""FedAvg with any part from the command line: a valid algorithm, or an error that says which parts are incompatible."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from typer.testing import CliRunner

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.scaffold import scaffold
from consilience.cli import app
from consilience.client.memory.memory import Memory
from consilience.client.personal_layers import PersonalLayers
from consilience.client.terms.term import Term
from consilience.core.protocols import Channel, Selection
from consilience.core.rounds import run
from consilience.core.settings import Invalid, options_of
from consilience.options.parts import parts_of, read_options
from consilience.server.protocols import Combine, Ledger, Step, Weighting

pytestmark = pytest.mark.usefixtures("untraced")
PLACES: dict[str, tuple[type, bool]] = {  # option -> its protocol, and whether it takes a list
    "selection": (Selection, False),
    "terms": (Term, True),
    "memory": (Memory, True),
    "personal_layers": (PersonalLayers, False),
    "weighting": (Weighting, False),
    "combine": (Combine, False),
    "step": (Step, False),
    "ledgers": (Ledger, True),
    "channel": (Channel, False),
}
EVERY_PART = [(place, name) for place, (protocol, _) in PLACES.items() for name in parts_of(protocol)]


def built(**parts: Any) -> Any:
    given = {place: [part] if PLACES[place][1] else part for place, part in parts.items()}
    options = {"lr": 0.05, "batch_size": 4, **given}
    return fedavg(**read_options("algorithm", options, options_of(fedavg), "fedavg"))


def runs(algorithm: Any) -> bool:
    *_, last = run(algorithm, tiny.engine(tiny.MODELS_WITH_HEADS["mlp"]), rounds=2, seed=1)
    return tiny.finite(last.model) and tiny.finite(last.snapshot.server)


@pytest.mark.parametrize(("place", "name"), EVERY_PART)
def test_fedavg_meets_every_part_or_says_why_not(place: str, name: str) -> None:
    fields = options_of(parts_of(PLACES[place][0])[name])
    part = {"name": name, **({"fraction": 0.4} if "fraction" in fields else {})}
    try:
        assert runs(built(**{place: part}))
    except Invalid as refusal:
        assert len(str(refusal)) > 20  # a sentence, not a traceback


@pytest.mark.parametrize("combine", parts_of(Combine))
@pytest.mark.parametrize("weighting", parts_of(Weighting))
def test_weights_and_ways_to_combine_meet_or_say_why_not(weighting: str, combine: str) -> None:
    try:
        algorithm = built(weighting=weighting, combine=combine)
    except Invalid as refusal:
        assert len(str(refusal)) > 20
    else:
        assert algorithm.server.weighting and algorithm.server.combine


def test_scaffold_can_be_put_together_from_its_parts() -> None:
    parts = {
        "terms": {"name": "linear", "received": "control_variate", "remembered": "control_variate"},
        "memory": "control_variate",
        "ledgers": "control_variates",
        "weighting": "uniform",
    }
    assert built(**parts) == scaffold(lr=0.05, batch_size=4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["algorithm.terms=[{name='linear', remembered='control_variate'}]"],
            ["term Linear reads the client's memory 'control_variate'", "keeps none", "add the memory"],
        ),
        (
            ["algorithm.terms=[{name='drift_corrected'}]", "algorithm.memory=['gradient']"],
            ["DriftCorrected reads the client's memory 'drift'", "keeps gradient"],
        ),
        (
            ["algorithm.terms=[{name='linear', received='control_variate'}]"],
            ["Linear listens for 'control_variate'", "no ledger of the server tells", "ledgers: none"],
        ),
        (["algorithm.terms=['generated_features']"], ["GeneratedFeatures listens for 'generator'"]),
        (["algorithm.ledgers=['control_variates']"], ["ControlVariates reads 'control_change' in the replies"]),
        (["algorithm.memory=['control_variate']"], ["ControlVariate listens for 'control_variate'"]),
        (
            ["algorithm.name=scaffold", "algorithm.personal_layers=head"],
            ["Head(layers=1) is incompatible with the term Linear"],
        ),
        (["algorithm.name=scaffold", "algorithm.momentum=0.9"], ["control variates", "plain SGD only"]),
        (["algorithm.name=feddm", "algorithm.weighting=uniform"], ["feddm.weighting", "synthetic rows, not models"]),
        (["algorithm.name=fedamp", "algorithm.step=replace"], ["fedamp.step", "a model for each client"]),
        (["algorithm.memory=['drift', 'drift']"], ["no two parts may have one name"]),
        (["algorithm.personal_layers={name='named', patterns=['hea.*']}"], ["'hea.*' matches no leaf of the model"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_the_command_line_says_which_parts_cannot_meet(settings: list[str], words: list[str], tmp_path: Any) -> None:
    usual = ["algorithm.name=fedavg", f"runs={tmp_path}", "rounds=1", "threads=1", "partition.clients=2"]
    outcome = CliRunner().invoke(app, ["run", *usual, *settings])
    assert outcome.exit_code == 2
    said = " ".join((outcome.stdout + outcome.stderr).split())
    assert all(word in said for word in words), said


def test_the_command_line_puts_parts_together(tmp_path: Any) -> None:
    parts = [
        "algorithm.terms=[{name='proximal', mu=0.1}]",
        "algorithm.personal_layers=head",
        "algorithm.weighting=uniform",
    ]
    usual = ["algorithm.name=fedavg", f"runs={tmp_path}", "rounds=1", "threads=1", "partition.clients=2"]
    outcome = CliRunner().invoke(app, ["run", *usual, *parts])
    assert outcome.exit_code == 0, outcome.stdout
    assert "personal: mean" in outcome.stdout
