"""Settings: types, ranges, and messages that say what would work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict, Unpack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.settings import (
    Count,
    Decay,
    Fraction,
    Invalid,
    NonNegative,
    OnlyWith,
    Option,
    Positive,
    Probability,
    Range,
    Whole,
    check,
    check_options,
    check_value,
    nearest,
    options_of,
    refuse_unknown,
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A dataclass with every kind of setting."""

    rate: Positive = 0.1
    count: Count = 1
    name: str = "x"
    flag: bool = False
    kind: Literal["sgd", "adam"] = "sgd"
    size: Count | None = None
    each: tuple[Probability, ...] = ()
    pair: tuple[Whole, str] = (0, "a")
    either: Probability | tuple[Probability, ...] = 1.0
    anything: object = None

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("setting", "good", "bad", "words"),
    [
        (Positive, [1e-300, 0.5, 7], [0, -1, math.nan, math.inf], "> 0"),
        (NonNegative, [0, 0.0, 3], [-1e-9, math.nan, math.inf], ">= 0"),
        (Fraction, [1e-9, 1], [0, 1.0000001, -0.5, math.nan], "> 0 and <= 1"),
        (Probability, [0, 0.5, 1], [-0.1, 1.1, math.nan], ">= 0 and <= 1"),
        (Decay, [0, 0.999], [1, 1.5, -0.1, math.nan], ">= 0 and < 1"),
        (Count, [1, 10**12], [0, -3], ">= 1"),
        (Whole, [0, 5], [-1], ">= 0"),
    ],
)
def test_ranges(setting: Any, good: list[float], bad: list[float], words: str) -> None:
    for value in good:
        assert check_value("key", value, setting) == value
    for value in bad:
        with pytest.raises(Invalid) as refusal:
            check_value("key", value, setting)
        message = str(refusal.value)
        assert message.startswith("key = ") and "is out of range: it must be" in message
        # the bounds as written in the annotation
        assert all(word in message for word in words.split(" and "))


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_range_is_plain_arithmetic(value: float) -> None:
    assert (value in Range(least=-1, below=2)) == (math.isfinite(value) and -1 <= value < 2)
    assert (value in Range(above=-1, most=2)) == (math.isfinite(value) and -1 < value <= 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": "fast"}, "Part.rate = 'fast' must be a number, not str"),
        ({"rate": True}, "Part.rate = True must be a number, not bool"),
        ({"rate": None}, "Part.rate = None must be a number, not NoneType"),
        ({"count": 2.0}, "Part.count = 2.0 must be a whole number, not float"),
        ({"count": True}, "Part.count = True must be a whole number, not bool"),
        ({"name": 3}, "Part.name = 3 must be text, not int"),
        ({"flag": 1}, "Part.flag = 1 must be true or false, not int"),
        ({"kind": "addam"}, "Part.kind = 'addam' is not one of sgd, adam (did you mean 'adam'?)"),
        ({"kind": 7}, "Part.kind = 7 is not one of sgd, adam"),
        ({"size": 0}, "Part.size = 0 is out of range: it must be >= 1"),
        ({"size": "all"}, "Part.size = 'all' must be a whole number, not str"),
        ({"each": 0.5}, "Part.each = 0.5 must be a list, not float"),
        ({"each": (0.5, 2)}, "Part.each[1] = 2.0 is out of range: it must be >= 0 and <= 1"),
        ({"pair": (1,)}, "Part.pair = (1,) must hold 2 values, not 1"),
        ({"pair": (1, 2)}, "Part.pair[1] = 2 must be text, not int"),
        ({"either": "x"}, "Part.either = 'x' must be a number, not str or Part.either = 'x' must be a list, not str"),
        ({"either": 1.5}, "Part.either = 1.5 is out of range: it must be >= 0 and <= 1"),
    ],
)
def test_refusals_name_key_value_and_what_would_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid) as refusal:
        Part(**options)
    assert str(refusal.value).startswith(message)


def test_values_are_made_to_fit_without_loss() -> None:
    part = Part(rate=1, each=[0, 1], size=None, pair=[3, "b"], either=[0.5], anything=[1])  # type: ignore[arg-type]
    assert type(part.rate) is float and part.rate == 1.0
    assert part.each == (0.0, 1.0) and [type(v) for v in part.each] == [float, float]
    assert part.pair == (3, "b") and part.either == (0.5,) and part.anything == [1]
    assert hash(Part(each=[0.5])) == hash(Part(each=(0.5,)))  # type: ignore[arg-type]


def test_whole_numbers_in_a_tuple_become_numbers_too() -> None:
    assert [type(v) for v in check_value("k", (0, 1), tuple[float, ...])] == [float, float]
    assert repr(Part(each=(0, 1))) == repr(Part(each=[0, 1]))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Depending:
    """A part with fields that others keep from having an effect."""

    kind: Literal["plain", "soft"] = "plain"
    temperature: Annotated[Positive, OnlyWith("kind", ("soft",))] = 1.0
    groups: tuple[int, ...] | None = None
    clusters: Annotated[Count, OnlyWith("groups", (None,))] = 2
    near: Annotated[Positive, OnlyWith("groups")] = 0.5

    def __post_init__(self) -> None:
        check(self)


def test_fields_without_effect_are_refused() -> None:
    Depending(kind="soft", temperature=2, clusters=3)
    Depending(temperature=1.0, groups=(1,), clusters=2, near=0.9)  # defaults may be stated
    for options, message in (
        ({"temperature": 2}, "Depending.temperature = 2.0 has no effect with kind = 'plain': leave it out"),
        ({"groups": (1,), "clusters": 3}, "Depending.clusters = 3 has no effect with groups = (1,): leave it out"),
        ({"near": 0.9}, "Depending.near = 0.9 has no effect with groups = None: leave it out"),
    ):
        with pytest.raises(Invalid) as refusal:
            Depending(**options)  # type: ignore[arg-type]
        assert str(refusal.value) == message


def test_numbers_of_numpy_are_numbers() -> None:
    settled = check_value("k", np.int64(3), Count), check_value("k", np.float32(0.5), Positive)
    assert settled == (3, 0.5) and [type(value) for value in settled] == [int, float]
    with pytest.raises(Invalid, match="must be a whole number, not float"):
        check_value("k", np.float64(3.0), Count)


def test_none_only_where_it_is_allowed() -> None:
    assert check_value("k", None, Count | None) is None
    assert check_value("k", None, type(None)) is None
    with pytest.raises(Invalid, match="k = 3 must be left out"):
        check_value("k", 3, type(None))


def test_unchecked_annotations_pass() -> None:
    marker = object()
    assert check_value("k", marker, Any) is marker
    assert check_value("k", marker, Annotated[object, "a note"]) is marker


class Shared(TypedDict, total=False):
    """Options that several factories share."""

    lr: Positive
    batch_size: Count | None


def factory(*, mu: NonNegative = 0.1, depth: Count, **shared: Unpack[Shared]) -> None:
    """A factory with its own, required and shared options."""


def test_options_of_a_factory() -> None:
    known = options_of(factory)
    assert list(known) == ["mu", "depth", "lr", "batch_size"]
    assert known["mu"] == Option(NonNegative, 0.1, False)
    assert known["depth"].required and known["depth"].default is None
    assert known["lr"].annotation == Positive and not known["lr"].required
    assert options_of(Part)["kind"].default == "sgd"


def test_check_options() -> None:
    assert check_options(factory, {"mu": 1, "batch_size": None}, "algorithm") == {"mu": 1.0, "batch_size": None}
    with pytest.raises(Invalid, match=r"algorithm.lr = -1.0 is out of range: it must be > 0"):
        check_options(factory, {"lr": -1}, "algorithm")
    with pytest.raises(Invalid) as refusal:
        check_options(factory, {"batchsize": 3}, "algorithm")
    assert str(refusal.value) == (
        "algorithm.batchsize is not a setting: it is called 'batch_size' here; known here: mu, depth, lr, batch_size"
    )
    with pytest.raises(Invalid, match=r"algorithm.batch_siz is not a setting \(did you mean 'batch_size'\?\)"):
        check_options(factory, {"batch_siz": 3}, "algorithm")


def test_refuse_unknown_at_the_top_level() -> None:
    refuse_unknown(["a"], ["a", "b"], "")
    with pytest.raises(Invalid, match=r"^zzzz is not a setting; known here: a, b$"):
        refuse_unknown(["a", "zzzz"], ["a", "b"], "")
    with pytest.raises(Invalid, match="known here: none"):
        refuse_unknown(["x"], [], "part")


def test_nearest() -> None:
    assert nearest("fedvag", ["fedavg", "simprox"]) == " (did you mean 'fedavg'?)"
    assert nearest("qqq", ["fedavg"]) == ""
    assert nearest(3, ["fedavg"]) == ""


def test_invalid_is_a_value_error() -> None:
    assert issubclass(Invalid, ValueError)
