"""FedAF: condensed rows and soft labels of clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.condensation import Condensation
from consilience.client.condensed_rows import Start
from consilience.client.local_training import LocalTraining
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.settings import Count, Fraction, Invalid, NonNegative, Positive
from consilience.server.rules.knowledge_matching import KnowledgeMatching


@recipe
def fedaf(
    *,
    per_class: Count = 10,
    shape: tuple[Count, ...] | None = None,
    start: Start = "means",
    keep: Fraction = 0.9,
    agreement: NonNegative = 0.1,
    knowledge: NonNegative = 0.1,
    temperature: Positive = 2.0,
    clip: Positive | None = 2.0,
    server_steps: Count = 200,
    server_lr: Positive = 0.02,
    server_batch_size: Count = 256,
    **common: Unpack[Common],
) -> Algorithm:
    """Wang et al. 2024: clients condense their data to `per_class` rows a class; the server trains on them.

    Client: min_s sum_c |mean f(x_c; w') - mean f(s_c; w')|^2 + agreement SW^2(mean z(s_c; w'), V_c), where
    w' = keep w + (1 - keep) w~. Server: min_w CE(s; w) + knowledge mean_c (KL(R_c | T_c) + KL(T_c | R_c)) / 2, where
    V_c, R_c are mean outputs and soft labels of the real rows of class c, T_c soft labels of the synthetic ones.
    `lr`, `optimiser`, `epochs` and `batch_size` are those of the synthetic rows; models whose first
    layer is not dense need `shape`. Traffic up: rows and class means instead of a model.

    Use when: rounds are few, labels are very skewed, and sending small synthetic sets is acceptable.
    Not when: synthetic rows may reveal too much (of a class with few rows, `start` = means sends nearly these rows).
    """
    # Paper: 50 rows a class, 1000 steps at rate 0.1 to 1, 500 epochs at rate 0.001 on the server. Here: fewer, as in
    # `feddm`. The weights of the two terms and the temperature are our choice. SGD, because rows that start at their
    # class means have gradients near 0, whose rounding Adam would blow up into different rows on every engine.
    if common.get("channel", Plain()) != Plain():
        raise Invalid(f"fedaf.channel = {common.get('channel')!r} cannot be used: channels carry models, not rows")
    common.setdefault("lr", 0.2)
    common.setdefault("epochs", 50)
    common.setdefault("batch_size", 256)
    algorithm = averaged(**common)
    assert isinstance(algorithm.client, LocalTraining)
    client = Condensation(
        per_class=per_class,
        shape=shape,
        start=start,
        keep=keep,
        agreement=agreement,
        temperature=temperature,
        clip=clip,
        solver=algorithm.client.solver,
        work=algorithm.client.work,
    )
    server = KnowledgeMatching(
        steps=server_steps,
        lr=server_lr,
        batch_size=server_batch_size,
        weight=knowledge,
        temperature=temperature,
    )
    return replace(algorithm, client=client, server=server)
