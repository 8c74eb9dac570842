"""FedRep: trains the own head, then the shared body."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.local_training import LocalTraining
from consilience.client.personal_layers import Head
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count


@recipe
def fedrep(*, head_epochs: Count = 1, layers: Count = 1, **common: Unpack[Common]) -> Algorithm:
    """Collins et al. 2021: `head_epochs` epochs on the client's own head alone, then `epochs` on the body alone.

    Only the body is averaged. The server's head keeps its initial values: evaluate the clients' personal models.

    Use when: as FedPer, where the head should be fitted before the shared layers are trained.
    Not when: local rows are too few to fit a head alone.
    """
    common.setdefault("personal_layers", Head(layers=layers))
    algorithm = averaged(**common)
    client = algorithm.client
    assert isinstance(client, LocalTraining)
    work = replace(client.work, epochs=client.work.epochs + head_epochs)
    return replace(algorithm, client=replace(client, work=work, personal_epochs=head_epochs))
