"""Shared code of FedSplit's recipes: options and construction."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Unpack

from consilience.algorithms._common import TrainingOptions, averaged
from consilience.client.local_training import LocalTraining
from consilience.client.memory.memory import Memory
from consilience.client.memory.models import PreviousModel
from consilience.client.prox_centering import Centring, ReflectedProximal
from consilience.client.terms.term import Term
from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import HasFeedback, capability
from consilience.core.protocols import Channel, Selection
from consilience.core.settings import Invalid, Positive, check_value
from consilience.server.protocols import Weighting
from consilience.server.rules.splitting import Splitting


class Local(TrainingOptions, total=False):
    """The shared options that concern the client; this server accepts no other combine or step."""

    selection: Selection
    terms: tuple[Term, ...]
    channel: Channel


def splitting(
    *,
    step: float,
    weights: Literal["uniform", "examples"] | tuple[float, ...],
    keeps_z: bool,
    relaxation: float,
    weighting: Weighting | None,
    **local: Unpack[Local],
) -> Algorithm:
    """Local training from x towards prox(2x - z); then z is updated, and x is the mean of all z."""
    step = check_value("step", step, Positive)
    lr, momentum = local.get("lr", 0.01), local.get("momentum", 0.0)
    if local.get("optimiser", "sgd") == "sgd" and lr >= 2 * (1 + momentum) * step:
        raise Invalid(
            f"lr = {lr:g} with step = {step:g} diverges whatever the data, since the proximal term alone has curvature "
            f"1/step: lr must be < {2 * (1 + momentum) * step:g}, and is best well below step"
        )
    algorithm = averaged(**local)
    held_back = capability(algorithm.channel, HasFeedback)
    if keeps_z and held_back is not None and held_back.feedback:
        raise Invalid(
            "keeps_z = True is incompatible with a channel with feedback: z at the server lacks what the channel "
            "holds back, so that the client makes up for it, and then the channel sends it as well. "
            "Set keeps_z or feedback to False"
        )
    client = algorithm.client
    assert isinstance(client, LocalTraining)
    terms = (*client.terms, ReflectedProximal(step=step, sent=keeps_z))
    server = Splitting(weights=weights, keeps_z=keeps_z, relaxation=relaxation, weighting=weighting)
    memory: tuple[Memory, ...] = () if keeps_z else (Centring(relaxation=relaxation),)
    if server.reads == ("moved",):
        memory = (*memory, PreviousModel(report=True))
    elif server.reads:
        raise Invalid(
            f"weighting = {weighting!r} reads {server.reads[0]!r} in the replies, which these clients do not say"
        )
    client = replace(client, terms=terms, memory=memory)
    return replace(algorithm, client=client, server=server)
