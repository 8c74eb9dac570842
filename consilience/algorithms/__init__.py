"""One published method per file; the file's name is the algorithm's name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from consilience.core.algorithm import Algorithm
from consilience.core.settings import Invalid, nearest

Recipe = Callable[..., Algorithm]


def names() -> list[str]:
    """Names of all algorithms: the modules of this package."""
    return list(_modules())


@functools.cache  # reading settings looks up recipes hundreds of times
def _modules() -> tuple[str, ...]:
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def recipe(name: str) -> Recipe:
    """The function that builds an algorithm, by name."""
    known = names()
    if name not in known:
        raise Invalid(f"algorithm {name!r} is unknown{nearest(name, known)}; known: {', '.join(known)}")
    return getattr(_module(name), name)


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def given(what: Any, key: str = "algorithm") -> Algorithm:
    """The algorithm itself, or the one built from a recipe's name or from a table of name and options."""
    if isinstance(what, Algorithm):
        return what
    table = {"name": what} if isinstance(what, str) else what
    if isinstance(table, Mapping) and isinstance(table.get("name"), str):
        return recipe(table["name"])(**{name: value for name, value in table.items() if name != "name"})
    name = getattr(what, "__name__", "")
    how = f": call it, {name}()" if callable(what) and name in names() else ": write cs.fedavg(lr=0.1), or 'fedavg'"
    raise Invalid(f"{key} = {name or repr(what)} is no Algorithm but {type(what).__name__}{how}")
