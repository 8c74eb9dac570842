"""Rows of several clients as users give them, put in one order, with the same class numbers, into shared tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.class_names import are_names, numbered, sorted_names
from consilience.core.settings import Invalid
from consilience.core.stored_rows import concatenated

Given = tuple[Any, ...]


def in_order(tests: Sequence[Any] | Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """The test rows in the clients' order."""
    if not isinstance(tests, Mapping):
        return list(tests)
    absent = [name for name in names if name not in tests]
    if absent or len(tests) != len(names):
        odd = absent[0] if absent else next(name for name in tests if name not in names)
        raise Invalid(f"client_tests and clients do not have the same names: {odd!r} is in one of them only")
    return [tests[name] for name in names]


def with_numbers(
    clients: Sequence[Given],
    test: Given | None,
    client_tests: Sequence[Given] | None,
    known: tuple[str, ...],
    called: Sequence[str],
) -> tuple[Sequence[Given], Any, Any, tuple[str, ...]]:
    """(the rows with class numbers in place of names, the list of classes shared by all clients)."""
    tests = [test] if test is not None else list(client_tests or ())
    named = [are_names(rows[1]) for rows in (*clients, *tests)]
    if not any(named):
        return clients, test, client_tests, known
    if not all(named) and any(len(rows[1]) for rows, is_named in zip((*clients, *tests), named) if not is_named):
        raise Invalid("some clients' targets are names of classes and others are not: give names everywhere")
    if not known:
        known = sorted_names([str(name) for rows in (*clients, *tests) for name in np.asarray(rows[1]).reshape(-1)])

    def of(who: str, rows: Given) -> Given:
        return rows[0], numbered(rows[1], known, who), *rows[2:]

    numbers = [of(f"client {k}", rows) for k, rows in zip(called, clients)]
    tested = None
    if client_tests is not None:
        tested = [of(f"test of client {k}", rows) for k, rows in zip(called, client_tests)]
    return numbers, None if test is None else of("test", test), tested, known


def side_by_side(clients: Sequence[Given], names: Sequence[str]) -> tuple[Any, Tensor, Tensor | None]:
    """(x, y, weights of the rows) of all clients one after the other, if their rows are alike."""
    weights = [rows[2] if len(rows) > 2 else None for rows in clients]
    if any(weight is None for weight in weights) and not all(weight is None for weight in weights):
        raise Invalid("some clients have weights of their rows and others have none: give all of them, or none")
    for k, weight in enumerate(weights):
        if weight is not None and (not isinstance(weight, Tensor) or weight.shape != (len(clients[k][1]),)):
            raise Invalid(
                f"client {names[k]} must have one weight for each of its {len(clients[k][1])} rows, as a tensor"
            )
    clients = [rows[:2] for rows in clients]
    check_rows(f"client {names[0]}", *clients[0])
    for k, (x, y) in enumerate(clients):
        check_rows(f"client {names[k]}", x, y)
        refuse_unlike(f"client {names[k]}", (x, y), f"client {names[0]}", clients[0])
    given = [one.to(torch.get_default_dtype()) for one in weights if one is not None]
    x, y = concatenated([x for x, _ in clients]), torch.cat([y for _, y in clients])
    return x, y, torch.cat(given) if given else None


def check_rows(who: str, x: Any, y: Tensor) -> None:
    """Refuse rows that are not tensors of one length."""
    for part in (*tree.leaves(x), y):
        if isinstance(part, Tensor) and part.layout is not torch.strided:
            raise Invalid(f"{who} holds a sparse tensor: make it dense, with .to_dense()")
        if not isinstance(part, Tensor):
            kind = type(part).__name__
            raise Invalid(f"{who} holds a {kind} where a tensor is needed: convert it with torch.as_tensor")
    lengths = {len(leaf) for leaf in tree.leaves(x)}
    if lengths != {len(y)}:
        found = " and ".join(map(str, sorted(lengths)))
        raise Invalid(f"{who} has {found} rows of features for {len(y)} targets: they must match")


def refuse_unlike(who: str, rows: Given, first: str, others: Given) -> None:
    """Refuse rows of other parts, shapes or types than those of the first client."""
    mine, theirs = ([*tree.flatten({"x": part[0]}).items(), ("y", part[1])] for part in (rows, others))
    forms = [[(name, leaf.shape[1:], _type(name, leaf)) for name, leaf in parts] for parts in (mine, theirs)]
    if forms[0] != forms[1]:
        raise Invalid(f"{who} has rows of {_shapes(mine)}, {first} of {_shapes(theirs)}: they must be equal")


def _type(name: str, leaf: Tensor) -> object:
    """The type, as far as it must be equal: floats become those of the engine, and class numbers int64."""
    if leaf.is_floating_point():
        return "floating"
    return "whole" if name == "y" and leaf.dtype is not torch.bool and not leaf.is_complex() else leaf.dtype


def _shapes(parts: list[tuple[str, Tensor]]) -> str:
    """'(4,) float32, () int64', with the names of the parts where there are several."""
    named = parts[0][0] != "x"
    shown = [
        (name.removeprefix("x/"), f"{tuple(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')}")
        for name, leaf in parts
    ]
    return ", ".join(f"{name}: {text}" if named else text for name, text in shown)
