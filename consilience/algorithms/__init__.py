"""One published method per file; the file's name is the algorithm's name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from consilience.core.algorithm import Algorithm
from consilience.core.checks import Invalid, nearest

Recipe = Callable[..., Algorithm]


def names() -> list[str]:
    """Every algorithm: the modules of this package."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def recipe(name: str) -> Recipe:
    """The function that builds an algorithm, by name."""
    known = names()
    if name not in known:
        raise Invalid(f"algorithm {name!r} is unknown{nearest(name, known)}; known: {', '.join(known)}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)
