"""FedPer: personal layers on a common body."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.personal_layers import Head
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count


@recipe
def fedper(*, layers: Count = 1, **common: Unpack[Common]) -> Algorithm:
    """Arivazhagan et al. 2019: FedAvg of the body; each client keeps and trains its own last `layers` layers.

    The server's head keeps its initial values: evaluate the clients' personal models.

    Use when: clients share features but map them to labels differently.
    Not when: one model must serve new clients.
    """
    common.setdefault("personal_layers", Head(layers=layers))
    return averaged(**common)
