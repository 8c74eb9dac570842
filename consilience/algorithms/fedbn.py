"""FedBN: personal normalisation layers."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.personal_layers import Normalisation
from consilience.core.algorithm import Algorithm


@recipe
def fedbn(**common: Unpack[Common]) -> Algorithm:
    """Li et al. 2021: FedAvg of all parameters and buffers but those of normalisation layers, which clients keep.

    The server's copy of these keeps its initial values: evaluate the clients' personal models.

    Use when: clients' inputs differ in style or sensor, and the model has normalisation layers.
    Not when: one model must serve new clients, or the model has no normalisation.
    """
    # Paper: batch norm. Here: group, layer and instance norm, too, since they have the same parameters.
    common.setdefault("personal_layers", Normalisation())
    return averaged(**common)
