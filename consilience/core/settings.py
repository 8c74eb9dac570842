"""Validation of settings: a field's annotation gives its type and range."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from consilience.core import renamed


class Invalid(ValueError):
    """Raised for an invalid setting; the message names it and the valid values."""


LARGEST = 2**63 - 1
SYNONYMS = {
    **dict.fromkeys(("learning_rate", "eta", "step_size", "client_lr", "local_lr"), "lr"),
    **dict.fromkeys(("optimizer", "optim", "solver"), "optimiser"),
    **dict.fromkeys(("local_epochs", "num_epochs", "n_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("batchsize", "minibatch_size", "local_batch_size"), "batch_size"),
    **dict.fromkeys(
        (
            *("fraction", "fraction_fit", "fraction_train", "client_fraction", "join_ratio", "participation"),
            *("sampling", "clients_per_round", "cohort_size", "num_clients", "sample_ratio", "frac"),
        ),
        "selection",
    ),
    **dict.fromkeys(("aggregation", "aggregator", "aggregate", "robust"), "combine"),
    **dict.fromkeys(("weights", "client_weights"), "weighting"),
    **dict.fromkeys(("compression", "compressor", "noise"), "channel"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "lr_schedule"),
    **dict.fromkeys(("server_optimizer", "server_optimiser"), "step"),
    **dict.fromkeys(("clip", "max_grad_norm", "gradient_clipping"), "clip_norm"),
    **dict.fromkeys(("num_rounds", "n_rounds", "global_rounds"), "rounds"),
}
"""Names of our settings in other libraries, for error messages."""

ELSEWHERE = {"rounds", "seed", "device", "environment", "kind", "loss", "lane", "dtype"}
"""Settings of a run that users mistake for settings of its algorithm."""


@dataclass(frozen=True)
class Range:
    """The range of a number: least <= value <= most, above < value < below."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return not (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
            or (self.below is not None and value >= self.below)
        )

    def __str__(self) -> str:
        signs = ((">=", self.least), (">", self.above), ("<=", self.most), ("<", self.below))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)


@dataclass(frozen=True)
class OnlyWith:
    """A setting that has an effect only if the setting `key` has one of these values (None: is not given)."""

    key: str
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        chosen = " | ".join("none" if value is None else str(value) for value in self.values)
        return f"(only with {self.key}{f' = {chosen}' if chosen else ''})"


Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(least=0)]
Fraction = Annotated[float, Range(above=0, most=1)]
Probability = Annotated[float, Range(least=0, most=1)]
Decay = Annotated[float, Range(least=0, below=1)]
Count = Annotated[int, Range(least=1)]
Whole = Annotated[int, Range(least=0)]


@functools.cache
def hints_of(of: Any) -> dict[str, Any]:
    """The resolved annotations of a dataclass or function, ranges included."""
    return typing.get_type_hints(of, include_extras=True)


def check(part: Any) -> None:
    """Refuse a dataclass whose fields break their annotated types or ranges (call it in `__post_init__`)."""
    kind: Any = type(part)
    hints, known, given = hints_of(kind), _fields_of(kind), {}
    for name in known:
        value = getattr(part, name)
        given[name] = checked = check_value(f"{kind.__name__}.{name}", value, hints[name])
        if checked is not value:
            object.__setattr__(part, name, checked)
    refuse_idle(given, known, kind.__name__)


@functools.cache  # finding out which options do nothing builds an algorithm hundreds of times
def _fields_of(kind: Any) -> dict[str, Option]:
    hints = hints_of(kind)
    return {field.name: Option(hints[field.name], field.default) for field in dataclasses.fields(kind)}


class Checked:
    """A dataclass whose fields are checked against their annotations when it is made (`check`)."""

    def __post_init__(self) -> None:
        check(self)


def refuse_idle(given: Mapping[str, Any], known: Mapping[str, Option], key: str) -> None:
    """Refuse a given setting that has no effect because of the setting it depends on (`OnlyWith`)."""
    for name, value in given.items():
        for note in getattr(known[name].annotation, "__metadata__", ()):
            if isinstance(note, OnlyWith) and value != known[name].default:
                other = given.get(note.key, known[note.key].default)
                if not (other in note.values if note.values else other is not None):
                    raise Invalid(f"{key}.{name} = {value!r} has no effect with {note.key} = {other!r}: leave it out")


def check_value(key: str, value: Any, annotation: Any) -> Any:
    """The value, converted to its annotation without loss (1 -> 1.0, list -> tuple), or `Invalid`."""
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:  # floats and 64-bit integers cannot hold it
        raise Invalid(f"{key} is a whole number of {value.bit_length()} bits: it must be at most 2**63 - 1")
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner, *notes = typing.get_args(annotation)
        value = check_value(key, value, inner)
        for note in notes:
            if isinstance(note, Range) and value not in note:
                raise Invalid(f"{key} = {value!r} is out of range: it must be {note}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _check_union(key, value, typing.get_args(annotation))
    if origin is Literal:
        allowed = typing.get_args(annotation)
        if isinstance(value, np.ndarray) or value not in allowed:
            new = renamed.value(value, allowed)
            if new is not None:
                raise Invalid(f"{key} = {value!r} is now called {new!r} (`consilience migrate` rewrites a config file)")
            raise Invalid(f"{key} = {value!r} is not one of {_listed(allowed)}{nearest(value, allowed)}")
        return value
    if origin is tuple:
        return _check_tuple(key, value, typing.get_args(annotation))
    if annotation in (int, float) and isinstance(value, numbers.Real) and hasattr(value, "item"):  # NumPy's numbers
        value = value.item()
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wrong_bool = isinstance(value, bool) and annotation in (int, float)
    if annotation in (int, float, str, bool) and (wrong_bool or not isinstance(value, annotation)):
        raise Invalid(f"{key} = {value!r} must be {_kind(annotation)}, not {type(value).__name__}")
    if annotation is type(None) and value is not None:
        raise Invalid(f"{key} = {value!r} must be left out")
    if origin is Mapping and not isinstance(value, Mapping):
        raise Invalid(f"{key} = {value!r} must be a table, not {type(value).__name__}")
    if getattr(annotation, "_is_protocol", False) or dataclasses.is_dataclass(annotation):
        _check_part(key, value, annotation)
    return value


@functools.cache
def members_of(protocol: type) -> tuple[str, ...]:
    """What a part must have to be one of a protocol's."""
    return tuple(name for name in vars(protocol) if not name.startswith("_") or name == "__call__")


def missing(value: Any, members: Iterable[str]) -> list[str]:
    """The members that a value lacks; an array or a text lacks all: `choose` and `split` mean something else there."""
    return [name for name in members if isinstance(value, (np.ndarray, str)) or not hasattr(value, name)]


def _check_part(key: str, value: Any, kind: type) -> None:
    """Refuse what is not of a dataclass, or lacks members of a protocol."""
    if isinstance(value, type):
        raise Invalid(f"{key} = {value.__name__} is a class, not a part: write {value.__name__}(...)")
    members = () if dataclasses.is_dataclass(kind) else members_of(kind)
    lacks = missing(value, members)
    if lacks or not (members or isinstance(value, kind)):
        why = f": it has no {', '.join(lacks)}" if 0 < len(lacks) < len(members) else ""
        raise Invalid(f"{key} = {value!r} is no {kind.__name__}{why}")


@dataclass(frozen=True)
class Option:
    """One setting of a factory: its annotation, and its default (None if required or set elsewhere)."""

    annotation: Any
    default: Any = None
    required: bool = False


@functools.cache
def options_of(factory: Callable[..., Any]) -> dict[str, Option]:
    """The keyword arguments of a function or dataclass, including those of `**common: Unpack[...]`."""
    hints = hints_of(factory)
    known: dict[str, Option] = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            empty = parameter.default is parameter.empty
            known[name] = Option(hints.get(name, Any), None if empty else parameter.default, empty)
        elif parameter.kind is parameter.VAR_KEYWORD and typing.get_origin(hints.get(name)) is typing.Unpack:
            (shared,) = typing.get_args(hints[name])
            known.update({key: Option(hint) for key, hint in hints_of(shared).items()})
    return known


def check_options(factory: Callable[..., Any], given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Options for `factory`, checked against its annotations before it is called."""
    known = options_of(factory)
    refuse_unknown(given, known, key)
    checked = {name: check_value(f"{key}.{name}", value, known[name].annotation) for name, value in given.items()}
    refuse_idle(checked, known, key)
    return checked


def refuse_unknown(given: Iterable[str], known: Iterable[str], key: str) -> None:
    """Refuse the first unknown name and suggest the nearest known one."""
    known = list(known)
    for name in given:
        if name not in known:
            place = f"{key}.{name}" if key else name
            new = renamed.option(name, known)
            if new is not None:
                raise Invalid(f"{place} is now called {new}: write that (`consilience migrate` rewrites a config file)")
            other = SYNONYMS.get(str(name).lower().replace("-", "_"))
            hint = f": it is called {other!r} here" if other in known else nearest(name, known)
            if "optimiser" in known and (other or name) in ELSEWHERE:  # the options of an algorithm
                hint = f" of an algorithm: give {other or name} to cs.train, or write it above [algorithm] in a config"
            raise Invalid(f"{place} is not a setting{hint}; known here: {_listed(known)}")


def nearest(name: Any, known: Iterable[Any]) -> str:
    """' (did you mean ...?)' for the closest known name, or nothing."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check_union(key: str, value: Any, members: tuple[Any, ...]) -> Any:
    if value is None and type(None) in members:
        return None
    members = tuple(m for m in members if m is not type(None))
    problems = []
    for member in members:
        try:
            return check_value(key, value, member)
        except Invalid as problem:
            problems.append(str(problem))
    raise Invalid(" or ".join(dict.fromkeys(problems)))


def _check_tuple(key: str, value: Any, members: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.tolist()
    if not isinstance(value, (tuple, list)):
        alone = f": write [{value!r}]" if isinstance(value, (str, int, float)) else ""
        raise Invalid(f"{key} = {value!r} must be a list, not {type(value).__name__}{alone}")
    if len(members) == 2 and members[1] is Ellipsis:
        members = (members[0],) * len(value)
    if len(members) != len(value):
        raise Invalid(f"{key} = {value!r} must hold {len(members)} values, not {len(value)}")
    checked = tuple(check_value(f"{key}[{i}]", v, m) for i, (v, m) in enumerate(zip(value, members)))
    same = isinstance(value, tuple) and all(new is old for new, old in zip(checked, value))
    return tuple(value) if same else checked


def _kind(annotation: type) -> str:
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[annotation]


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(str(name) for name in names) or "none"
