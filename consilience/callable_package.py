"""Packages that are also the function of their name: `cs.compare([...])` next to `consilience.compare.plan`."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from typing import Any


class CallablePackage(types.ModuleType):
    """A package NAME whose module NAME.NAME has a function NAME, which calling the package calls."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
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
