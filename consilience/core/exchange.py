"""Messages between server and clients in a round."""

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
        """The broadcast as received by `ids`, a subset of its recipients."""
        if not self.personal or len(sent_to) == len(ids):
            return self
        where = torch.from_numpy(np.searchsorted(sent_to, ids))
        return Broadcast(
            shared=self.shared, personal=tree.map_leaves(lambda leaf: leaf[where.to(leaf.device)], self.personal)
        )

    def nbytes(self, clients: int) -> int:
        """Bytes received by all clients together."""
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
    heard: np.ndarray | None = None  # [m] False where the broadcast model replaces a missing reply; None: all True
    counts: dict[str, int] = field(default_factory=dict)  # missing replies by reason, such as silent or late
    refusals: tuple[Refusal, ...] = ()  # refused replies: client and reason
    staleness: np.ndarray | None = None  # [m] rounds since each client was sent its model; None: all 0
    received: Broadcast | None = None  # what each client was sent, in the order of `ids`, if any is stale
    traffic: int | None = None  # bytes that the clients sent, if that is not the size of the replies
    secret: bytes | None = field(default=None, repr=False)  # the round's key, for secret draws

    def __len__(self) -> int:
        return len(self.ids)

    def nbytes(self) -> int:
        """Bytes that the clients sent."""
        if self.traffic is not None:
            return self.traffic
        heard = len(self) if self.heard is None else int(self.heard.sum())
        return tree.nbytes(self.reply) // max(1, len(self)) * heard

    def only(self, keep: np.ndarray, **counts: int) -> Cohort:
        """The clients flagged in `keep`; `counts` (reasons for the others) is added to the cohort's counts."""
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
        """The same cohort with more refusals recorded."""
        return replace(self, refusals=(*self.refusals, *more))


class Presence:
    """[K] share of selections at which each client was available, computed on demand."""

    def __init__(self, absent: ClientVector, choices: int) -> None:
        self._absent, self._choices = absent, choices

    def __getitem__(self, ids: Any) -> Any:
        return (self._choices - self._absent[ids]) / self._choices

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool:
    """What the server knows of the clients when it selects: sizes, last reported losses, availability.

    The loop's vectors are converted to arrays when a selection first reads them; `draw` and `able` need no conversion.
    """

    sizes: np.ndarray  # [K] int64
    losses: np.ndarray  # [K] float64, NaN where never reported
    available: np.ndarray  # [K] bool
    presence: np.ndarray | Presence | None = None  # [K] share of selections, this one included, when available
    seconds: np.ndarray | None = field(
        default_factory=lambda: None
    )  # [K] seconds of its last reply, NaN if it has sent none
    secret: bytes | None = field(default=None, repr=False)  # the round's key, for secret draws
    empty: np.ndarray | None = field(default=None, repr=False)  # ids without rows, if known

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
        """A copy with some fields replaced."""
        return Pool(**{**{one.name: vars(self).get(one.name) for one in fields(self)}, **self._vectors, **changes})

    @cached_property
    def _all_but_few(self) -> AllBut | None:
        """The candidates as sparse flags, if the clients that cannot be chosen are listed."""
        flags = self._vectors.get("available")
        return None if flags is None or self.empty is None else flags.without(self.empty)


Notes = dict[str, Any]
"""What a server rule reports about a round, as tensors: aggregation weights, similarities ..."""


class WaitPolicy(NamedTuple):
    """How long the server waits: replies later than `deadline` are lost; the round ends after `enough_replies`."""

    deadline: float | None = None
    enough_replies: int | None = None
    partial_work: bool = False  # whether a reply's duration depends on the amount of work drawn for the round
    timeless: bool = False  # whether no reply takes any time
