"""Client rows stored on the machines of a cluster: the driver gets a description, workers read them locally."""

from __future__ import annotations

import functools
import hashlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.federation import Federation
from consilience.core.settings import Invalid
from consilience.engines.ray import session
from consilience.engines.ray.transfer import balanced_owners

log = logging.getLogger(__name__)


class NodeSource(Protocol):
    """Finds and reads the clients of a machine; it is sent to every machine, so it must be picklable."""

    def names(self) -> Sequence[str]:
        """The clients whose rows are on this machine."""
        ...

    def digest(self, name: str) -> str:
        """A digest of a client's rows as they are stored: equal on all machines that have them."""
        ...

    def read(self, name: str) -> tuple[Any, ...]:
        """(x, y) or (x, y, test_x, test_y) of a client of this machine."""
        ...


class ClientDescription(NamedTuple):
    """A machine's description of a client, without its rows."""

    digest: str
    rows: int
    test_rows: int | None
    row: tuple[tuple[str, tuple[int, ...], str], ...]  # (path, shape, type) of the features and the target of a row
    highest: int | None  # class number; None where targets are no class numbers


class RowCounts(NamedTuple):
    """How many rows every client has."""

    sizes: Tensor  # [K]


class NodeShare(NamedTuple):
    """What the worker of some clients reads on its machine."""

    source: NodeSource
    names: tuple[str, ...]
    digests: tuple[str, ...]
    classes: int | None

    def federation(self) -> Federation:
        """The clients' rows; `Invalid` where a client's are not those that were described."""
        given = []
        for name, digest in zip(self.names, self.digests):
            if self.source.digest(name) != digest:
                raise Invalid(f"the rows of client {name!r} have changed on their machine since the run began")
            given.append(self.source.read(name))
        tests = [rows[2:4] for rows in given if len(rows) > 2] or None
        clients = [rows[:2] for rows in given]
        return Federation.from_clients(clients, client_tests=tests, names=self.names, classes=self.classes)


@dataclass(frozen=True, eq=False, kw_only=True)
class NodeFederation:
    """Clients, ordered by name, whose rows stay on the machines of a cluster."""

    source: NodeSource
    names: tuple[str, ...]
    clients: tuple[ClientDescription, ...]
    classes: int | None
    label_names: tuple[str, ...] = ()
    machines: dict[str, set[int]] = field(default_factory=dict)  # Ray's id of a machine -> the clients it has

    @staticmethod
    def find(source: NodeSource, *, classes: int | None = None, address: str | None = None) -> NodeFederation:
        """Ask every machine of the cluster at `address` what it has; Ray stays joined as long as this is used.

        classes: how many there are; by default as many as the rows show.
        """
        session.join(address, 1)
        try:
            told = _described(source, list(session.machines()))
            known: dict[str, ClientDescription] = {}
            for described in told.values():
                _add(known, described)
            if not known:
                raise Invalid(f"no machine of the cluster ({len(told)} asked) has any client's rows: {source!r}")
            names = tuple(sorted(known))
            clients = tuple(known[name] for name in names)
            _refuse_unequal(names, clients)
            found = NodeFederation(source=source, names=names, clients=clients, classes=_classes(clients, classes))
            found._note(told)
        except BaseException:
            session.leave()
            raise
        weakref.finalize(found, session.leave)
        return found

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def train(self) -> RowCounts:
        """Training rows of every client."""
        return RowCounts(torch.tensor([client.rows for client in self.clients]))

    @functools.cached_property
    def test(self) -> RowCounts | None:
        """Test rows of every client; None where they have none."""
        counts = [client.test_rows for client in self.clients]
        return None if None in counts else RowCounts(torch.tensor(counts))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of every client's name and digest."""
        lines = [f"{name} {client.digest}\n" for name, client in zip(self.names, self.clients)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def example(self) -> tuple[Any, Tensor]:
        """Two rows of zeros, shaped like the clients' rows: (x, y)."""
        flat = {path: torch.zeros(2, *shape, dtype=getattr(torch, kind)) for path, shape, kind in self.clients[0].row}
        rows = tree.unflatten(flat)
        return rows["x"], rows["y"]

    def shares(self, workers: int) -> tuple[np.ndarray, list[frozenset[str]]]:
        """([K] the worker of each client, the machines that have all rows of each worker's clients).

        A client that several machines have goes to the one with the fewest rows so far.
        """
        sizes = self.train.sizes.numpy().astype(np.float64)
        home, load = np.zeros(len(self), dtype=np.int64), np.zeros(len(self.machines))
        machines = sorted(self.machines)
        for client in np.lexsort((np.arange(len(self)), -sizes)).tolist():
            having = [number for number, machine in enumerate(machines) if client in self.machines[machine]]
            home[client] = min(having, key=lambda number: (load[number], number))
            load[home[client]] += sizes[client]
        used = [number for number in range(len(machines)) if (home == number).any()]
        if workers < len(used):
            raise Invalid(f"workers = {workers}, but the clients' rows lie on {len(used)} machines: use {len(used)}")
        counts = dict.fromkeys(used, 1)
        for _ in range(workers - len(used)):
            open_to = [number for number in used if counts[number] < int((home == number).sum())]
            counts[max(open_to, key=lambda number: (load[number] / counts[number], -number))] += 1
        owner, first = np.zeros(len(self), dtype=np.int64), 0
        for number in used:
            mine = np.flatnonzero(home == number)
            owner[mine] = first + balanced_owners(sizes[mine], counts[number])
            first += counts[number]
        return owner, self.having(owner, workers)

    def having(self, owner: np.ndarray, workers: int) -> list[frozenset[str]]:
        """The machines that have all rows of each worker's clients."""
        groups = [set(np.flatnonzero(owner == worker).tolist()) for worker in range(workers)]
        return [frozenset(m for m, clients in self.machines.items() if group <= clients) for group in groups]

    def share(self, ids: np.ndarray) -> NodeShare:
        """What the worker of these clients reads."""
        names = tuple(self.names[client] for client in ids)
        return NodeShare(self.source, names, tuple(self.clients[client].digest for client in ids), self.classes)

    def look_again(self) -> bool:
        """Query machines that have joined; returns whether there were any."""
        new = [machine for machine in session.machines() if machine not in self.machines]
        self._note(_described(self.source, new))
        return bool(new)

    def _note(self, told: Mapping[str, Mapping[str, ClientDescription]]) -> None:
        place = {name: number for number, name in enumerate(self.names)}
        for machine, described in told.items():
            equal = {
                name for name, client in described.items() if name in place and client == self.clients[place[name]]
            }
            for name in sorted(described.keys() & place.keys() - equal):
                log.warning("a machine that joined has other rows of client %r: they are not used", name)
            self.machines[machine] = {place[name] for name in equal}


def _described(source: NodeSource, machines: Sequence[str]) -> dict[str, dict[str, ClientDescription]]:
    """What these machines have, by machine and client."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask: Any = ray.remote(describe)
    calls = [
        ask.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False)
        ).remote(source)
        for machine in machines
    ]
    try:
        return dict(zip(machines, ray.get(calls)))
    except ray.exceptions.RayTaskError as problem:
        cause = getattr(problem, "cause", None)
        raise (cause if isinstance(cause, Exception) else problem) from problem


def describe(source: NodeSource) -> dict[str, ClientDescription]:
    """What this machine has, by client."""
    found = {}
    for name in source.names():
        rows = source.read(name)
        one = Federation.from_clients([rows[:2]], client_tests=[rows[2:4]] if len(rows) > 2 else None, names=[name])
        flat = tree.flatten({"x": one.train.x, "y": one.train.y})
        found[name] = ClientDescription(
            digest=source.digest(name),
            rows=len(one.train.y),
            test_rows=None if one.test is None else len(one.test.y),
            row=tuple((path, tuple(leaf.shape[1:]), str(leaf.dtype).split(".")[1]) for path, leaf in flat.items()),
            highest=None if one.classes is None else one.classes - 1,
        )
    return found


def _add(known: dict[str, ClientDescription], described: Mapping[str, ClientDescription]) -> None:
    for name, client in described.items():
        if known.setdefault(name, client) != client:
            raise Invalid(f"two machines have different rows of client {name!r}: delete one, or name them differently")


def _refuse_unequal(names: Sequence[str], clients: Sequence[ClientDescription]) -> None:
    for name, client in zip(names, clients):
        if client.row != clients[0].row:
            raise Invalid(f"client {name!r} has rows of {client.row}, client {names[0]!r} of {clients[0].row}")
        if (client.test_rows is None) != (clients[0].test_rows is None):
            raise Invalid(f"one of the clients {name!r} and {names[0]!r} has test rows and the other has none")


def _classes(clients: Sequence[ClientDescription], given: int | None) -> int | None:
    """How many classes there are: as many as were given, or as the rows show; None where targets are no numbers."""
    highest = [client.highest for client in clients if client.highest is not None]
    if len(highest) < len(clients):
        return None
    if given is not None and max(highest) >= given:
        raise Invalid(f"classes = {given}, but a client has class number {max(highest)}: give more")
    return given or 1 + max(highest)
