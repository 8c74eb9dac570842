"""Parts made in Python check the parts that they are given, as recipes and configs do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import consilience as cs
from consilience.core.algorithm import Algorithm
from consilience.core.plans import Work
from consilience.core.protocols import Channel, ClientRule, Selection, ServerRule
from consilience.core.settings import Invalid, hints_of
from consilience.options.parts import parts_of
from consilience.privacy.noise_shares import NoiseShares
from consilience.selection import Everyone, Uniform
from consilience.server.averaging.averaging import Averaging
from consilience.server.protocols import Combine, Weighting
from consilience.server.rules.buffered import Buffered

PROTOCOLS = (Selection, ClientRule, Channel, ServerRule, Weighting, Combine)
NEEDED: dict[str, dict[str, Any]] = {
    "CappedWeights": {"max_client": 0.5},
    "PrivateSum": {"shares": NoiseShares(noise=1.0, clients=5)},
}


def holders() -> list[tuple[type, str]]:
    """Every part, and the algorithm, with a field for a part."""
    kinds = {kind for protocol in PROTOCOLS for kind in parts_of(protocol).values()} | {Algorithm}
    return sorted(
        (
            (kind, name)
            for kind in kinds
            for name, hint in hints_of(kind).items()
            if getattr(hint, "_is_protocol", False)
        ),
        key=lambda found: (found[0].__name__, found[1]),
    )


@pytest.mark.parametrize(("kind", "name"), holders(), ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize(
    "value", [None, 5, "uniform", Uniform, np.zeros(3)], ids=["none", "5", "text", "class", "array"]
)
def test_a_field_for_a_part_takes_nothing_else(kind: Any, name: str, value: Any) -> None:
    parts: dict[str, Any] = {"selection": Everyone(), "client": cs.fedavg().client, "server": Averaging()}
    others = parts if kind is Algorithm else NEEDED.get(kind.__name__, {})
    with pytest.raises(Invalid, match=rf"{kind.__name__}\.{name} = .* (is no|is a class, not a) "):
        kind(**{**others, name: value})


def test_there_are_such_fields() -> None:
    found = {(kind.__name__, name) for kind, name in holders()}
    assert {
        ("Algorithm", "server"),
        ("Averaging", "step"),
        ("LocalOnly", "training"),
        ("CappedWeights", "inner"),
    } <= found


def test_what_a_part_lacks_is_named_and_a_field_for_one_class_takes_it_alone() -> None:
    class Half:
        def init(self, start: Any, clients: int) -> Any: ...

    with pytest.raises(
        Invalid, match=r"Averaging\.weighting = .*Half.* is no Weighting: it has no needs_each_reply, weigh"
    ):
        Averaging(weighting=Half())  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"Buffered\.averaging = Everyone\(\) is no Averaging$"):
        Buffered(averaging=Everyone())  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"LocalTraining\.work = 3 is no Work$"):
        dataclasses.replace(cs.fedavg().client, work=3)  # type: ignore[type-var]


def test_none_is_no_part_in_a_list() -> None:
    for option in ("terms", "memory", "ledgers", "augment"):
        with pytest.raises(Invalid, match=rf"fedavg\.{option}\[0\] = None is no "):
            cs.fedavg(**{option: [None]})  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"selection = array.* is not one of .*: write a name"):
        cs.fedavg(selection=np.array([0, 2]))  # type: ignore[typeddict-item]


def test_arrays_are_taken_as_lists_and_nowhere_else() -> None:
    given = np.array([1.0, 3.0])
    assert cs.fedavg(class_shares=given) == cs.fedavg(class_shares=(1.0, 3.0))  # type: ignore[typeddict-item]
    assert Work(class_shares=given).class_shares == (1.0, 3.0)  # type: ignore[arg-type]
    for option in ("lr", "optimiser", "epochs"):
        with pytest.raises(Invalid, match=rf"fedavg\.{option} = array\(\[1\., 3\.\]\) "):
            cs.fedavg(**{option: given})  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"fedavg\.class_shares\[1\] = nan is out of range"):
        cs.fedavg(class_shares=np.array([1.0, math.nan]))  # type: ignore[typeddict-item]
