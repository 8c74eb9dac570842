"""The settings that every recipe with ordinary local training shares, declared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, ParamSpec, TypedDict

from consilience.client.local_training import LocalTraining
from consilience.client.memory.memory import Memory, Says
from consilience.client.personal_layers import PersonalLayers
from consilience.client.solvers import SGD, Adam, Solver
from consilience.client.terms.term import Hears, Term
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.plans import Work
from consilience.core.protocols import Channel, Selection
from consilience.core.settings import Count, Decay, Fraction, Invalid, NonNegative, Positive, options_of
from consilience.options.recipes import checked
from consilience.selection.everyone import Everyone
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.steps.plain import Replace
from consilience.server.averaging.weighting.by_size import ByExamples
from consilience.server.protocols import Combine, Ledger, Step, Weighting, read_by

P = ParamSpec("P")


class Solving(TypedDict, total=False):
    """How clients train."""

    lr: Positive
    momentum: Decay
    weight_decay: NonNegative
    lr_decay: Fraction
    optimiser: Literal["sgd", "adam", "adamw"]
    epochs: Positive
    batch_size: Count | None


class Common(Solving, total=False):
    """Keyword arguments of every recipe; see `averaged` for the defaults."""

    selection: Selection
    terms: tuple[Term, ...]
    memory: tuple[Memory, ...]
    personal_layers: PersonalLayers | None
    weighting: Weighting
    combine: Combine
    step: Step
    ledgers: tuple[Ledger, ...]
    channel: Channel


def averaged(
    *,
    lr: Positive = 0.01,
    momentum: Decay = 0.0,
    weight_decay: NonNegative = 0.0,
    lr_decay: Fraction = 1.0,
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd",
    epochs: Positive = 1,
    batch_size: Count | None = 32,
    selection: Selection | None = None,
    terms: tuple[Term, ...] = (),
    memory: tuple[Memory, ...] = (),
    personal_layers: PersonalLayers | None = None,
    weighting: Weighting | None = None,
    combine: Combine | None = None,
    step: Step | None = None,
    ledgers: tuple[Ledger, ...] = (),
    channel: Channel | None = None,
) -> Algorithm:
    """Local training from the global model, then a weighted average: what most recipes start from."""
    solver: Solver
    if optimiser == "sgd":
        solver = SGD(lr=lr, momentum=momentum, weight_decay=weight_decay, decay=lr_decay)
    else:
        solver = Adam(lr=lr, weight_decay=weight_decay, decoupled=optimiser == "adamw")
    work = Work(epochs=epochs, batch_size=batch_size)
    return refuse_misfits(
        Algorithm(
            selection=selection or Everyone(),
            client=LocalTraining(solver=solver, work=work, terms=terms, memory=memory, personal_layers=personal_layers),
            server=Averaging(
                weighting=weighting or ByExamples(),
                combine=combine or WeightedMean(),
                step=step or Replace(),
                ledgers=ledgers,
            ),
            channel=channel or Plain(),
        )
    )


def recipe(build: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """Marks a recipe: its options are read and checked as those of a config are, and idle ones are refused."""
    return checked(build, options_of(averaged))


def with_terms(
    algorithm: Algorithm, *terms: Term, memory: tuple[Memory, ...] = (), ledgers: tuple[Ledger, ...] = ()
) -> Algorithm:
    """The same algorithm with terms added to the local objective, and with the memories and ledgers they read."""
    client, server = algorithm.client, algorithm.server
    assert isinstance(client, LocalTraining) and isinstance(server, Averaging)
    client = replace(client, terms=client.terms + terms, memory=client.memory + memory)
    server = replace(server, ledgers=server.ledgers + ledgers) if ledgers else server
    return refuse_misfits(replace(algorithm, client=client, server=server))


def refuse_misfits(algorithm: Algorithm) -> Algorithm:
    """The algorithm itself; refused if its client listens for what its server never tells, or the other way round."""
    client, server = algorithm.client, algorithm.server
    if not isinstance(client, LocalTraining) or not isinstance(server, Averaging):
        return algorithm
    told = [ledger.name for ledger in server.ledgers]
    if len(set(told)) < len(told):
        raise Invalid(f"ledgers holds {', '.join(told)}: no two may have one name")
    for part in (*client.terms, *client.memory):
        for name in part.hears if isinstance(part, Hears) else ():
            if name not in told:
                raise Invalid(
                    f"{type(part).__name__} listens for {name!r}, which no ledger of the server tells "
                    f"(ledgers: {', '.join(told) or 'none'}): add the ledger, or use a recipe that brings it along"
                )
    said = {name for part in client.memory if isinstance(part, Says) for name in part.says}
    for reader in (server.weighting, *server.ledgers):
        for name in read_by(reader):
            if name not in said:
                raise Invalid(
                    f"{type(reader).__name__} reads {name!r} in the replies, which no memory of the client says: "
                    "add the memory, or use a recipe that brings it along"
                )
    return algorithm
