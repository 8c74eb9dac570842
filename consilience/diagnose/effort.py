"""Compute and communication skew: differences in work, speed and reliability between clients, by the environment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.plans import Work
from consilience.environments import clock
from consilience.environments.environment import Environment

ROUNDS = 20  # rounds over which random draws are averaged


@dataclass(frozen=True, eq=False, kw_only=True)
class Effort:
    """Means over rounds, one number per client."""

    steps: np.ndarray  # [K] local steps in a round
    epochs: np.ndarray  # [K] passes over its own rows, as far as its steps go
    available: np.ndarray  # [K] share of rounds
    heard: np.ndarray  # [K] share of replies that arrive
    seconds: np.ndarray  # [K] simulated, to a reply; 0 without a clock
    communication: float  # share of them that is transfer
    waiting: float  # share of clients' time spent waiting for the slowest, in synchronous rounds

    @property
    def epochs_ratio(self) -> float:
        """The most passes over the fewest."""
        some = self.epochs[self.epochs > 0]
        return float(some.max() / some.min()) if len(some) else 1.0


def effort(environment: Environment, work: Work, sizes: np.ndarray, model_bytes: int, seed: int) -> Effort:
    """The effort of all clients in this environment, if all are given the same work."""
    ids = np.arange(len(sizes))
    per_epoch = work.steps_per_epoch(sizes)
    steps, available, heard, seconds, computing = (np.zeros((ROUNDS, len(sizes))) for _ in range(5))
    for round in range(ROUNDS):
        steps[round] = environment.work(round, ids, seed, epochs=work.epochs, steps_per_epoch=per_epoch)
        available[round] = environment.available(round, len(sizes), seed)
        heard[round] = environment.reachable(round, ids, seed)
        rows = clock.rows_met(work, sizes, steps[round].astype(np.int64))
        seconds[round] = clock.seconds(environment, round, ids, seed, rows=rows, down=model_bytes, up=model_bytes)
        computing[round] = clock.seconds(environment, round, ids, seed, rows=rows, down=0, up=0)
    slowest = seconds.max(1)
    timed = slowest > 0
    waiting = 1 - (seconds[timed].mean(1) / slowest[timed]).mean() if timed.any() else 0.0
    total = seconds.sum()
    return Effort(
        steps=steps.mean(0),
        epochs=steps.mean(0) / np.maximum(per_epoch, 1),
        available=available.mean(0),
        heard=heard.mean(0),
        seconds=seconds.mean(0),
        communication=float(1 - computing.sum() / total) if total else 0.0,
        waiting=float(waiting),
    )
