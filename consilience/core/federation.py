"""Who has which rows: all clients' data side by side in one store, resident on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.class_names import are_names, numbered, sorted_names
from consilience.core.settings import Invalid


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """Client k owns rows `starts[k] : starts[k] + sizes[k]`; rows behind the last client's belong to no client."""

    x: Any  # [N, ...], or a dict of such tensors (text + picture)
    y: Tensor  # [N, ...]
    starts: Tensor  # [K] int64
    sizes: Tensor  # [K] int64
    weight: Tensor | None = None  # [N] of each row in the loss; None: 1

    @staticmethod
    def gather(
        x: Any, y: Tensor, parts: Sequence[Any], *, keep_rest: bool = False, weight: Tensor | None = None
    ) -> Rows:
        """Reorder rows so that each client's part is contiguous; `keep_rest` puts unowned rows last."""
        index = [torch.as_tensor(part, dtype=torch.int64) for part in parts]
        sizes = torch.tensor([len(part) for part in index], dtype=torch.int64)
        starts = torch.cumsum(sizes, 0) - sizes
        if keep_rest:
            owned = torch.zeros(len(y), dtype=torch.bool)
            owned[torch.cat(index)] = True
            index.append(torch.nonzero(~owned).flatten())
        order = torch.cat(index) if index else torch.empty(0, dtype=torch.int64)
        weights = None if weight is None else weight[order]
        return Rows(x=tree.rows(x, order), y=y[order], starts=starts, sizes=sizes, weight=weights)

    def of(self, client: int) -> tuple[Any, Tensor]:
        """One client's rows."""
        start, size = int(self.starts[client]), int(self.sizes[client])
        return tree.rows(self.x, slice(start, start + size)), self.y[start : start + size]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Rows:
        """On a device, with floating features and targets in `dtype`."""
        move = (lambda t: tree.cast_floating(tree.to(t, device), dtype)) if dtype else (lambda t: tree.to(t, device))
        weight = None if self.weight is None else move(self.weight)
        return replace(self, x=move(self.x), y=move(self.y), weight=weight)


@dataclass(frozen=True, eq=False, kw_only=True)
class Federation:
    """Every client's training rows, and test rows (each client's own first, then those of no client)."""

    train: Rows
    test: Rows | None = None
    names: tuple[str, ...] = ()
    classes: int | None = None  # number of classes; None when targets are not class numbers
    label_names: tuple[str, ...] = ()  # of the classes or labels, where they have names

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", tuple(str(k) for k in range(len(self))))
        if len(self.names) != len(self):
            raise Invalid(f"names has {len(self.names)} entries for {len(self)} clients: give one each, or none")
        if self.classes is not None and self.classes < 1:
            raise Invalid(f"classes = {self.classes} must be at least 1: leave it out where there are no classes")
        if len(self.train.y) == 0:
            raise Invalid("the federation has no training rows: at least one client needs data")
        for place, split in (("training", self.train), ("test", self.test)):
            for leaf in tree.leaves(split.x) if split is not None else ():
                # the sum is finite only if every value is; the full test is ten times slower and runs only if it is not
                if leaf.is_floating_point() and not bool(leaf.sum().isfinite()) and not bool(leaf.isfinite().all()):
                    bad = self._owner_of_first_nonfinite(split, leaf)
                    raise Invalid(f"{place} data of client {bad!r} hold NaN or infinite values: clean or impute them")

    def _owner_of_first_nonfinite(self, split: Rows | None, leaf: Tensor) -> str:
        assert split is not None
        row = int(torch.nonzero(~leaf.isfinite().reshape(len(leaf), -1).all(1))[0])
        owner = torch.nonzero((split.starts <= row) & (row < split.starts + split.sizes))
        return self.names[int(owner[0])] if len(owner) else "(none)"

    def __len__(self) -> int:
        return len(self.train.sizes)

    def among(self, ids: np.ndarray) -> Federation:
        """Some of the clients, with their own training and test rows only."""

        def own(rows: Rows) -> Rows:
            parts = [torch.arange(int(rows.starts[k]), int(rows.starts[k] + rows.sizes[k])) for k in ids]
            return Rows.gather(rows.x, rows.y, parts, weight=rows.weight)

        return replace(
            self,
            train=own(self.train),
            test=None if self.test is None else own(self.test),
            names=tuple(self.names[k] for k in ids),
        )

    def pooled(self) -> Federation:
        """All data in one place: one client with every owned training row; the test rows stay as they are."""
        owned = [torch.arange(int(a), int(a + n)) for a, n in zip(self.train.starts, self.train.sizes)]
        train = Rows.gather(self.train.x, self.train.y, [torch.cat(owned)], weight=self.train.weight)
        return replace(self, train=train, names=("all",))

    @staticmethod
    def from_clients(
        clients: Sequence[tuple[Any, ...]],
        *,
        test: tuple[Any, Any] | None = None,
        client_tests: Sequence[tuple[Any, Any]] | None = None,
        names: Sequence[str] = (),
        classes: int | None = None,
        label_names: Sequence[str] = (),
    ) -> Federation:
        """Ready-made clients: `[(x, y), ...]`; test rows shared by all (`test`) or one set per client.

            federation = cs.Federation.from_clients([(x1, y1), (x2, y2)], client_tests=[(t1, u1), (t2, u2)])

        clients: x is a tensor [N, ...] or a dict of such tensors; y are class numbers [N], names of classes (a list or
            array of str), or real-valued targets; `(x, y, weights)` gives each row a weight in the loss.
        test, client_tests: at most one of the two; accuracies per client need the latter.
        names: what reports call the clients; "0", "1" ... by default.
        classes: how many there are, where the training rows do not show the last ones.
        label_names: the names of the classes, in the order of their numbers; by default those that occur, sorted.
        """
        if not clients:
            raise Invalid("clients is empty: a federation needs at least one (x, y) pair")
        clients, test, client_tests, label_names = _with_numbers(clients, test, client_tests, tuple(label_names))
        classes = len(label_names) if classes is None and label_names else classes
        train = _side_by_side(clients)
        tests: Rows | None = None
        if client_tests is not None and test is not None:
            raise Invalid("test and client_tests are both given: test rows are shared by all or one set per client")
        if client_tests is not None:
            if len(client_tests) != len(clients):
                raise Invalid(f"client_tests has {len(client_tests)} entries for {len(clients)} clients: give one each")
            tests = _side_by_side(client_tests)
        elif test is not None:
            _check_rows("test", *test)
            none = torch.zeros(len(clients), dtype=torch.int64)
            tests = Rows(x=test[0], y=test[1], starts=none, sizes=none)
        if classes is None:
            labelled = not train.y.is_floating_point() and train.y.dim() == 1
            classes = int(train.y.max()) + 1 if labelled and len(train.y) else None
        return Federation(train=train, test=tests, names=tuple(names), classes=classes, label_names=label_names)


Given = tuple[Any, ...]


def _with_numbers(
    clients: Sequence[Given], test: Given | None, client_tests: Sequence[Given] | None, known: tuple[str, ...]
) -> tuple[Sequence[Given], Any, Any, tuple[str, ...]]:
    """The same rows with class numbers in place of names, and the list of classes, one for all clients."""
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

    numbers = [of(f"client {k}", rows) for k, rows in enumerate(clients)]
    tested = None if client_tests is None else [of(f"test of client {k}", rows) for k, rows in enumerate(client_tests)]
    return numbers, None if test is None else of("test", test), tested, known


def _side_by_side(clients: Sequence[Given]) -> Rows:
    weights = [rows[2] if len(rows) > 2 else None for rows in clients]
    if any(weight is None for weight in weights) and not all(weight is None for weight in weights):
        raise Invalid("some clients have weights of their rows and others have none: give all of them, or none")
    for k, weight in enumerate(weights):
        if weight is not None and (not isinstance(weight, Tensor) or weight.shape != (len(clients[k][1]),)):
            raise Invalid(f"client {k} must have one weight for each of its {len(clients[k][1])} rows, as a tensor")
    clients = [rows[:2] for rows in clients]
    _check_rows("client 0", *clients[0])
    shape = [(leaf.shape[1:], leaf.dtype) for leaf in (*tree.leaves(clients[0][0]), clients[0][1])]
    for k, (x, y) in enumerate(clients):
        _check_rows(f"client {k}", x, y)
        mine = [(leaf.shape[1:], leaf.dtype) for leaf in (*tree.leaves(x), y)]
        if mine != shape:
            raise Invalid(f"client {k} has rows of {_shapes(mine)}, client 0 of {_shapes(shape)}: they must be equal")
    sizes = torch.tensor([len(y) for _, y in clients], dtype=torch.int64)
    x = tree.concatenate([x for x, _ in clients])
    y = torch.cat([y for _, y in clients])
    given = [one.to(torch.get_default_dtype()) for one in weights if one is not None]
    weight = torch.cat(given) if given else None
    return Rows(x=x, y=y, starts=torch.cumsum(sizes, 0) - sizes, sizes=sizes, weight=weight)


def _check_rows(who: str, x: Any, y: Tensor) -> None:
    for part in (*tree.leaves(x), y):
        if not isinstance(part, Tensor):
            kind = type(part).__name__
            raise Invalid(f"{who} holds a {kind} where a tensor is needed: convert it with torch.as_tensor")
    lengths = {len(leaf) for leaf in tree.leaves(x)}
    if lengths != {len(y)}:
        raise Invalid(f"{who} has {sorted(lengths)} rows of features for {len(y)} targets: they must match")


def _shapes(parts: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in parts)
