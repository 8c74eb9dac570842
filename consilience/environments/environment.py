"""Speed and reliability of clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from consilience.core.settings import Count, Invalid, NonNegative, Positive, Probability, Whole, check

_JUMP = 100  # numbers drawn in the time of one jump to another position of the stream


class Draw(IntEnum):
    """The purpose of a random number, which is part of its seed, so that decisions are independent."""

    AVAILABLE = 1
    COMMUNICATION = 2
    DROPOUT = 3
    STRAGGLER = 4
    PARTIAL_WORK = 5
    SPEED = 6
    JITTER = 7


@dataclass(frozen=True, kw_only=True)
class Environment:
    """How much work clients do, and whether they are available and reply; by default full work, always.

    epochs, steps: local epochs or steps, per client or for all (at most one of the two).
    stragglers: this fraction of every cohort does a random number of epochs in [1, E), or below two epochs a
    random number of steps in [1, steps); with straggler_policy "drop" their replies never arrive.
    availability: probability that a client can be chosen in a round; communication: that its reply arrives;
    dropout: that it fails during a round. silent: what replaces a missing reply at the server:
    "broadcast_model" counts the broadcast model at full weight, "renormalise" averages over those that replied.

    Simulated time (no real waiting; an omitted setting takes no time): rows_per_second in training, download and upload
    in bytes per second, latency in seconds each way. speed_spread makes clients differ: each client's computing takes
    exp(speed_spread z) times as long, with its own standard normal z; jitter does the same to whole replies, drawn anew
    each time. deadline: replies that take more seconds are lost. enough_replies: this many replies end a synchronous
    round.
    """

    epochs: tuple[NonNegative, ...] | None = None
    steps: tuple[Whole, ...] | None = None
    stragglers: Probability = 0.0
    straggler_policy: Literal["partial", "drop"] = "partial"
    communication: Probability | tuple[Probability, ...] = 1.0
    availability: Probability | tuple[Probability, ...] = 1.0
    dropout: Probability = 0.0
    silent: Literal["broadcast_model", "renormalise"] = "renormalise"
    rows_per_second: Positive | tuple[Positive, ...] | None = None
    download: Positive | tuple[Positive, ...] | None = None
    upload: Positive | tuple[Positive, ...] | None = None
    latency: NonNegative | tuple[NonNegative, ...] = 0.0
    speed_spread: NonNegative = 0.0
    jitter: NonNegative = 0.0
    deadline: Positive | None = None
    enough_replies: Count | None = None

    def __post_init__(self) -> None:
        check(self)
        for key in ("deadline", "enough_replies"):
            if getattr(self, key) is not None and self.silent == "broadcast_model":
                raise Invalid(
                    f"Environment.{key} = {getattr(self, key)!r} drops late replies, but silent = 'broadcast_model' "
                    "counts every client in every round: use silent = 'renormalise'"
                )
        if self.speed_spread and self.rows_per_second is None:
            raise Invalid("Environment.speed_spread has no effect without Environment.rows_per_second: give that, too")
        timed = any(getattr(self, key) is not None for key in ("rows_per_second", "download", "upload"))
        if not timed and not np.any(self.latency):
            for key, usual in (("jitter", 0.0), ("deadline", None)):
                if getattr(self, key) != usual:
                    raise Invalid(
                        f"Environment.{key} = {getattr(self, key)!r} has no effect, since nothing takes time: give "
                        "rows_per_second, download, upload or latency, too"
                    )
        if self.epochs is not None and self.steps is not None:
            raise Invalid("Environment.epochs and Environment.steps both say how much work clients do: give one")

    def check_against(self, clients: int) -> None:
        """Refuse per-client settings whose length is not the number of clients."""
        timed = ("rows_per_second", "download", "upload", "latency")
        for key in ("epochs", "steps", "communication", "availability", *timed):
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) != clients:
                raise Invalid(f"Environment.{key} has {len(value)} values for {clients} clients: give one each")

    def available(self, round: int, clients: int, seed: int) -> np.ndarray:
        """[K] flags: which clients can be chosen this round."""
        share = self.availability
        if not isinstance(share, tuple) and not 0 < share < 1:
            return np.full(clients, share >= 1)
        everyone = np.arange(clients)
        return _happens(Draw.AVAILABLE, self._each("availability", everyone), round, everyone, seed)

    def work(
        self, round: int, ids: Any, seed: int, *, epochs: float, steps_per_epoch: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """[m] local steps that each chosen client does; `epochs` is for all, `steps_per_epoch` is [m]."""
        ids = np.asarray(ids, dtype=np.int64)
        per_epoch = np.asarray(steps_per_epoch, dtype=np.int64)
        if per_epoch.shape != ids.shape:
            raise Invalid(f"steps_per_epoch has shape {per_epoch.shape} for {len(ids)} clients: give one each")
        own_epochs = self._each("epochs", ids) if self.epochs is not None else np.full(ids.shape, float(epochs))
        full = np.ceil(own_epochs * per_epoch - 1e-9).astype(np.int64)  # 1.1 * 50 is 55.00000000000001
        if self.steps is not None:
            own_epochs = np.ones(ids.shape)  # a step budget has no epochs
            full = np.where(per_epoch > 0, self._each("steps", ids), 0)  # no rows, no steps
        if not self.stragglers:
            return full
        late = self.late(round, ids, seed)
        if not late.any():
            return full
        draws = _uniform(Draw.PARTIAL_WORK, round, ids, seed)
        return np.where(late, _partial(full, own_epochs, per_epoch, draws), full)

    def reachable(self, round: int, ids: Any, seed: int) -> np.ndarray:
        """[m] flags: which replies arrive."""
        ids = np.asarray(ids, dtype=np.int64)
        _check_numbers(round, ids, seed)
        heard = np.ones(ids.shape, dtype=bool)
        if self.communication != 1:
            heard &= _happens(Draw.COMMUNICATION, self._each("communication", ids), round, ids, seed)
        if self.dropout:
            heard &= ~_happens(Draw.DROPOUT, np.broadcast_to(self.dropout, ids.shape), round, ids, seed)
        if self.straggler_policy == "drop":
            heard &= ~self.late(round, ids, seed)
        return heard

    def late(self, round: int, ids: Any, seed: int) -> np.ndarray:
        """[m] flags: the stragglers, exactly floor(fraction m + 1/2) of the cohort, by their own keys."""
        ids = np.asarray(ids, dtype=np.int64)
        _check_numbers(round, ids, seed)
        flags, count = np.zeros(ids.shape, dtype=bool), int(np.floor(self.stragglers * len(ids) + 0.5))
        if count:
            flags[np.lexsort((ids, _uniform(Draw.STRAGGLER, round, ids, seed)))[:count]] = True
        return flags

    def _each(self, key: str, ids: np.ndarray) -> np.ndarray:
        """[m] a setting for each client, given once or per client."""
        value = np.asarray(getattr(self, key))
        if value.ndim == 0:
            return np.broadcast_to(value, ids.shape)
        if len(ids) and int(ids.max()) >= len(value):
            raise Invalid(f"Environment.{key} has {len(value)} values, none for client {ids.max()}: give one each")
        return value[ids]


def _partial(full: np.ndarray, epochs: np.ndarray, per_epoch: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """What stragglers do instead of `full`: whole epochs in [1, E) where E >= 2, else steps in [1, full)."""
    choices = np.maximum(np.ceil(epochs) - 1, 1)
    whole_epochs = (1 + np.floor(draws * choices)).astype(np.int64) * per_epoch
    some_steps = 1 + np.floor(draws * np.maximum(full - 1, 1)).astype(np.int64)
    return np.minimum(np.where(epochs >= 2, whole_epochs, some_steps), full)  # one step or none cannot be reduced


def _happens(draw: Draw, probability: np.ndarray, round: int, ids: np.ndarray, seed: int) -> np.ndarray:
    """[m] flags, each True with its probability; certain outcomes are not drawn."""
    _check_numbers(round, ids, seed)
    if ((probability <= 0) | (probability >= 1)).all():
        return probability >= 1
    return _uniform(draw, round, ids, seed) < probability


def _uniform(draw: Draw, round: int, ids: np.ndarray, seed: int) -> np.ndarray:
    """One number in [0, 1) per client, drawn at its position in the stream, independent of other clients."""
    _check_numbers(round, ids, seed)
    if len(ids) == 0:
        return np.empty(0)
    stream, last = np.random.default_rng([seed, int(draw), round]), int(ids.max())
    if last < _JUMP * len(ids):
        return stream.random(last + 1)[ids]
    drawn, at = np.empty(len(ids)), 0
    for place, client in enumerate(ids.tolist()):  # the same numbers, without drawing those in between
        stream.bit_generator.advance(client - at)  # type: ignore[attr-defined]
        drawn[place], at = stream.random(), client + 1
    return drawn


def _check_numbers(round: int, ids: np.ndarray, seed: int) -> None:
    if len(ids) and (round < 0 or seed < 0 or int(ids.min()) < 0):
        raise Invalid(f"round = {round}, seed = {seed} and client numbers must be whole numbers >= 0")
