"""The federation: all clients' rows in shared tensors, in memory or in a source that is read on demand."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import notebook, tree
from consilience.core.given_clients import Given, check_rows, in_order, refuse_unlike, side_by_side, with_numbers
from consilience.core.given_rows import named_clients, rows_of
from consilience.core.settings import Invalid
from consilience.core.stored_rows import Preparation, has_stored, is_stored, stored_values

MOST_CLASSES = 1_000_000  # and more than rows: the targets are no class numbers
_SHOWN = 12  # clients in a notebook's table


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Rows:
    """Client k owns rows `starts[k] : starts[k] + sizes[k]`; rows after the last client's belong to no client."""

    x: Any  # [N, ...], or a dict of such tensors (text + picture)
    y: Tensor  # [N, ...]
    starts: Tensor  # [K] int64
    sizes: Tensor  # [K] int64
    weight: Tensor | None = None  # [N] weight of each row in the loss; None: 1
    preparation: Any = None  # like x: converts stored values to features, per batch; None: no conversion

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
        return Rows(x=tree.take(x, order.numpy()), y=y[order], starts=starts, sizes=sizes, weight=weights)

    def of(self, client: int) -> tuple[Any, Tensor]:
        """One client's rows."""
        start, size = int(self.starts[client]), int(self.sizes[client])
        return tree.rows(self.x, slice(start, start + size)), self.y[start : start + size]

    def owned(self, clients: Tensor | None = None) -> Tensor:
        """Row indices of these clients, or of all clients, client by client."""
        starts, sizes = (self.starts, self.sizes) if clients is None else (self.starts[clients], self.sizes[clients])
        before = torch.cumsum(sizes, 0) - sizes
        return torch.arange(int(sizes.sum())) + torch.repeat_interleave(starts - before, sizes)

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{path or 'x'} {tuple(leaf.shape[1:])}" for path, leaf in tree.flatten({"x": self.x}).items()
        )
        return notebook.line(f"Rows({len(self.y):,} of {shapes}, {len(self.sizes):,} clients)")

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Rows:
        """On a device, with floating features and targets in `dtype`."""

        def move(leaf: Tensor) -> Tensor:
            moved = leaf if is_stored(leaf) else leaf.to(device)  # stored rows are read when a plan needs them
            return moved.to(dtype) if dtype and leaf.is_floating_point() and not is_stored(leaf) else moved

        def prepare(leaf: Tensor) -> Preparation | None:
            how = leaf.source.preparation.on(device) if is_stored(leaf) else None  # type: ignore[attr-defined]
            return how._replace(dtype=dtype) if how is not None and dtype else how

        preparation = tree.map_leaves(prepare, self.x) if self.is_stored else self.preparation
        weight = None if self.weight is None else move(self.weight)
        x = tree.map_leaves(move, self.x)
        return replace(self, x=x, y=move(self.y), weight=weight, preparation=preparation)

    @functools.cached_property
    def is_stored(self) -> bool:
        """Whether any of its rows are in a source, from which they are read when a plan needs them."""
        return has_stored(self.x)

    def features(self, values: Any) -> Any:
        """Features of a batch of values of x."""
        if self.preparation is None:
            return values
        return tree.map_leaves(lambda leaf, how: leaf if how is None else how(leaf), values, self.preparation)

    def piece(self, part: slice) -> tuple[Any, Tensor]:
        """(features, targets) of some rows, on the targets' device."""
        if not self.is_stored:
            return self.features(tree.rows(self.x, part)), self.y[part]
        numbers = np.arange(*part.indices(len(self.y)))

        def values(leaf: Tensor) -> Tensor:
            return stored_values(leaf, numbers).to(self.y.device) if is_stored(leaf) else leaf[part]

        return self.features(tree.map_leaves(values, self.x)), self.y[part]


def numbered_names(clients: int) -> Sequence[str]:
    """Default names "0", "1" ...: a tuple for few clients, computed on demand for many."""
    return tuple(map(str, range(clients))) if clients <= 10_000 else NumberedNames(clients)


class NumberedNames(Sequence[str]):
    """Default client names, computed on demand."""

    def __init__(self, clients: int) -> None:
        self._numbers = range(clients)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        found = self._numbers[place]
        return tuple(map(str, found)) if isinstance(found, range) else str(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and all(a == b for a, b in zip(self, other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Federation:
    """Every client's training rows, and test rows (each client's own first, then those of no client)."""

    train: Rows
    test: Rows | None = None
    names: Sequence[str] = ()
    classes: int | None = None  # number of classes; None when targets are not class numbers
    label_names: tuple[str, ...] = ()  # of the classes or labels, if they have names
    validation: Rows | None = None  # rows held out from training, for validation by the clients

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", numbered_names(len(self)))
        elif not isinstance(self.names, NumberedNames):
            object.__setattr__(self, "names", tuple(self.names))
        if len(self.names) != len(self):
            raise Invalid(f"names has {len(self.names)} entries for {len(self)} clients: give one each, or none")
        if self.classes is not None and self.classes < 1:
            raise Invalid(f"classes = {self.classes} must be at least 1: leave it out where there are no classes")
        if len(self.train.y) == 0:
            raise Invalid("the federation has no training rows: at least one client needs data")
        for place, split in (("training", self.train), ("test", self.test)):
            for leaf in tree.leaves(split.x) if split is not None else ():
                # the sum is finite only if every value is; the full test is ten times slower and runs only if it is not
                if is_stored(leaf):
                    continue  # checked when a whole file is read; otherwise a non-finite reply is refused
                if leaf.is_floating_point() and not bool(leaf.sum().isfinite()) and not bool(leaf.isfinite().all()):
                    assert split is not None
                    wrong = torch.nonzero(~leaf.isfinite().reshape(len(leaf), -1).all(1)).flatten()
                    row, rows = self.place_of(split, int(wrong[0])), f"{len(wrong)} of {len(leaf)} rows"
                    raise Invalid(f"{place} row {row} has NaN or infinite values ({rows}): clean or impute them")

    def place_of(self, split: Rows, row: int) -> str:
        """A row by its number among its owner's rows, such as "3 of client 'a'"."""
        owner = torch.nonzero((split.starts <= row) & (row < split.starts + split.sizes)).flatten()
        if not len(owner):
            return str(row)
        client = int(owner[0])
        return f"{row - int(split.starts[client])} of client {self.names[client]!r}"

    def __len__(self) -> int:
        return len(self.train.sizes)

    def __repr__(self) -> str:
        return notebook.line(f"Federation({', '.join(f'{text} {name}' for name, text in self._described())})")

    def _repr_html_(self) -> str:
        sizes = self.train.sizes.tolist()
        tested = [0] * len(self) if self.test is None else self.test.sizes.tolist()
        rows = [(name, f"{size:,}", f"{test:,}") for name, size, test in zip(self.names[:_SHOWN], sizes, tested)]
        if len(self) > _SHOWN:
            rows.append((f"and {len(self) - _SHOWN:,} more", "", ""))
        about = ", ".join(f"{text} {name}" for name, text in self._described())
        return notebook.table(f"Federation of {about}", rows, head=("client", "training rows", "test rows"))

    def _described(self) -> list[tuple[str, str]]:
        sizes = self.train.sizes
        found = [("client" if len(self) == 1 else "clients", f"{len(self):,}"), ("rows", f"{int(sizes.sum()):,}")]
        if len(self) > 1:
            least, most = int(sizes.min()), int(sizes.max())
            found.append(("a client", f"{least:,}" if least == most else f"{least:,} to {most:,}"))
        found.append(("test rows", f"{0 if self.test is None else len(self.test.y):,}"))
        return [*found, ("classes", str(self.classes))] if self.classes else [*found, ("targets", "real-valued")]

    def among(self, ids: np.ndarray) -> Federation:
        """Some of the clients, with their own rows only."""

        def own(rows: Rows) -> Rows:
            where = torch.from_numpy(np.asarray(ids, dtype=np.int64))
            sizes, order = rows.sizes[where], rows.owned(where)
            weight = None if rows.weight is None else rows.weight[order]
            starts = torch.cumsum(sizes, 0) - sizes
            x = tree.take(rows.x, order.numpy())
            return Rows(x=x, y=rows.y[order], starts=starts, sizes=sizes, weight=weight)

        return replace(
            self,
            train=own(self.train),
            test=None if self.test is None else own(self.test),
            validation=None if self.validation is None else own(self.validation),
            names=tuple(self.names[k] for k in ids),
        )

    def pooled(self) -> Federation:
        """One client with every owned training row; the test rows are unchanged."""
        train = Rows.gather(self.train.x, self.train.y, [self.train.owned()], weight=self.train.weight)
        return replace(self, train=train, names=("all",))

    @staticmethod
    def from_clients(
        clients: Sequence[Any] | Mapping[str, Any],
        *,
        test: Any = None,
        client_tests: Sequence[Any] | Mapping[str, Any] | None = None,
        names: Sequence[str] = (),
        classes: int | None = None,
        label_names: Sequence[str] = (),
    ) -> Federation:
        """A federation from existing clients `[(x, y), ...]`, with shared test rows (`test`) or one set per client.

            federation = cs.Federation.from_clients([(x1, y1), (x2, y2)], client_tests=[(t1, u1), (t2, u2)])

        clients: a list, or a dict by name, of pairs (x, y), PyTorch data sets or data loaders of such rows. x is a
            tensor or array [N, ...] or a dict of such; y are class numbers [N], names of classes (a list or array of
            str), or real-valued targets; `(x, y, weights)` gives each row a weight in the loss. Arrays become tensors
            of the default float type or int64. Tables of columns: `cs.from_frames`.
        test, client_tests: at most one of the two; accuracies per client need the latter.
        names: of the clients in reports; "0", "1" ... by default.
        classes: the number of classes, if the highest ones do not occur in the training rows.
        label_names: the names of the classes, in the order of their numbers; by default those that occur, sorted.
        """
        clients, names = named_clients(clients, names)
        if not clients:
            raise Invalid("clients is empty: a federation needs at least one (x, y) pair")
        twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        if twice is not None:
            raise Invalid(f"names has {twice!r} twice: clients need names of their own")
        called = names if len(names) == len(clients) else tuple(str(k) for k in range(len(clients)))
        clients = [rows_of(client, f"client {name}") for client, name in zip(clients, called)]
        if test is not None:
            test = rows_of(test, "test")
        if client_tests is not None:
            client_tests = in_order(client_tests, called)
            if len(client_tests) != len(clients):
                raise Invalid(f"client_tests has {len(client_tests)} entries for {len(clients)} clients: give one each")
            client_tests = [rows_of(rows, f"test of client {k}") for k, rows in zip(called, client_tests)]
        clients, test, client_tests, label_names = with_numbers(clients, test, client_tests, tuple(label_names), called)
        classes = len(label_names) if classes is None and label_names else classes
        train = _one_after_the_other(clients, called)
        tests: Rows | None = None
        if client_tests is not None and test is not None:
            raise Invalid("test and client_tests are both given: test rows are shared by all or one set per client")
        if client_tests is not None:
            tests = _one_after_the_other(list[Any](client_tests), [f"{name} (test)" for name in called])
            refuse_unlike("client_tests", (tests.x, tests.y), f"client {called[0]}", clients[0])
        elif test is not None:
            check_rows("test", *test)
            refuse_unlike("test", test, f"client {called[0]}", clients[0])
            none = torch.zeros(len(clients), dtype=torch.int64)
            tests = Rows(x=test[0], y=test[1], starts=none, sizes=none)
        if classes is None:
            labelled = not train.y.is_floating_point() and train.y.dim() == 1
            classes = _number_of_classes(train.y) if labelled and len(train.y) else None
        return Federation(train=train, test=tests, names=tuple(names), classes=classes, label_names=label_names)


def _number_of_classes(y: Tensor) -> int:
    highest = int(y.max())
    if highest < 0:
        raise Invalid(f"all class numbers are negative, the highest is {highest}: number the classes from 0")
    if highest >= MOST_CLASSES and highest >= len(y):
        raise Invalid(
            f"the highest class number is {highest:,} for {len(y):,} rows: number the classes from 0, as "
            "torch.unique(y, return_inverse=True) does, or give y.float() if they are numbers to predict"
        )
    return highest + 1


def _one_after_the_other(clients: Sequence[Given], names: Sequence[str]) -> Rows:
    x, y, weight = side_by_side(clients, names)
    sizes = torch.tensor([len(rows[1]) for rows in clients], dtype=torch.int64)
    return Rows(x=x, y=y, starts=torch.cumsum(sizes, 0) - sizes, sizes=sizes, weight=weight)
