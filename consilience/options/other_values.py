"""Other values that a setting could have, by its annotation: to find out whether it has an effect."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from consilience.core.settings import Invalid, check_value, options_of
from consilience.options.parts import parts_of

_NUMBERS = (2, 3, 0.5, 0.25, 0.95, 10, 1, 0)


def other_values(annotation: Any, value: Any = None) -> Iterator[Any]:
    """Valid values of an annotated setting other than `value`, simple ones first."""
    for candidate in _candidates(annotation):
        try:
            checked = check_value("", candidate, annotation)
        except Invalid:
            continue
        if type(checked) is not type(value) or checked != value:
            yield checked


def _candidates(annotation: Any) -> Iterator[Any]:
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _candidates(inside[0])
    elif origin in (typing.Union, types.UnionType):
        for member in inside:
            yield from _candidates(member)
    elif origin is typing.Literal:
        yield from inside
    elif origin is tuple:
        yield from _tuples(inside)
    elif annotation is bool:
        yield from (True, False)
    elif annotation in (int, float):
        yield from _NUMBERS
    elif annotation is str:
        yield from ("other", "")
    elif annotation is type(None):
        yield None
    elif getattr(annotation, "_is_protocol", False):
        for kind in parts_of(annotation).values():
            yield from _parts(kind)


def _tuples(members: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if members[-1] is Ellipsis:
        for value in _candidates(members[0]):
            yield (value,)
        yield ()
        return
    each = [next(other_values(member), None) for member in members]
    yield tuple(each)


def _parts(kind: type) -> Iterator[Any]:
    """A part with its defaults, else with one more option than it must have."""
    known = options_of(kind)
    needed = {name: next(other_values(option.annotation), None) for name, option in known.items() if option.required}
    optional = [field.name for field in dataclasses.fields(kind) if field.name not in needed]
    # one by one: a part that can hold another of its kind would go on for ever
    one_more = ({name: next(other_values(known[name].annotation), None)} for name in optional)
    for more in itertools.chain([{}], one_more):
        try:
            yield kind(**needed, **more)
        except Invalid:
            continue
        return
