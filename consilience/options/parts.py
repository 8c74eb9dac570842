"""Parts by name: builds `selection = {name = "uniform", fraction = 0.3}` by the option's annotated protocol.

There is no registry: every dataclass in the part packages, or in the package that declares the protocol, that has the
protocol's members is one of its parts. From Python the same names and tables work, next to the parts themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from consilience.core import renamed
from consilience.core.protocols import Channel, Selection
from consilience.core.settings import (
    Invalid,
    Option,
    check_value,
    members_of,
    missing,
    nearest,
    options_of,
    refuse_idle,
    refuse_unknown,
)
from consilience.selection.uniform import Uniform

PACKAGES = ("consilience.selection", "consilience.client", "consilience.channel", "consilience.server")
NONE = "none"  # TOML has no null
# optional at the end of a name
_FAMILY_WORDS = ("weights", "weighting", "selection", "channel", "step", "rule", "staleness")


def parts_of(protocol: type) -> dict[str, type]:
    """The dataclasses that have a protocol's members, by name, sorted."""
    package = protocol.__module__.rpartition(".")[0]
    packages = PACKAGES if package.startswith((*PACKAGES, "consilience.core")) else (*PACKAGES, package)
    fitting = [kind for kind in _dataclasses(packages) if all(_has(kind, name) for name in members_of(protocol))]
    return {name_of(kind): kind for kind in sorted(fitting, key=name_of)}


def name_of(kind: type) -> str:
    """The name of a part in a config: its file's name if that matches the class, else the class name in snake case."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=^[A-Z])(?=[A-Z][a-z])", "_", kind.__name__).lower()
    for word in _FAMILY_WORDS:
        words = words.removesuffix(f"_{word}")
    file = kind.__module__.rpartition(".")[2]
    return file if file.replace("_", "") == words.replace("_", "") else words


def find(key: str, name: Any, protocol: type, words: Sequence[str] = ()) -> type:
    """The part of that name; capitals, dashes, underscores and a last word such as Weights do not matter."""
    known = parts_of(protocol)
    if isinstance(name, str):
        wanted = name.lower().replace("-", "_")
        for given in (wanted, *(wanted.removesuffix(f"_{word}") for word in _FAMILY_WORDS)):
            for own, kind in known.items():
                if given.replace("_", "") in (own.replace("_", ""), kind.__name__.lower()):
                    return kind
        new = renamed.part(name, known)
        if new is not None:
            raise Invalid(f"{key} = {name!r} is now called {new!r} (`consilience migrate` rewrites a config file)")
    every = _named_once(words, known)
    hint = nearest(name, every)
    if protocol is Selection and isinstance(name, str):
        hint = _selection_hint(name) or hint
    raise Invalid(f"{key} = {name!r} is not one of {', '.join(every) or 'none'}{hint}")


def _named_once(words: Iterable[str], parts: Iterable[str]) -> list[str]:
    """Words and names of parts; a part with a word of its own, such as n_adam for nadam, is left out."""
    words = tuple(words)
    return [*words, *(name for name in parts if name.replace("_", "") not in words)]


def _selection_hint(name: str) -> str:
    """The fix for a selection that is a common word or a number in quotes."""
    if name.lower() in ("all", "every", "full"):
        return ": all clients are 'everyone'"
    if name.lower() in ("random", "sample", "half"):
        return ": some clients, drawn at random, are a fraction such as 0.5"
    try:
        return f": write the number {float(name):g} without quotes"
    except ValueError:
        return ""


def build(key: str, given: Any, protocol: type, words: Sequence[str] = ()) -> Any:
    """A part from its name, from a table of its name and options, or as it is; a selection also from a fraction.

    `words` are also allowed in its place, and are listed with the parts in errors.
    """
    if protocol is Selection and isinstance(given, (int, float)) and not isinstance(given, bool):
        return _share(key, given)
    table = {"name": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping):
        if not missing(given, members_of(protocol)):
            return given  # without a list of all parts, which would import their modules
        fix = "write a name, or a table {name = ..., ...}"
        if protocol is Channel and isinstance(given, (list, tuple)):
            fix = "several in sequence are {name = 'chain', channels = [...]}"
        raise Invalid(f"{key} = {given!r} is not one of {_known(protocol, words)}: {fix}")
    if "name" not in table:
        raise Invalid(f"{key}.name is missing: say which of {_known(protocol, words)}")
    kind = find(f"{key}.name" if isinstance(given, Mapping) else key, table["name"], protocol, words)
    options = read_options(key, {k: v for k, v in table.items() if k != "name"}, options_of(kind), name_of(kind))
    return made(key, kind, options)


def _known(protocol: type, words: Sequence[str]) -> str:
    return ", ".join(_named_once(words, parts_of(protocol)))


def _share(key: str, given: float) -> Uniform:
    """`selection = 0.5`: half of the clients, drawn anew in every round."""
    if 0 < given < 1:
        return Uniform(fraction=float(given))
    if given == 1:
        raise Invalid(f"{key} = {given!r} could mean one client or all: write 'everyone', or {_counted(1)}")
    number = isinstance(given, int) and given > 1
    raise Invalid(
        f"{key} = {given!r} is not a fraction of the clients, which is between 0 and 1"
        + (f": for {given} clients use {_counted(given)}" if number else "")
    )


def _counted(count: Any) -> str:
    return f"the selection 'uniform' with count = {count}"


def made(key: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Call the factory; its errors get the key of the setting."""
    try:
        return factory(**options)
    except Invalid as problem:
        raise Invalid(str(problem) if str(problem).startswith(key) else f"{key}: {problem}") from problem


def read_options(key: str, given: Mapping[str, Any], known: Mapping[str, Option], owner: str) -> dict[str, Any]:
    """Options read by their annotations; unknown, wrong and missing ones are refused by key."""
    refuse_unknown(given, known, key)
    checked = {name: read(f"{key}.{name}", value, known[name].annotation) for name, value in given.items()}
    for name, option in known.items():
        if option.required and name not in checked:
            how = f", such as {{'name': {owner!r}, {name!r}: ...}}" if owner != key.split(".")[0] and "." in key else ""
            raise Invalid(f"{key}.{name} is missing: {owner} needs it ({describe(option.annotation)}){how}")
    refuse_idle(checked, known, key)
    return checked


def read(key: str, value: Any, annotation: Any) -> Any:
    """Read a given value: parts are built, lists become tuples, "none" becomes None; checked by the annotation."""
    return check_value(key, _converted(key, value, annotation), annotation)


def write(value: Any) -> Any:
    """The inverse of `read`: parts become tables, None becomes "none"."""
    if value is None:
        return NONE
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        given = {field.name: write(item) for field, item in fields if item is not None or field.default is not None}
        return {"name": name_of(type(value)), **given}
    if isinstance(value, Mapping):
        return {str(key): write(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [write(item) for item in value]
    return value


def protocol_in(annotation: Any) -> type | None:
    """The protocol an option's annotation asks for, if any."""
    return next((member for member in _members(annotation) if getattr(member, "_is_protocol", False)), None)


def takes_lists(annotation: Any) -> bool:
    """Whether an option's value may itself be a list."""
    return any(_takes_lists(member) for member in _members(annotation))


def takes_numbers(annotation: Any) -> bool:
    """Whether an option's value may be a number."""
    return any(member in (int, float) for member in _members(annotation))


def describe(annotation: Any) -> str:
    """An annotation in words: 'number > 0', 'list of whole number >= 1', 'everyone | uniform'."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner, *notes = typing.get_args(annotation)
        return " ".join([describe(inner), *(str(note) for note in notes)])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(member) for member in typing.get_args(annotation)))
    if origin is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    if origin is tuple:
        inner = [describe(member) for member in typing.get_args(annotation) if member is not Ellipsis]
        return f"list of {inner[0]}" if len(set(inner)) == 1 else f"[{', '.join(inner)}]"
    if getattr(annotation, "_is_protocol", False):
        return " | ".join(parts_of(annotation))
    words = {int: "whole number", float: "number", str: "text", bool: "true | false", type(None): NONE}
    return words.get(annotation) or ("table" if origin is not None else str(getattr(annotation, "__name__", "any")))


def _converted(key: str, value: Any, annotation: Any) -> Any:
    members = list(_members(annotation))
    if value is None or (isinstance(value, str) and value == NONE and type(None) in members):
        return None
    protocol = protocol_in(annotation)
    choices = [str(c) for m in members if typing.get_origin(m) is typing.Literal for c in typing.get_args(m)]
    named = isinstance(value, str) and value.lower() in [choice.lower() for choice in choices]
    if protocol is not None and not named:  # a word in the annotation has precedence over a part of that name
        return build(key, value, protocol, choices)
    for member in members:
        if typing.get_origin(member) is tuple and isinstance(value, (list, tuple)):
            inner = typing.get_args(member)
            inner = (inner[0],) * len(value) if inner[-1] is Ellipsis else inner
            if len(inner) == len(value):
                return tuple(_converted(f"{key}[{i}]", v, a) for i, (v, a) in enumerate(zip(value, inner)))
    if isinstance(value, Mapping) and any(_is_mapping(member) for member in members):
        return value
    for member in members:
        if typing.get_origin(member) is typing.Literal and isinstance(value, str):  # capitals do not matter
            choices = [choice for choice in typing.get_args(member) if str(choice).lower() == value.lower()]
            return choices[0] if choices else value
    from_config = isinstance(value, (str, bool, int, float, Mapping, list, tuple))
    if from_config and members and not any(_is_plain(member) for member in members):
        raise Invalid(f"{key} = {value!r} cannot be given in a config, only from Python ({describe(annotation)})")
    if isinstance(value, (Mapping, list, tuple)) and not any(_takes_lists(member) for member in members):
        shape = "table" if isinstance(value, Mapping) else "list"
        raise Invalid(f"{key} = {value!r} must be {describe(annotation)}, not a {shape}")
    return value


def _members(annotation: Any) -> Iterator[Any]:
    """The alternatives of a union, ranges taken off."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _is_mapping(member: Any) -> bool:
    origin = typing.get_origin(member) or member
    return inspect.isclass(origin) and issubclass(origin, Mapping)


def _takes_lists(member: Any) -> bool:
    return member is Any or typing.get_origin(member) in (tuple, list)


def _is_plain(member: Any) -> bool:
    return member in (int, float, str, bool, Any) or typing.get_origin(member) in (tuple, list, typing.Literal)


def _has(kind: type, member: str) -> bool:
    # a field without a default is not a class attribute; and every class is callable
    inherited = any(member in vars(base) for base in kind.__mro__)
    return inherited or member in {field.name for field in dataclasses.fields(kind)}


@functools.cache
def _dataclasses(packages: tuple[str, ...]) -> tuple[type, ...]:
    """Every public dataclass in the packages, including those they import."""
    found: dict[type, None] = {}
    for package in packages:
        top = importlib.import_module(package)
        below = pkgutil.walk_packages(top.__path__, f"{top.__name__}.")
        for module in (top, *(importlib.import_module(info.name) for info in below)):
            for name, member in vars(module).items():
                if inspect.isclass(member) and dataclasses.is_dataclass(member) and not name.startswith("_"):
                    found[member] = None
    return tuple(found)
