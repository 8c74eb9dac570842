"""FedAvg with any part: which pairs run, and differ from plain FedAvg, and which are refused, and why."""

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
from consilience.core.settings import Invalid
from consilience.options.parts import parts_of
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

OPTIONS: dict[tuple[str, str], dict[str, Any]] = {  # where a part's defaults will not do, or would do nothing
    ("selection", "by_availability"): {"fraction": 0.4},
    ("selection", "by_loss"): {"fraction": 0.4},
    ("selection", "fixed_for_rounds"): {"inner": {"name": "uniform", "fraction": 0.4}},
    ("selection", "power_of_choice"): {"fraction": 0.4},
    ("selection", "sliding_window"): {"fraction": 0.4},
    ("selection", "uniform"): {"fraction": 0.4},
    ("terms", "linear"): {"remembered": "gradient"},
    ("terms", "reflected_proximal"): {"step": 1.0},
    ("personal_layers", "named"): {"patterns": ["*.weight"]},
    ("weighting", "capped"): {"max_client": 0.25},
    ("weighting", "schedule"): {"table": [[0.1, 0.3, 0.05, 0.35, 0.2]]},
    ("weighting", "transferred"): {"features": ["size"], "coefficients": [[0.5, 0.0, 0.0]], "rounds": 2},
    ("step", "noisy"): {"deviation": 0.01},
    ("step", "scheduled"): {"schedule": {"name": "exponential", "factor": 0.5}},
    ("channel", "chain"): {"channels": ["noise", "quantise"]},
    ("channel", "clip"): {"bound": 0.01},
    **{
        ("channel", attack): {"fraction": 0.4}
        for attack in ("a_little_is_enough", "gaussian_update", "inner_product", "mimic", "scaling", "sign_flip")
    },
}
SAME_AS_FEDAVG = {  # its own parts, layers that the model does not have, and a defence where nobody attacks
    ("selection", "everyone"),
    ("personal_layers", "normalisation"),
    ("weighting", "by_examples"),
    ("weighting", "agreement"),
    ("combine", "weighted_mean"),
    ("step", "replace"),
    ("channel", "plain"),
}
REFUSED = {  # what is not supported without other parts -> the reason
    ("selection", "pooled"): "Pooled needs one client with all data, but there are 5 clients",
    ("terms", "contrastive"): "Contrastive reads the client's memory 'previous', but the client keeps none",
    ("terms", "drift_corrected"): "DriftCorrected reads the client's memory 'drift', but the client keeps none",
    ("terms", "generated_features"): "GeneratedFeatures reads 'generator' in the broadcast, which no ledger",
    ("terms", "linear"): "Linear reads the client's memory 'gradient', but the client keeps none",
    ("terms", "reflected_proximal"): "ReflectedProximal reads the client's memory 'z', but the client keeps none",
    ("memory", "control_variate"): "ControlVariate reads 'control_variate' in the broadcast, which no ledger",
    ("weighting", "agnostic"): "AFL needs each client's loss at the model it was sent: use the algorithm afl",
    ("weighting", "dr"): "DR weights need each client's loss at the model it was sent: use the algorithm dr_fedavg",
    ("weighting", "fedfa"): "FedFa weights need each client's accuracy after training: use the algorithm fedfa",
    ("weighting", "product_norm"): "the model has no adapters",
    ("weighting", "qffl"): "q-FFL needs each client's loss at the model it was sent: use the algorithm qffl",
    ("combine", "redecomposed"): "the model has no adapters",
    ("ledgers", "control_variates"): "ControlVariates reads 'control_change' in the replies, which no memory",
    ("ledgers", "generator"): "the ledger Generator needs the clients' label counts: use algorithm = 'fedgen'",
    ("ledgers", "qffl"): "q-FFL needs each client's loss at the model it was sent: use the algorithm qffl",
}
RUNS = [pair for pair in EVERY_PART if pair not in REFUSED]
WITHOUT_WEIGHTS = {  # these merge without regard to weights
    *("attention", "bulyan", "krum", "median", "multi_krum", "nearest_neighbour_mixing", "trimmed_mean"),
}


def built(**parts: Any) -> Any:
    given = {place: [part] if PLACES[place][1] else part for place, part in parts.items()}
    return fedavg(lr=0.05, batch_size=4, **given)


def part(place: str, name: str) -> dict[str, Any]:
    return {"name": name, **OPTIONS.get((place, name), {})}


def outcome(algorithm: Any) -> Any:
    *_, last = run(algorithm, tiny.engine(tiny.MODELS_WITH_HEADS["mlp"]), rounds=2, seed=1)
    return last


@pytest.fixture(scope="module")
def plain() -> Any:
    return outcome(built())


def test_the_tables_name_parts_that_exist_and_most_parts_run() -> None:
    assert {*REFUSED, *SAME_AS_FEDAVG, *OPTIONS} <= set(EVERY_PART)
    assert (len(EVERY_PART), len(RUNS), len(REFUSED)) == (77, 61, 16)


@pytest.mark.parametrize(("place", "name"), RUNS)
def test_fedavg_runs_with_the_part_and_differs_from_plain_fedavg(place: str, name: str, plain: Any) -> None:
    last = outcome(built(**{place: part(place, name)}))
    assert tiny.finite(last.model) and tiny.finite(last.snapshot.server)
    if (place, name) in SAME_AS_FEDAVG:
        assert tiny.same(last.model, plain.model)
    elif place == "memory":  # nobody reads it, but it is kept
        assert tiny.same(last.model, plain.model) and last.snapshot.memory != plain.snapshot.memory
    else:
        assert tiny.gap(last.model, plain.model) > 1e-6


@pytest.mark.parametrize(("place", "name"), REFUSED)
def test_what_needs_other_parts_is_refused_with_the_reason(place: str, name: str) -> None:
    with pytest.raises(Invalid) as refusal:
        outcome(built(**{place: part(place, name)}))
    assert REFUSED[place, name] in str(refusal.value)


@pytest.mark.parametrize("weighting", parts_of(Weighting))
def test_weights_that_a_rule_would_ignore_are_refused(weighting: str) -> None:
    """By examples and uniform are what recipes start from, so they may stand beside every rule."""
    refused = set()
    for combine in parts_of(Combine):
        try:
            algorithm = built(weighting=part("weighting", weighting), combine=combine)
        except Invalid as refusal:
            assert "counts every reply the same, so that weighting" in str(refusal)
            refused.add(combine)
        else:
            assert type(algorithm.server.weighting) is parts_of(Weighting)[weighting]
            assert type(algorithm.server.combine) is parts_of(Combine)[combine]
    assert refused == (set() if weighting in ("by_examples", "uniform") else WITHOUT_WEIGHTS)


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
            ["Linear reads 'control_variate' in the broadcast", "no ledger of the server sends", "ledgers: none"],
        ),
        (["algorithm.terms=['generated_features']"], ["GeneratedFeatures reads 'generator' in the broadcast"]),
        (["algorithm.ledgers=['control_variates']"], ["ControlVariates reads 'control_change' in the replies"]),
        (["algorithm.memory=['control_variate']"], ["ControlVariate reads 'control_variate' in the broadcast"]),
        (
            ["algorithm.name=scaffold", "algorithm.personal_layers=head"],
            ["Head(layers=1) is incompatible with the term Linear"],
        ),
        (["algorithm.name=scaffold", "algorithm.momentum=0.9"], ["control variates", "plain SGD only"]),
        (
            ["algorithm.name=feddm", "algorithm.weighting=uniform"],
            ["algorithm.weighting = UniformWeights() has no effect in feddm"],
        ),
        (["algorithm.name=fedamp", "algorithm.step=replace"], ["algorithm.step = Replace() has no effect in fedamp"]),
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
