"""Choosing among many clients looks at few of them, and draws what looking at all would draw."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

import consilience as cs
from consilience.core.client_flags import AllBut
from consilience.core.exchange import Pool
from consilience.core.federation import Rows
from consilience.core.rng import host
from consilience.core.versions import ClientVector
from consilience.environments.environment import Draw, Environment, _uniform
from consilience.selection.fixed_for_rounds import FixedForRounds
from consilience.selection.sliding_window import SlidingWindow

K = 30_000


def pools(away: np.ndarray, empty: np.ndarray) -> tuple[Pool, Pool]:
    """The same pool with and without arrays of all clients."""
    sizes, flags = np.full(K, 3), np.ones(K, dtype=bool)
    sizes[empty], flags[away] = 0, False
    losses = ClientVector.filled(K, np.nan, np.float64)
    return (
        Pool(sizes=sizes, losses=losses.dense(), available=flags),
        Pool(sizes=sizes, losses=losses, available=AllBut(K, away), empty=empty),
    )


@pytest.mark.parametrize("seed", range(3))
def test_draws_and_flags_are_those_of_all_candidates(seed: int) -> None:
    """Away and empty clients may overlap, and lie at either end."""
    rng = np.random.default_rng(seed)
    away = np.union1d(rng.choice(K, 40), [0, 1, K - 1])
    empty = np.union1d(rng.choice(K, 40), [1, 2, K - 1])
    dense, few = pools(away, empty)
    for count in (7, 50, K - 5, 10 * K):
        chosen = few.draw(host(seed, "test", count), count)
        assert "available" not in vars(few)
        assert chosen.tolist() == dense.draw(host(seed, "test", count), count).tolist()
    asked = rng.permutation(K)
    assert few.able(asked).tolist() == dense.able(asked).tolist()
    assert few.candidates.tolist() == dense.candidates.tolist()
    for selection in (cs.Uniform(count=20), FixedForRounds(inner=cs.Uniform(count=20)), SlidingWindow()):
        assert selection.choose(5, few, seed).tolist() == selection.choose(5, dense, seed).tolist()


def test_a_client_s_draw_is_the_same_among_few_and_among_all() -> None:
    ids = np.array([40_000, 3, 0, 39_999, 3])
    few = _uniform(Draw.DROPOUT, 4, ids, 9)
    assert few.tolist() == _uniform(Draw.DROPOUT, 4, np.arange(40_001), 9)[ids].tolist()


@pytest.mark.usefixtures("untraced")  # tracing takes memory of its own
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "simfedswap"])
def test_a_round_holds_no_array_of_all_clients(name: str) -> None:
    """What a round allocates on the host, apart from tensors, stays below a byte a client."""
    clients = 400_000
    x, y = torch.randn(200, 3), torch.randint(0, 2, (200,))
    sizes = torch.full((clients,), 4)
    rows = Rows(x=x, y=y, starts=torch.arange(clients) * 4 % 196, sizes=sizes)
    engine = cs.Vectorised(
        cs.Task(torch.nn.Linear(3, 2)),
        cs.Federation(train=rows, classes=2),
        device="cpu",
        lane="serial",
        environment=Environment(dropout=0.2, latency=1.0),
    )
    algorithm = getattr(cs, name)(lr=0.1, selection=cs.Uniform(count=5))
    rounds = cs.run(algorithm, engine, rounds=4)
    for _ in range(2):
        next(rounds)
    tracemalloc.start()
    try:
        next(rounds)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        next(rounds)
        assert tracemalloc.get_traced_memory()[1] - before < clients
    finally:
        tracemalloc.stop()
