"""What server and clients send each other in a round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.client_flags import AllBut
from consilience.core.refusal import Refusal
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector


@dataclass(frozen=True, eq=False, kw_only=True)
class Broadcast:
    """Server to clients: `shared` is the same for all, `personal` is stacked [m, ...] in the order of the ids."""

    shared: Tree
    personal: Tree = field(default_factory=dict)

    def among(self, sent_to: np.ndarray, ids: np.ndarray) -> Broadcast:
        """What `ids`, who are some of those it was sent to, received."""
        if not self.personal or len(sent_to) == len(ids):
            return self
        where = torch.from_numpy(np.searchsorted(sent_to, ids))
        return Broadcast(
            shared=self.shared, personal=tree.map_leaves(lambda leaf: leaf[where.to(leaf.device)], self.personal)
        )

    def nbytes(self, clients: int) -> int:
        """What reaches all clients together."""
        return tree.nbytes(self.shared) * clients + tree.nbytes(self.personal)


@dataclass(frozen=True, eq=False, kw_only=True)
class Cohort:
    """Clients to server: replies stacked [m, ...] in ascending client order, whatever order they arrived in."""

    reply: Tree
    ids: np.ndarray  # [m] int64, ascending
    examples: Tensor  # [m] float64: rows each client holds
    steps: np.ndarray  # [m] local steps done
    round: int
    seed: int = 0  # of the run: with the round, it seeds the server's own draws
    heard: np.ndarray | None = None  # [m] False where the broadcast model stands in for a silent client; None: all True
    counts: dict[str, int] = field(default_factory=dict)  # silent, empty_client, nonfinite, late: what is missing
    refusals: tuple[Refusal, ...] = ()  # who sent what could not be used
    staleness: np.ndarray | None = None  # [m] rounds since each client was sent its model; None: all 0
    received: Broadcast | None = None  # what each was sent, in this order, where any is stale
    traffic: int | None = None  # bytes that the clients sent, where that is not the size of the replies
    secret: bytes | None = field(default=None, repr=False)  # the round's key, for secret draws

    def __len__(self) -> int:
        return len(self.ids)

    def nbytes(self) -> int:
        """What the clients really sent."""
        if self.traffic is not None:
            return self.traffic
        heard = len(self) if self.heard is None else int(self.heard.sum())
        return tree.nbytes(self.reply) // max(1, len(self)) * heard

    def only(self, keep: np.ndarray, **counts: int) -> Cohort:
        """The clients flagged in `keep`; `counts` says why the others went, and is added to what is counted already."""
        index = torch.from_numpy(np.flatnonzero(keep))
        return Cohort(
            reply=tree.take(self.reply, np.flatnonzero(keep)),
            ids=self.ids[keep],
            examples=self.examples[index.to(self.examples.device)],
            steps=self.steps[keep],
            round=self.round,
            seed=self.seed,
            heard=None if self.heard is None else self.heard[keep],
            counts={**self.counts, **{reason: self.counts.get(reason, 0) + n for reason, n in counts.items()}},
            refusals=self.refusals,
            staleness=None if self.staleness is None else self.staleness[keep],
            received=None if self.received is None else self.received.among(self.ids, self.ids[keep]),
            secret=self.secret,
        )

    def refusing(self, more: Iterable[Refusal]) -> Cohort:
        """With more refusals written down."""
        return replace(self, refusals=(*self.refusals, *more))


class Presence:
    """[K] shares of choices at which clients were available, worked out for those that are asked for."""

    def __init__(self, absent: ClientVector, choices: int) -> None:
        self._absent, self._choices = absent, choices

    def __getitem__(self, ids: Any) -> Any:
        return (self._choices - self._absent[ids]) / self._choices

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool:
    """What the server knows of the clients when it chooses: sizes, losses last reported, who is available.

    Vectors of the loop become arrays when a selection first reads them; `draw` and `able` do without.
    """

    sizes: np.ndarray  # [K] int64
    losses: np.ndarray  # [K] float64, NaN where never reported
    available: np.ndarray  # [K] bool
    presence: np.ndarray | Presence | None = None  # [K] share of the choices so far, with this one, when available
    seconds: np.ndarray | None = field(
        default_factory=lambda: None
    )  # [K] of its last reply, NaN where it has sent none
    secret: bytes | None = field(default=None, repr=False)  # the round's key, for secret draws
    empty: np.ndarray | None = field(default=None, repr=False)  # ids without rows, where they are known

    def __post_init__(self) -> None:
        vectors = {name: values for name, values in vars(self).items() if isinstance(values, (ClientVector, AllBut))}
        for name in vectors:
            object.__delattr__(self, name)
        object.__setattr__(self, "_vectors", vectors)

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self).get("_vectors", {}):
            raise AttributeError(name)
        object.__setattr__(self, name, self._vectors[name].dense())
        return getattr(self, name)

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def candidates(self) -> np.ndarray:
        """Ids of the clients that are available and have data."""
        return np.flatnonzero(self.available & (self.sizes > 0))

    def able(self, ids: np.ndarray) -> np.ndarray:
        """[m] whether each of these clients is available and has data."""
        few = self._all_but_few
        return self.available[ids] & (self.sizes[ids] > 0) if few is None else few[ids]

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """At most `count` of the candidates, each equally likely, in the order drawn."""
        few = self._all_but_few
        if few is None:
            return rng.choice(self.candidates, min(count, len(self.candidates)), replace=False)
        return few.at(rng.choice(few.count, min(count, few.count), replace=False))

    def knowing(self, **changes: Any) -> Pool:
        """The same with other values of some fields."""
        return Pool(**{**{one.name: vars(self).get(one.name) for one in fields(self)}, **self._vectors, **changes})

    @cached_property
    def _all_but_few(self) -> AllBut | None:
        """The candidates, where those that cannot be chosen are named."""
        flags = self._vectors.get("available")
        return None if flags is None or self.empty is None else flags.without(self.empty)


Notes = dict[str, Any]
"""What a server rule reports of its round: aggregation weights, similarities ... as tensors."""


class WaitPolicy(NamedTuple):
    """How long the server waits: replies that take longer than `deadline` are lost; after `enough_replies` it ends."""

    deadline: float | None = None
    enough_replies: int | None = None
    partial_work: bool = False  # whether a reply's duration depends on the share of work drawn for the round
