"""Recipes with their options: read, checked, and refused if they have no effect, for every caller.

A setting that cannot change the algorithm in the given combination is an error, because its user believes that it
does: the algorithm is built without the setting and with other values of it, and if none makes a difference, the
setting is refused, and the error names the other setting that disables it.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ParamSpec, TypeVar

from consilience.core.algorithm import Algorithm
from consilience.core.settings import Invalid, Option, check_value, options_of
from consilience.options.parts import parts_of, protocol_in, read_options, write

P = ParamSpec("P")
Result = TypeVar("Result")
Options = dict[str, Any]
Recipe = Callable[..., Algorithm]
_building = contextvars.ContextVar("building", default=False)  # a recipe called inside a recipe is not checked again


def checked(build: Callable[P, Result], shared: Mapping[str, Option]) -> Callable[P, Result]:
    """The recipe, reading and checking its options first; `shared` has the defaults of those in its `**common`."""

    @functools.wraps(build)
    def recipe(*args: Any, **given: Any) -> Any:
        if args:
            raise Invalid(f"{build.__name__}({args[0]!r}): settings have names, such as {build.__name__}(lr=0.1)")
        if _building.get():
            return build(**given)  # type: ignore[call-arg]
        return built(recipe, given, key=build.__name__)[0]

    recipe.shared = shared  # type: ignore[attr-defined]
    return recipe


def built(
    recipe: Recipe, given: Mapping[str, Any], *, key: str, explicit: Iterable[str] | None = None
) -> tuple[Algorithm, Options]:
    """The algorithm and the options as they were read; of the `explicit` options (all), idle ones are refused."""
    options = read_options(key, _named(recipe, given), options_of(recipe), recipe.__name__)
    try:
        algorithm = _raw(recipe, options)
    except Invalid as problem:
        text = str(problem)
        raise Invalid(text if text.startswith(key) else f"{key}: {text}") from problem
    for name in options if explicit is None else explicit:
        if not _is_default(recipe, name, options[name]) and _is_idle(recipe, options, name, algorithm):
            raise Invalid(f"{key}.{name} = {_shown(options[name])} has no effect {_reason(recipe, options, name)}")
    return algorithm, options


def default_of(recipe: Recipe, name: str) -> Any:
    """The declared default of an option: the recipe's own, else the one that recipes share."""
    own, shared = options_of(recipe)[name], getattr(recipe, "shared", {})
    return shared[name].default if own.default is None and name in shared else own.default


@functools.cache
def default_algorithm(recipe: Recipe) -> Algorithm | None:
    """What a recipe builds without options; None if it has a required option."""
    needs = any(option.required for option in options_of(recipe).values())
    return None if needs else _raw(recipe, {})


def default_part(recipe: Recipe, name: str) -> Any:
    """The part that a recipe is built with where none is given."""
    algorithm = default_algorithm(recipe)
    return getattr(algorithm, name, None) or getattr(getattr(algorithm, "server", None), name, None)


@functools.cache
def shared_defaults(recipe: Recipe) -> Options:
    """The shared options whose shared default is this recipe's, too: stating it builds the same algorithm."""
    known = options_of(recipe)
    needed = {name: next(other_values(option.annotation)) for name, option in known.items() if option.required}
    defaults = {name: option.default for name, option in getattr(recipe, "shared", {}).items() if name in known}
    shared = {name: value for name, value in defaults.items() if value is not None}
    plain = _raw(recipe, needed) if needed else default_algorithm(recipe)
    if plain == _raw(recipe, {**needed, **shared}):  # true of most recipes
        return shared
    return {name: value for name, value in shared.items() if plain == _raw(recipe, {**needed, name: value})}


def _raw(recipe: Recipe, options: Mapping[str, Any]) -> Algorithm:
    """What the recipe itself builds, unchecked."""
    token = _building.set(True)
    try:
        return recipe(**options)
    finally:
        _building.reset(token)


def _tried(recipe: Recipe, options: Mapping[str, Any]) -> Algorithm | None:
    """What the recipe builds; None if it refuses, or is not given what it must have."""
    if any(option.required and name not in options for name, option in options_of(recipe).items()):
        return None
    try:
        return _raw(recipe, options)
    except Invalid:
        return None


def _is_default(recipe: Recipe, name: str, value: Any) -> bool:
    """Whether an option has its default value or part."""
    if value == default_of(recipe, name):
        return True
    return protocol_in(options_of(recipe)[name].annotation) is not None and value == default_part(recipe, name)


def _named(recipe: Recipe, given: Mapping[str, Any]) -> Options:
    """`selection = {fraction = 0.5}` without a name changes the algorithm's default selection."""
    named = dict(given)
    for name, value in given.items():
        option = options_of(recipe).get(name)
        if isinstance(value, Mapping) and "name" not in value and option and protocol_in(option.annotation):
            written = write(default_part(recipe, name))
            named[name] = {**written, **value} if isinstance(written, Mapping) else value
    return named


def _is_idle(recipe: Recipe, options: Options, name: str, algorithm: Algorithm) -> bool:
    """Whether neither leaving an option out nor another value of it changes the algorithm."""
    if _tried(recipe, _without(options, name)) != algorithm:
        return False
    others = other_values(options_of(recipe)[name].annotation, options[name])
    return all(_tried(recipe, {**options, name: value}) in (None, algorithm) for value in others)


def _reason(recipe: Recipe, options: Options, name: str) -> str:
    """Which other setting disables an option, and the fix."""
    for other in options:
        rest = _without(options, other)
        if other != name and _matters(recipe, rest, name):
            return f"with {other} = {_shown(options[other])}: leave out one of the two"
    for other, option in options_of(recipe).items():
        default = default_of(recipe, other)
        if other not in options and any(
            _matters(recipe, {**options, other: value}, name)
            for value in itertools.islice(other_values(option.annotation, default), 3)
        ):
            return f"with {other} = {default!r}: set {other} as well, or leave {name} out"
    return f"in {recipe.__name__}, which is the same with any other value: leave it out"


def _matters(recipe: Recipe, options: Options, name: str) -> bool:
    with_it, without = _tried(recipe, options), _tried(recipe, _without(options, name))
    return with_it is not None and without is not None and with_it != without


def _shown(value: Any) -> str:
    """A value as it was given; of a part with many settings its class alone."""
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__}(...)"


def _without(options: Options, name: str) -> Options:
    return {key: value for key, value in options.items() if key != name}


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
    """The part with its defaults, else with the first further option that makes it valid."""
    known = options_of(kind)
    needed = {name: next(other_values(option.annotation), None) for name, option in known.items() if option.required}
    optional = [field.name for field in dataclasses.fields(kind) if field.name not in needed]
    others = ({name: next(other_values(known[name].annotation), None)} for name in optional)
    for more in itertools.chain([{}], others):  # one at a time: a part may hold others of its kind
        try:
            yield kind(**needed, **more)
        except Invalid:
            continue
        return
