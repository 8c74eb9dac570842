"""Every numeric option of every recipe has a range to search, or a reason why it is not tuned."""

from __future__ import annotations

import pytest

from consilience import algorithms
from consilience.core.settings import Invalid, check_value
from consilience.experiments.config.catalogue import section_options
from consilience.options.parts import takes_numbers
from consilience.options.ranges import RANGES, SearchRange, ruled, space

NUMERIC = [
    (recipe, option)
    for recipe in algorithms.names()
    for option, declared in section_options("algorithm", recipe).items()
    if takes_numbers(declared.annotation)
]


def test_every_numeric_option_is_ruled_on() -> None:
    silent = [f"{recipe}.{option}" for recipe, option in NUMERIC if ruled(recipe, option) is None]
    assert not silent, "give each a range, or the reason why it is not tuned, in options/ranges.py"


def test_no_rule_is_for_an_option_that_is_not_there() -> None:
    used = {f"{recipe}.{option}" for recipe, option in NUMERIC} | {option for _, option in NUMERIC}
    assert set(RANGES) <= used


def test_both_ends_of_a_range_are_values_of_the_option() -> None:
    for recipe, option in NUMERIC:
        found = ruled(recipe, option)
        if isinstance(found, SearchRange):
            annotation = section_options("algorithm", recipe)[option].annotation
            assert all(check_value(f"{recipe}.{option}", end, annotation) == end for end in found.ends)


def test_every_method_has_something_to_tune_and_what_is_given_is_left_alone() -> None:
    for recipe in algorithms.names():
        known = section_options("algorithm", recipe)
        assert "lr" in space(recipe, known, {}, {})
        assert "lr" not in space(recipe, known, {"lr": 0.1}, {})


def test_a_range_of_the_file_wins_and_one_for_a_recipe_is_for_it_alone() -> None:
    known = section_options("algorithm", "fedprox")
    mine, own = SearchRange(low=2, high=3), SearchRange(low=4, high=5)
    found = space("fedprox", known, {}, {"lr": mine, "fedprox.mu": own, "moon.mu": mine})
    assert found["lr"] == mine and found["mu"] == own
    assert space("fedprox", known, {}, {"epochs": mine})["epochs"] == mine  # not tuned unless it is asked for
    with pytest.raises(Invalid, match=r"tune.ranges.fedprox.nu is not a setting"):
        space("fedprox", known, {}, {"fedprox.nu": own})
    with pytest.raises(Invalid, match=r"tune.ranges.fedprox.lr = -1.0 is out of range"):
        space("fedprox", known, {}, {"lr": SearchRange(low=-1, high=1)})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"low": 1.0, "high": 1.0}, "must be below high"),
        ({"low": 0.0, "high": 1.0, "log": True}, "must be above 0 with log"),
        ({"low": 0.5, "high": 2.0, "whole": True}, "must be whole numbers"),
        ({"low": 0.0, "high": float("inf")}, "both finite"),
    ],
)
def test_ranges_that_hold_nothing_are_refused(given: dict[str, float], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        SearchRange(**given)  # type: ignore[arg-type]
