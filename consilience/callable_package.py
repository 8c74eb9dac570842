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
