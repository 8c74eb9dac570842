"""The settings that every recipe with ordinary local training shares, declared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, ParamSpec, TypedDict

from consilience.client.adaptive_solvers import Adadelta, Adagrad, Adamax, Lion, NAdam, RMSprop
from consilience.client.augmentations import Augmentation
from consilience.client.local_training import LocalTraining
from consilience.client.memory.memory import AddsToReply, Memory
from consilience.client.personal_layers import PersonalLayers
from consilience.client.solver_wrappers import Accumulated, Clipped, Scheduled, Several
from consilience.client.solvers import SGD, Adam, Solver
from consilience.client.terms.term import ReadsBroadcast, Term
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.plans import Work
from consilience.core.protocols import Channel, Selection
from consilience.core.rate_schedules import RateSchedule
from consilience.core.settings import Count, Decay, Fraction, Invalid, NonNegative, Positive, options_of
from consilience.options.recipes import checked
from consilience.selection.everyone import Everyone
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.steps.plain import Replace, ScheduledStep
from consilience.server.averaging.weighting.by_size import ByExamples
from consilience.server.protocols import Combine, Ledger, Step, Weighting, read_by

P = ParamSpec("P")
Optimiser = Literal["sgd", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "adamax", "nadam", "lion"]
"""Solvers that take `lr` and `weight_decay` from the shared options; as a part, a solver brings its own."""


class TrainingOptions(TypedDict, total=False):
    """Options of local training."""

    lr: Positive
    momentum: Decay
    weight_decay: NonNegative
    lr_decay: Fraction
    optimiser: Optimiser | Solver
    epochs: Positive
    batch_size: Count | None
    lr_schedule: RateSchedule | None
    lr_schedule_in_round: RateSchedule | None
    clip_norm: Positive | None
    clip_value: Positive | None
    accumulate: Several | None
    augment: tuple[Augmentation, ...]
    class_shares: Literal["equal"] | tuple[Positive, ...] | None


class Common(TrainingOptions, total=False):
    """Keyword arguments of every recipe; see `averaged` for the defaults."""

    selection: Selection
    terms: tuple[Term, ...]
    memory: tuple[Memory, ...]
    personal_layers: PersonalLayers | None
    weighting: Weighting
    combine: Combine
    step: Step
    server_lr_schedule: RateSchedule | None
    ledgers: tuple[Ledger, ...]
    channel: Channel


def averaged(
    *,
    lr: Positive = 0.01,
    momentum: Decay = 0.0,
    weight_decay: NonNegative = 0.0,
    lr_decay: Fraction = 1.0,
    optimiser: Optimiser | Solver = "sgd",
    epochs: Positive = 1,
    batch_size: Count | None = 32,
    lr_schedule: RateSchedule | None = None,
    lr_schedule_in_round: RateSchedule | None = None,
    clip_norm: Positive | None = None,
    clip_value: Positive | None = None,
    accumulate: Several | None = None,
    augment: tuple[Augmentation, ...] = (),
    class_shares: Literal["equal"] | tuple[Positive, ...] | None = None,
    selection: Selection | None = None,
    terms: tuple[Term, ...] = (),
    memory: tuple[Memory, ...] = (),
    personal_layers: PersonalLayers | None = None,
    weighting: Weighting | None = None,
    combine: Combine | None = None,
    step: Step | None = None,
    server_lr_schedule: RateSchedule | None = None,
    ledgers: tuple[Ledger, ...] = (),
    channel: Channel | None = None,
) -> Algorithm:
    """Local training from the global model, then a weighted average: the basis of most recipes."""
    if lr_schedule is not None and lr_decay != 1:
        raise Invalid(
            f"lr_decay = {lr_decay:g} and lr_schedule = {lr_schedule!r} both set the rate of a round: give one"
        )
    solver = _solver(optimiser, lr=lr, momentum=momentum, weight_decay=weight_decay, lr_decay=lr_decay)
    if clip_norm is not None or clip_value is not None:
        solver = Clipped(solver=solver, norm=clip_norm, value=clip_value)
    if lr_schedule is not None or lr_schedule_in_round is not None:
        solver = Scheduled(solver=solver, rounds=lr_schedule, steps=lr_schedule_in_round)
    if accumulate is not None:
        solver = Accumulated(solver=solver, every=accumulate)
    work = Work(epochs=epochs, batch_size=batch_size, class_shares=class_shares)
    if server_lr_schedule is not None:
        step = ScheduledStep(schedule=server_lr_schedule, step=step or Replace())
    return refuse_misfits(
        Algorithm(
            selection=selection or Everyone(),
            client=LocalTraining(
                solver=solver,
                work=work,
                terms=terms,
                memory=memory,
                personal_layers=personal_layers,
                augment=augment,
            ),
            server=Averaging(
                weighting=weighting or ByExamples(),
                combine=combine or WeightedMean(),
                step=step or Replace(),
                ledgers=ledgers,
            ),
            channel=channel or Plain(),
        )
    )


def _solver(
    optimiser: Optimiser | Solver, *, lr: float, momentum: float, weight_decay: float, lr_decay: float
) -> Solver:
    """The named solver with the shared options; a solver given as a part has its own."""
    if optimiser is None:
        raise Invalid("optimiser = None is no optimiser: leave it out for plain SGD, or name one, such as 'adam'")
    if not isinstance(optimiser, str):
        return optimiser
    if optimiser == "sgd":
        return SGD(lr=lr, momentum=momentum, weight_decay=weight_decay, decay=lr_decay)
    if optimiser in ("adam", "adamw"):
        return Adam(lr=lr, weight_decay=weight_decay, decoupled=optimiser == "adamw")
    if optimiser == "rmsprop":
        return RMSprop(lr=lr, momentum=momentum, weight_decay=weight_decay)
    others = {"adagrad": Adagrad, "adadelta": Adadelta, "adamax": Adamax, "nadam": NAdam, "lion": Lion}
    return others[optimiser](lr=lr, weight_decay=weight_decay)


def recipe(build: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """Decorator of recipes: options are read and checked as in a config, and those without effect are refused."""
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
    """Return the algorithm; refuse it if its client expects what its server never sends, or the other way round."""
    client, server = algorithm.client, algorithm.server
    if not isinstance(client, LocalTraining) or not isinstance(server, Averaging):
        return algorithm
    told = [ledger.name for ledger in server.ledgers]
    if len(set(told)) < len(told):
        raise Invalid(f"ledgers holds {', '.join(told)}: no two may have one name")
    for part in (*client.terms, *client.memory):
        for name in part.reads_broadcast if isinstance(part, ReadsBroadcast) else ():
            if name not in told:
                raise Invalid(
                    f"{type(part).__name__} reads {name!r} in the broadcast, which no ledger of the server sends "
                    f"(ledgers: {', '.join(told) or 'none'}): add the ledger, or use a recipe that brings it along"
                )
    said = {name for part in client.memory if isinstance(part, AddsToReply) for name in part.adds_to_reply}
    for reader in (server.weighting, *server.ledgers):
        for name in read_by(reader):
            if name not in said:
                raise Invalid(
                    f"{type(reader).__name__} reads {name!r} in the replies, which no memory of the client adds: "
                    "add the memory, or use a recipe that brings it along"
                )
    return algorithm
