"""Which algorithms a schedule can be learned for, and by which gradient."""

from __future__ import annotations

import dataclasses
from typing import Literal

from consilience.client.gradient_report import ReportedLoss
from consilience.client.local_training import LocalTraining
from consilience.client.paced_training import PacedTraining
from consilience.client.solvers import SGD
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import Buffers, KeepsLayers, QueriesBeforeSelection, capability
from consilience.core.protocols import Engine, HasTask
from consilience.core.settings import Invalid
from consilience.meta.unfolded import HoldsData
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.steps.plain import Replace
from consilience.server.protocols import Merges, uses_weights
from consilience.server.rules.paced_averaging import PacedAveraging
from consilience.server.rules.splitting import Splitting

Gradient = Literal["auto", "server", "reported", "autograd", "full"]


def choose_gradient(gradient: Gradient, algorithm: Algorithm, engine: Engine, loss: ReportedLoss = "task") -> Gradient:
    """The gradient method: the requested one if it is possible, or the cheapest possible one."""
    _refuse_unlearnable(algorithm)
    if loss != "task" and isinstance(engine, HasTask) and not engine.task.kind.class_per_row:
        raise Invalid(f"loss = {loss!r} compares with one-hot labels, but the task is {engine.task.kind.name}")
    reasons = {way: why_not(way, algorithm, engine) for way in ("server", "reported", "autograd")}
    if loss != "task" and not reasons["server"]:
        reasons["server"] = f"models tell the gradients of the training loss, not those of loss = {loss!r}"
    reasons["full"] = reasons["autograd"] or _outside_the_graph(algorithm)
    if gradient == "auto":
        for way in ("server", "reported", "autograd"):
            if not reasons[way]:
                return way
        raise Invalid(f"no gradient of the schedule can be had: {reasons['reported']}; {reasons['autograd']}")
    if reasons[gradient]:
        fitting = [way for way, reason in reasons.items() if not reason]
        raise Invalid(f"gradient = {gradient!r} cannot work: {reasons[gradient]}; what can: {', '.join(fitting)}")
    return gradient


def why_not(way: str, algorithm: Algorithm, engine: Engine) -> str:
    """Why a gradient method is not possible; "" if it is."""
    if way == "autograd":
        if not isinstance(engine, HoldsData):
            return f"{type(engine).__name__} does not hold the clients' rows in this process, so there is no graph"
        return ""
    server = algorithm.server
    if not isinstance(server, (Averaging, PacedAveraging)):
        return f"{type(server).__name__} does not simply take the weighted mean of the models it receives"
    if server.combine != WeightedMean() or server.step != Replace():
        return f"the server merges by {server.combine!r} and moves by {server.step!r}, not to the weighted mean"
    return _varied(algorithm) if way == "reported" else _not_plain(algorithm)


def _outside_the_graph(algorithm: Algorithm) -> str:
    """Why the graph does not contain everything that later rounds depend on."""
    if isinstance(algorithm.server, Splitting):
        return "the server stores each client's z as plain numbers, which no gradient flows through"
    return ""


def _varied(algorithm: Algorithm) -> str:
    """Why a report on the original rows does not match the rows used in training."""
    client = algorithm.client
    training = client.training if isinstance(client, PacedTraining) else client
    varied = isinstance(training, LocalTraining) and training.augment
    return (
        "clients train on rows that augment has varied, and would report gradients at the rows as they are"
        if varied
        else ""
    )


def plain_solver(algorithm: Algorithm) -> SGD:
    """The solver of a client whose gradients can be recovered from its model."""
    client = algorithm.client
    training = client.training if isinstance(client, PacedTraining) else client
    assert isinstance(training, LocalTraining) and isinstance(training.solver, SGD)
    return training.solver


def _not_plain(algorithm: Algorithm) -> str:
    """Why (w - w_k) / lr is not the sum of the client's minibatch gradients."""
    client = algorithm.client
    training = client.training if isinstance(client, PacedTraining) else client
    if not isinstance(training, LocalTraining):
        return f"the client is {type(client).__name__}, whose model does not tell the gradients that it met"
    solver = training.solver
    if not isinstance(solver, SGD) or solver.momentum or solver.weight_decay:
        return f"local steps are those of {solver!r}: only with plain SGD does a model tell the gradients that it met"
    if training.terms:
        names = ", ".join(type(term).__name__ for term in training.terms)
        return f"the local objective has the terms {names}, whose gradients are mixed into the model"
    return ""


def _refuse_unlearnable(algorithm: Algorithm) -> None:
    """Refuse algorithms without a computable gradient."""
    server = algorithm.server
    if not dataclasses.is_dataclass(server) or "weighting" not in {field.name for field in dataclasses.fields(server)}:
        raise Invalid(
            f"{type(server).__name__} has no weighting, so there are no aggregation weights to learn: choose an "
            "algorithm that averages with weights, such as fedavg or duw_fedavg"
        )
    if capability(server, Buffers) is not None:
        raise Invalid(f"{type(server).__name__} does not wait for a round's clients, so there is no table of rounds")
    merging = capability(server, Merges)
    if merging is not None and not uses_weights(merging.combine):
        raise Invalid(
            f"combine = {merging.combine!r} counts every reply the same: nothing to learn; choose an algorithm that "
            "averages with weights, such as fedavg"
        )
    if algorithm.channel != Plain():
        raise Invalid(
            f"channel = {algorithm.channel!r} changes the models on their way, so that what arrives does not tell the "
            "gradients: learn the schedule without a channel, then use it with one"
        )
    if capability(algorithm.selection, QueriesBeforeSelection) is not None:
        raise Invalid(f"{type(algorithm.selection).__name__} chooses by losses, which no gradient flows through")
    keeps = capability(algorithm.client, KeepsLayers)
    if keeps is not None and keeps.personal_layers is not None:
        raise Invalid(
            f"personal_layers = {keeps.personal_layers!r} keeps layers which the server's weights never reach: leave "
            "it out"
        )
