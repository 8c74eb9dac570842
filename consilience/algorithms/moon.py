"""MOON: model-contrastive local training."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe, with_terms
from consilience.client.memory.models import PreviousModel
from consilience.client.terms.contrastive import Contrastive
from consilience.core.algorithm import Algorithm
from consilience.core.settings import NonNegative, Positive


@recipe
def moon(*, mu: NonNegative = 1.0, temperature: Positive = 0.5, **common: Unpack[Common]) -> Algorithm:
    """Li, He, Song 2021: F_k(w) - mu log(e^{cos(z, z_glob)/T} / (e^{cos(z, z_glob)/T} + e^{cos(z, z_prev)/T})).

    z is the model's `features(x)`, z_glob the received model's, z_prev that of the client's own last model. The paper
    puts a projection head in front of the classifier: model.name = "siamese" has one.

    Use when: images with skewed labels, and local representations that drift from the global model's.
    Not when: clients take part once: without a previous model the term is left out.
    """
    # SimProx's text calls it "Modeling Overlapping Neighborhoods" and prints distances of parameters (its eq 4). Here:
    # the real model-contrastive loss.
    kept = [part.name for part in common.get("memory", ())]
    memory = () if "previous" in kept else (PreviousModel(),)
    return with_terms(averaged(**common), Contrastive(mu=mu, temperature=temperature), memory=memory)
