"""Robust rules and attacks from a config: nested parts are found by name, and what cannot work is refused at start."""

from __future__ import annotations

import pytest

from consilience.channel.attacks import ALittleIsEnough, InnerProduct, SignFlip
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Invalid
from consilience.experiments import assembly
from consilience.experiments.config import config
from consilience.experiments.config.catalogue import KINDS
from consilience.server import Averaging
from consilience.server.averaging.combining.coordinate_wise import TrimmedMean
from consilience.server.averaging.combining.geometric_median import GeometricMedian
from consilience.server.averaging.combining.krum import Krum, MultiKrum
from consilience.server.averaging.combining.nearest_neighbour_mixing import NearestNeighbourMixing
from consilience.server.averaging.steps.adaptive import AdamStep

QUICK = ("data=digits", "partition.clients=6", "partition.alpha=5.0", "rounds=1")


def algorithm(*overrides: str) -> Algorithm:
    found = config.load(None, (*QUICK, *overrides))
    again = config.from_table(found.table())
    assert again == found
    return KINDS["algorithm"].build(found.algorithm.name, found.algorithm.options)


def test_rules_steps_and_attacks_combine_by_name() -> None:
    made = algorithm(
        "algorithm=fedavg",
        "algorithm.combine={name='nearest_neighbour_mixing', f=2, then={name='multi_krum', f=2, keep=1}}",
        "algorithm.step={name='adam', lr=0.1}",
        "algorithm.channel={name='inner_product', clients=[0, 3], against={name='trimmed_mean', f=0.25}}",
    )
    assert isinstance(made.server, Averaging)
    assert made.server.combine == NearestNeighbourMixing(f=2, then=MultiKrum(f=2, keep=1))
    assert made.server.step == AdamStep(lr=0.1)
    assert made.channel == InnerProduct(clients=(0, 3), against=TrimmedMean(f=0.25))


def test_a_share_and_a_number_are_told_apart() -> None:
    for text, expected in (("0.2", 0.2), ("2", 2), ("0", 0)):
        made = algorithm("algorithm=krum", f"algorithm.f={text}")
        assert isinstance(made.server, Averaging) and made.server.combine == Krum(f=expected)
    made = algorithm(
        "algorithm=geometric_median", "algorithm.mix=0.3", "algorithm.channel={name='sign_flip', fraction=0.2}"
    )
    assert isinstance(made.server, Averaging)
    assert made.server.combine == NearestNeighbourMixing(f=0.3, then=GeometricMedian())
    assert made.channel == SignFlip(fraction=0.2)
    made = algorithm("algorithm=fedavg", "algorithm.channel={name='a_little_is_enough', fraction=0.2, strength='none'}")
    assert made.channel == ALittleIsEnough(fraction=0.2, strength=None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm=krum", "algorithm.f=2"), "n >= 2f + 3 = 7 replies, but n = 6"),
        (
            ("algorithm=krum", "algorithm.f=1", "algorithm.selection={name='uniform', count=4}"),
            "n >= 2f + 3 = 5 replies, but n = 4",
        ),
        (
            ("algorithm=fedavg", "algorithm.combine={name='bulyan', f=1}", "partition.clients=5"),
            "n >= 4f + 3 = 7 replies, but n = 5",
        ),
        (("algorithm=trimmed_mean", "algorithm.f=3"), "n >= 2f + 1 = 7 replies, but n = 6"),
        (("algorithm=trimmed_mean", "algorithm.f=0.5"), "algorithm.f = 0.5"),
        (("algorithm=krum", "algorithm.combine=median"), "algorithm.combine = Median() has no effect in krum"),
        (("algorithm=krum", "algorithm.weighting=simprox"), "counts every reply the same"),
        (("algorithm=fedavg", "algorithm.channel=sign_flip"), "SignFlip takes either clients or fraction"),
    ],
)
def test_what_cannot_work_is_refused_before_training(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(Invalid) as problem:
        assembly.assemble(config.load(None, (*QUICK, *overrides)))
    assert message in str(problem.value)
