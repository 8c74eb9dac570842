"""Checks the number of selected clients: zero or too many are errors, a single one gives a warning."""

from __future__ import annotations

import functools

import numpy as np

from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import Buffers, ChoosesCount, capability
from consilience.core.exchange import Pool
from consilience.core.federation import Federation
from consilience.core.settings import Invalid
from consilience.options.parts import made
from consilience.server.protocols import Merges, Tolerant
from consilience.server.rules.no_server import NoServer

_ROUNDS = 5  # a random selection may select one client in a single round


def try_selection(algorithm: Algorithm, federation: Federation, seed: int) -> None:
    """Refuse a selection of more clients than there are, or of none."""
    clients, sizes = len(federation), federation.train.sizes.numpy()
    counting = capability(algorithm.selection, ChoosesCount)
    count = None if counting is None else counting.count
    if count is not None and count > clients:
        raise Invalid(f"algorithm.selection.count = {count} is more than the {clients} clients there are")
    chosen = made("algorithm.selection", lambda: algorithm.selection.choose(0, _everybody(sizes), seed), {})
    merging, buffers = capability(algorithm.server, Merges), capability(algorithm.server, Buffers)
    tolerant = None if merging is None else capability(merging.combine, Tolerant)
    if tolerant is not None:  # with a buffer, replies of several selections add up to a round
        replies = len(chosen) if buffers is None else min(buffers.buffer, clients)
        made("algorithm.combine", functools.partial(tolerant.check_against, replies), {})


def lone_client(algorithm: Algorithm, clients: int, seed: int) -> str | None:
    """A warning if only one of several clients trains in every round although the server aggregates replies.

    It does not apply to asynchronous servers, or to servers that aggregate nothing.
    """
    if clients < 2 or capability(algorithm.server, Buffers) is not None or isinstance(algorithm.server, NoServer):
        return None
    pool = _everybody(np.ones(clients, dtype=np.int64))
    if any(len(algorithm.selection.choose(round, pool, seed)) != 1 for round in range(_ROUNDS)):
        return None
    return (
        f"{algorithm.selection!r} leaves one of {clients} clients in a round: the server has nothing to compare or to "
        "average, and every round's model is that one client's; choose more clients, such as selection = 'everyone'"
    )


def _everybody(sizes: np.ndarray) -> Pool:
    """A pool in which every client is available and no loss is known."""
    return Pool(sizes=sizes, losses=np.full(len(sizes), np.nan), available=np.ones(len(sizes), dtype=bool))
