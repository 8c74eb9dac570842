"""Shared code of FedSwap and SimFedSwap."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged
from consilience.client.local_training import LocalTraining
from consilience.client.training_variant import TrainingVariant
from consilience.core.algorithm import Algorithm
from consilience.core.protocols import Selection
from consilience.core.settings import Count, Fraction, Invalid, Probability
from consilience.selection.fixed_for_rounds import FixedForRounds
from consilience.selection.sliding_window import SlidingWindow
from consilience.selection.uniform import Uniform
from consilience.server.averaging.averaging import Averaging
from consilience.server.geometry.model_similarity import Layerwise, ModelSimilarity
from consilience.server.geometry.pairing import Pairing
from consilience.server.rules.swapping import Swapping


def swapped(
    pairing: Pairing,
    similarity: ModelSimilarity | None,
    swap_percentage: Probability,
    h1: Count,
    h2: Count,
    training: TrainingVariant | None,
    **common: Unpack[Common],
) -> Algorithm:
    """h1 x `epochs` local epochs, then a swap, or every h2-th time an average; participants are fixed in between."""
    base = averaged(**common)
    client, server = base.client, base.server
    assert isinstance(client, LocalTraining) and isinstance(server, Averaging)
    if server.ledgers:
        raise Invalid(
            f"ledgers = {server.ledgers!r} is incompatible with swapping: a ledger follows one global model from "
            "round to round, and between averages there is none"
        )
    held = (
        base.selection
        if isinstance(base.selection, FixedForRounds)
        else FixedForRounds(inner=base.selection, rounds=h2)
    )
    if held.rounds != h2:
        raise Invalid(
            f"selection is held for {held.rounds} rounds, but h2 = {h2}: participants change at averages only"
        )
    client = replace(client, work=replace(client.work, epochs=h1 * client.work.epochs))
    return replace(
        base,
        selection=held,
        client=client if training is None else training.applied_to(client),
        server=Swapping(
            every=h2,
            swap_percentage=swap_percentage,
            pairing=pairing,
            similarity=similarity or Layerwise(),
            room=_room(held.inner),
            weighting=server.weighting,
            combine=server.combine,
            step=server.step,
        ),
    )


def _room(selection: Selection) -> Count | Fraction | None:
    """The number or fraction of clients that a selection chooses, if its settings fix it."""
    if isinstance(selection, Uniform):
        return selection.count or selection.fraction
    return selection.fraction if isinstance(selection, SlidingWindow) else None
