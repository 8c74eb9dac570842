"""Functions of trees that are traced for sets of shapes that recur, and the keys of their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from consilience.engines.compiler.trace import Flat, Untraceable, trace

HOT = 6  # calls: a trace takes 4 to 15 ms, saves 0.3 to 1.2 at each later call, and cohorts differ from round to round


class Traced:
    """A function of trees that is traced once a set of shapes recurs, which saves the transforms' overhead.

    The call that is recorded gives its value, so that a trace costs no call of its own.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._traced: dict[Any, tuple[Callable[..., Flat], Any]] = {}
        self._met: Counter[Any] = Counter()
        self._traceable = True

    def __call__(self, *arguments: Any) -> Any:
        """The function's value."""
        leaves: Flat = []
        structure = flattened(arguments, leaves)
        signature = (shapes(leaves), structure)
        if signature in self._traced:
            run, form = self._traced[signature]
            return _filled(form, iter(run(*leaves)))
        self._met[signature] += 1
        if self._traceable and self._met[signature] > HOT:
            spec, values = pytree.tree_structure(arguments), list[Any]()

            def flatly(leaves: Flat) -> Flat:
                values.append(self._function(*pytree.tree_unflatten(leaves, spec)))
                return pytree.tree_leaves(values[-1])

            try:
                run = trace(flatly, leaves).run
            except Untraceable:
                self._traceable = False
            else:
                self._traced[signature] = run, pytree.tree_map(lambda _: None, values[0])
                return values[0]
        return self._function(*arguments)


def flattened(value: Any, into: Flat) -> Any:
    """What identifies the structure of dicts and tuples, whose leaves are appended in pytree's own order.

    pytree's description of a structure cannot be hashed, and writing it out takes longer than a small round's kernels.
    """
    if isinstance(value, dict):
        found: list[Any] = [dict]
        for key, part in value.items():
            if isinstance(part, (dict, tuple)):
                found.append((key, flattened(part, into)))
            else:
                into.append(part)
                found.append((key, None))
        return tuple(found)
    if isinstance(value, tuple):
        return (type(value), *(flattened(part, into) for part in value))
    into.append(value)
    return None


def shapes(leaves: Flat) -> tuple[Any, ...]:
    """Shape, type and layout of every tensor."""
    return tuple((leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else None for leaf in leaves)


def _filled(form: Any, values: Iterator[Any]) -> Any:
    """Dicts and tuples of this form with these leaves."""
    if isinstance(form, dict):
        return {key: _filled(part, values) for key, part in form.items()}
    if isinstance(form, tuple):
        return tuple(_filled(part, values) for part in form)
    return next(values)
