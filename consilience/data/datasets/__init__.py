"""Data sets by name: every public function of a module in this folder that returns a `Dataset` is one."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from consilience.core.settings import Invalid, check_options, hints_of, nearest, options_of
from consilience.data.dataset import Dataset

__all__ = ["catalogue", "load"]


@functools.cache
def _factories() -> dict[str, Callable[..., Dataset]]:
    found: dict[str, Callable[..., Dataset]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.ispkg:
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            own = function.__module__ == module.__name__ and not name.startswith("_")
            if own and hints_of(function).get("return") is Dataset:
                if name in found:
                    raise Invalid(f"two data sets are called {name!r}: rename the one in {module.__name__}")
                found[name] = function
    return dict(sorted(found.items()))


def catalogue() -> dict[str, Callable[..., Dataset]]:
    """Every data set's factory by name; its keyword arguments are its options."""
    return dict(_factories())


def load(name: str, *, data_dir: str | Path | None = None, **options: Any) -> Dataset:
    """Load a data set by name, after checking its options; files are searched in `data_dir` (else $CONSILIENCE_DATA).

    `load_data("digits")` needs no files; `consilience list datasets` shows all names with their options.
    """
    factories = _factories()
    if name not in factories:
        raise Invalid(f"data set {name!r} is unknown{nearest(name, factories)}; known: {', '.join(factories)}")
    factory = factories[name]
    checked = check_options(factory, options, f"data set {name}")
    known = options_of(factory)
    for option, setting in known.items():
        if setting.required and option not in checked:
            raise Invalid(f"data set {name!r} needs the option {option}: {inspect.getdoc(factory)}")
    if "data_dir" in known:
        checked["data_dir"] = data_dir
    return factory(**checked)
