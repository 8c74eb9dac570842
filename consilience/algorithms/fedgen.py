"""FedGen: data-free distillation by a generator."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe, with_terms
from consilience.client.label_counting import LabelCounting
from consilience.client.local_training import LocalTraining
from consilience.client.terms.generated_features import GeneratedFeatures
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Fraction, NonNegative, Positive
from consilience.server.averaging.ledgers.generator import Generator


@recipe
def fedgen(
    *,
    alpha: NonNegative = 1.0,
    beta: NonNegative = 1.0,
    decay: Fraction = 0.98,
    generator_steps: Count = 50,
    generator_lr: Positive = 0.01,
    diversity: NonNegative = 1.0,
    noise_size: Count = 32,
    hidden: Count = 128,
    **common: Unpack[Common],
) -> Algorithm:
    """Zhu et al. 2021: the server learns G(y, e), features that the clients' classifiers take for label y.

    Clients minimise F_k + decay^t (alpha CE(head(G(y')), y') + beta KL(head(G(y)) || model(x))), y' drawn by its share
    in the federation. Needs a linear last layer. Clients report their label shares; the generator is sent to all.

    Use when: labels are strongly skewed and the server has no data to distil with.
    Not when: there are many classes and few rounds: the generator needs rounds to learn.
    """
    # Paper: batch norm in the generator, y' uniform in the authors' code. Here: none, since its statistics would be one
    # more state; y' by the counts that clients send, as the paper's p(y).
    term = GeneratedFeatures(alpha=alpha, beta=beta, decay=decay)
    ledger = Generator(
        noise_size=noise_size, hidden=hidden, steps=generator_steps, lr=generator_lr, diversity=diversity
    )
    algorithm = with_terms(averaged(**common), term, ledgers=(ledger,))
    assert isinstance(algorithm.client, LocalTraining)
    return replace(algorithm, client=LabelCounting(training=algorithm.client))
