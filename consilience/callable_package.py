"""Packages that can be called like a function: `cs.compare([...])` next to `consilience.compare.plan`."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from typing import Any


class CallablePackage(types.ModuleType):
    """A package NAME that forwards calls to the function NAME in its module NAME.NAME."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function; an argument it does not have is refused with how settings are given."""
        known = self.__signature__.parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            for name, value in options.items():
                if name not in known:
                    raise TypeError(
                        f"{self.__name__.rpartition('.')[2]}() has no argument {name!r}: it takes {', '.join(known)}; "
                        f"settings of a run are texts after the config, such as {f'{name}={value}'[:60]!r}"
                    )
        return self._function(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    @property
    def _function(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(f"{self.__name__}.{name}"), name)


def make_callable(package: str) -> None:
    """Make a package callable, while it is being imported."""
    sys.modules[package].__class__ = CallablePackage
