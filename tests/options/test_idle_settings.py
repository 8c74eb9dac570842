"""Settings of models, data, partitions and environments that cannot change anything are refused, as in recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

import consilience as cs
from consilience import models
from consilience.core.settings import Invalid, OnlyWith, Option, options_of, refuse_idle
from consilience.environments.environment import Environment
from consilience.experiments.config import config
from consilience.experiments.config.catalogue import KINDS, listing
from consilience.options.parts import read_options


def dependent() -> Iterator[tuple[str, str, OnlyWith, dict[str, Option]]]:
    """Every setting that depends on another: its factory, its name, on what it depends, and all settings beside it."""
    for section, kind in (("model", "models"), ("data", "datasets"), ("partition", "partitions")):
        for entry in listing()[kind]:
            known = options_of(KINDS[section].find(entry.name)[1])
            for name, option in known.items():
                for note in getattr(option.annotation, "__metadata__", ()):
                    if isinstance(note, OnlyWith):
                        yield f"{section}.{entry.name}", name, note, known


DEPENDENT = list(dependent())


def another(default: Any) -> Any:
    """A value that is not the default."""
    return default + 1 if isinstance(default, (int, float)) and not isinstance(default, bool) else ("another",)


def test_there_are_such_settings_and_they_depend_on_settings_beside_them() -> None:
    found = {(place, name) for place, name, _, _ in DEPENDENT}
    assert {("model.hugging_face", "rank"), ("data.banking77", "encoder"), ("partition.quantity", "sigma")} <= found
    for place, name, note, known in DEPENDENT:
        assert note.key in known, f"{place}.{name} depends on {note.key}, which is not there"


@pytest.mark.parametrize(("place", "name", "note", "known"), DEPENDENT, ids=lambda value: str(value)[:40])
def test_a_setting_is_refused_where_it_has_no_effect_and_taken_where_it_has(
    place: str, name: str, note: OnlyWith, known: dict[str, Option]
) -> None:
    value = another(known[name].default)
    off = "off" if note.values else None
    with pytest.raises(Invalid, match=rf"{place}\.{name} = .* has no effect with {note.key} = "):
        refuse_idle({name: value, note.key: off}, known, place)
    refuse_idle({name: known[name].default, note.key: off}, known, place)  # stating the default is no mistake
    for live in note.values or ("on",):
        refuse_idle({name: value, note.key: live}, known, place)


def hugging_face(**options: Any) -> None:
    models.build("hugging_face", (5,), 2, config={"model_type": "bert"}, **options)


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: config.load(None, ["model=hugging_face", "model.rank=2"]), r"model\.rank = 2 has no effect with train"),
    (lambda: hugging_face(rank=2, train="head"), r"hugging_face\.rank = 2 has no effect with train = 'head'"),
    (
        lambda: models.build("resnet18", (3, 8, 8), 2, groups=4),
        r"resnet18\.groups = 4 has no effect with norm = 'batch'",
    ),
    (lambda: cs.load_data("banking77", encoder="x"), r"data set banking77\.encoder = 'x' has no effect with features"),
    (lambda: cs.load_data("synthetic_text", masked=0.3), r"masked = 0\.3 has no effect with objective = 'next'"),
    (lambda: cs.partition("quantity", clients=3, sigma=2.0), r"partition\.sigma = 2\.0 has no effect with kind"),
    (lambda: Environment(jitter=0.5), r"Environment\.jitter = 0\.5 has no effect, since nothing takes time"),
    (
        lambda: config.load(None, ["environment.deadline=2.0"]),
        r"deadline = 2\.0 has no effect, since",
    ),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message[:30] for _, message in CALLS])
def test_from_python_and_from_configs(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        call()


def test_options_are_read_with_what_they_depend_on() -> None:
    known = options_of(models.find("resnet18"))
    given = {"norm": "group", "groups": 4, "inputs": (3, 8, 8), "classes": 2}
    assert read_options("model", given, known, "resnet18")["groups"] == 4
    assert get_args(known["groups"].annotation)
