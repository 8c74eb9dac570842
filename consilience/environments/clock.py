"""The simulated clock: duration of a client's reply from its speed, bandwidth and random jitter."""

from __future__ import annotations

from typing import Any

import numpy as np

from consilience.core.exchange import WaitPolicy
from consilience.core.plans import Work
from consilience.environments.environment import Draw, Environment


def seconds(
    environment: Environment, round: int, ids: np.ndarray, seed: int, *, rows: np.ndarray, down: float, up: float
) -> np.ndarray:
    """[m] simulated seconds to receive `down` bytes, process `rows` [m] rows and send `up` bytes."""
    slowness = _log_normal(environment.speed_spread, Draw.SPEED, 0, ids, seed)
    jitter = _log_normal(environment.jitter, Draw.JITTER, round, ids, seed)
    computing = rows / _each(environment.rows_per_second, ids) * slowness
    moving = down / _each(environment.download, ids) + up / _each(environment.upload, ids)
    return (computing + moving + 2 * _each(environment.latency, ids)) * jitter


def wait_policy(environment: Environment) -> WaitPolicy:
    """How long the server waits in this environment."""
    rates = (environment.rows_per_second, environment.download, environment.upload)
    return WaitPolicy(
        deadline=environment.deadline,
        enough_replies=environment.enough_replies,
        partial_work=environment.stragglers > 0 and environment.rows_per_second is not None,
        timeless=all(rate is None for rate in rates) and not np.any(environment.latency),
    )


def rows_met(work: Work, sizes: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """[m] rows that clients of these sizes process in these steps; the last batch of an epoch may be short."""
    per_pass = np.maximum(work.steps_per_epoch(sizes), 1)
    batch = sizes if work.batch_size is None else np.minimum(work.batch_size, sizes)
    return steps // per_pass * sizes + np.minimum(steps % per_pass * batch, sizes)


def _each(value: Any, ids: np.ndarray) -> np.ndarray:
    """[m] a setting for each client; None means an unlimited rate."""
    known = np.asarray(np.inf if value is None else value, dtype=np.float64)
    return np.broadcast_to(known, ids.shape) if known.ndim == 0 else known[ids]


def _log_normal(spread: float, draw: Draw, round: int, ids: np.ndarray, seed: int) -> np.ndarray:
    """[m] factors around one, each drawn at its client's position in the stream, independent of other clients."""
    if not spread or not len(ids):
        return np.ones(len(ids))
    return np.exp(spread * np.random.default_rng([seed, int(draw), round]).standard_normal(int(ids.max()) + 1)[ids])
