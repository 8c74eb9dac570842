"""One published method per file; the file's name is the algorithm's name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable

from consilience.core.algorithm import Algorithm
from consilience.core.settings import Invalid, nearest

Recipe = Callable[..., Algorithm]


def names() -> list[str]:
    """Every algorithm: the modules of this package."""
    return list(_modules())


@functools.cache  # settings are read by asking for recipes hundreds of times
def _modules() -> tuple[str, ...]:
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def recipe(name: str) -> Recipe:
    """The function that builds an algorithm, by name."""
    known = names()
    if name not in known:
        raise Invalid(f"algorithm {name!r} is unknown{nearest(name, known)}; known: {', '.join(known)}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)
