"""Initial weights: by examples, a given table, or the weights that another weighting computes in a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from consilience.core import rng
from consilience.core.algorithm import Algorithm
from consilience.core.protocols import Engine
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.server.averaging.weighting.schedule import ScheduleWeights
from consilience.server.protocols import Weighting

LEAST = 1e-6  # the square of a parameter at 0 has no slope: a weight of 0 could never grow

Initial = Tensor | Weighting | None
"""Weights [clients] or [rounds, clients], a weighting, or None for N_k / N."""


def initial_table(
    initial: Initial, algorithm: Algorithm, engine: Engine, start: Tree, *, rounds: int, seed: int
) -> Tensor:
    """The weights [rounds, clients] that learning starts from; each row sums to one."""
    sizes = torch.from_numpy(np.asarray(engine.sizes)).to(torch.float64)
    if initial is None:
        return (sizes / sizes.sum()).repeat(rounds, 1)
    if isinstance(initial, Tensor):
        initial = ScheduleWeights.of(initial if initial.dim() != 1 else initial.unsqueeze(0))
    if isinstance(initial, ScheduleWeights):
        initial.init(start, len(sizes))
        table = torch.stack([initial.row(t, torch.device("cpu")) for t in range(rounds)])
    else:
        table = _computed(initial, algorithm, engine, start, rounds, seed)
    if not bool((table >= 0).all()) or not bool((table.sum(1) > 0).all()):
        raise Invalid("learning starts from weights of at least 0, not all of them 0 in a round: change `initial`")
    table = torch.where(sizes > 0, (table / table.sum(1, keepdim=True)).clamp(min=LEAST), 0.0)
    return table / table.sum(1, keepdim=True)


def _computed(
    weighting: Weighting, algorithm: Algorithm, engine: Engine, start: Tree, rounds: int, seed: int
) -> Tensor:
    """The weights of a weighting in one run; absent clients of a round get N_k / N, the others share the rest."""
    trial = replace(algorithm, server=replace(algorithm.server, weighting=weighting))  # type: ignore[type-var]
    sizes = torch.from_numpy(np.asarray(engine.sizes)).to(torch.float64)
    table = (sizes / sizes.sum()).repeat(rounds, 1)
    run_seed = rng.key(seed, "initial weights") % 2**63
    for done in run(trial, engine, rounds=rounds, seed=run_seed, start=start, max_bad_rounds=rounds + 1):
        if not len(done.cohort):
            continue
        found = done.notes["weights"].detach().to("cpu", torch.float64)
        row, ids = table[done.number - 1], torch.from_numpy(done.cohort.ids)
        row[ids] = found / found.sum() * row[ids].sum()
    return table
