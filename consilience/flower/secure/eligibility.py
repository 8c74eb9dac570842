"""Which runs can use secure sums; others are refused with the reason before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from consilience.channel import Chain, Clip, Noise, Plain
from consilience.core.algorithm import Algorithm, names_of_readers
from consilience.core.capabilities import PostTrainingPass, QueriesBeforeSelection, capability
from consilience.core.protocols import Channel, ServerRule
from consilience.core.screening import Limits
from consilience.core.settings import Invalid
from consilience.flower.secure.terms import FEWEST, MODULUS, SecureTerms
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.weighting.by_size import ByExamples, UniformWeights
from consilience.server.rules.private_averaging import PrivateAveraging
from consilience.server.rules.private_sum import PrivateSum

WEIGHTS: Mapping[type, Any] = {ByExamples: "examples", UniformWeights: "uniform"}
SUMMABLE = (Plain, Clip, Noise)  # channels whose server half is the same for a sum as for each reply
ON = "deploy.secure_aggregation = true"


def secure_terms(
    algorithm: Algorithm,
    *,
    clip: float,
    levels: int,
    threshold: float,
    neighbours: int | None = None,
    clear_tests: bool | None = None,
) -> SecureTerms:
    """The terms of secure sums of this algorithm's replies; `Invalid`, with the reason, if there can be none.

    clear_tests: None: unless the sums are private.
    """
    server = algorithm.server
    if isinstance(server, PrivateSum):
        _refuse_questions(algorithm)
        return SecureTerms(
            weights="uniform",
            clip=clip,
            levels=levels,
            threshold=threshold,
            neighbours=neighbours,
            noise=server.shares,
            clear_tests=bool(clear_tests),
        )
    _refuse_readers(server)
    if not isinstance(server, Averaging) or type(server.weighting) not in WEIGHTS:
        part = server.weighting if isinstance(server, Averaging) else server
        raise Invalid(
            f"{ON} gives the server one mean, by example counts or uniform, and {type(part).__name__} needs replies "
            "weighed in another way, of another age or sent to each client alone: turn it off, or use an algorithm "
            "such as fedavg"
        )
    weights = WEIGHTS[type(server.weighting)]
    if server.ledgers and weights != "uniform":
        names = " and ".join(type(ledger).__name__ for ledger in server.ledgers)
        raise Invalid(f"{ON} gives the server one mean, and {names} needs another one: use uniform weights")
    _refuse_questions(algorithm)
    return SecureTerms(
        weights=weights,
        clip=clip,
        levels=levels,
        threshold=threshold,
        neighbours=neighbours,
        clear_tests=clear_tests is not False,
    )


def with_noise_shares(
    algorithm: Algorithm, *, clients: int, nodes: int, colluding: int, clip: float, threshold: float
) -> Algorithm:
    """The algorithm; in a private one, clients clip and add the noise, since the server cannot clip masked replies.

    nodes: the least number of nodes that begin a sum.
    """
    server = algorithm.server
    if not isinstance(server, PrivateAveraging):
        return algorithm
    needed = SecureTerms(threshold=threshold).needed(nodes)
    if needed <= colluding:
        raise Invalid(
            f"deploy.secure_colluding = {colluding}: of {nodes} nodes {needed} must stay, which may all be among them. "
            "Raise deploy.secure_threshold, or deploy.min_available"
        )
    return replace(
        algorithm,
        server=PrivateSum.of(
            server,
            clients=clients,
            colluding=colluding,
            most=lambda shares: shares.most_bound(clip=clip, needed=needed),
        ),
    )


def refuse_settings(
    *,
    clients: int,
    min_available: int | None,
    levels: int,
    limits: Limits,
    tests_each_model: bool,
    validates: bool,
    clear_tests: bool,
) -> None:
    """Refuse settings that need single replies, too few nodes, or sums that would not fit."""
    for key, count in (("deploy.clients", clients), ("deploy.min_available", min_available)):
        if count is not None and count < FEWEST:
            raise Invalid(f"{key} = {count}, but {ON} needs at least {FEWEST} clients, each on its own node")
    if clients * levels >= MODULUS:
        most = (MODULUS - 1) // clients
        raise Invalid(
            f"deploy.secure_levels = {levels} is too much for a sum of {clients} clients, which must stay below 2^32: "
            f"at most {most}"
        )
    if limits.max_norm is not None:
        raise Invalid(
            f"limits.max_norm = {limits.max_norm:g} measures each update at the server, which {ON} hides: clip at the "
            "client with channel = {name = 'clip', ...}"
        )
    if tests_each_model:
        raise Invalid(
            f"evaluation.local = true tests each client's model at the server, which {ON} hides: turn one off"
        )
    if validates and not clear_tests:
        raise Invalid(
            "[validation] asks clients how a model does on rows that they hold back, and these results are sent "
            "without noise, which deploy.clear_tests = false (the default of private sums) rules out: leave one out"
        )


def refuse_shared_nodes(shares: Iterable[list[int]]) -> None:
    """Refuse nodes with several clients."""
    for share in shares:
        if len(share) != 1:
            raise Invalid(f"{ON} needs one client on each SuperNode, and one of them would hold clients {share}")


def _refuse_readers(server: ServerRule) -> None:
    if server.needs_each_reply:
        raise Invalid(
            f"{ON} delivers only the sum of the replies, but "
            f"{names_of_readers(server)} reads each reply: turn it off, or use an "
            "algorithm that does not, such as fedavg"
        )


def _refuse_questions(algorithm: Algorithm) -> None:
    """Refuse parts other than the server rule that read single clients' replies."""
    if capability(algorithm.selection, QueriesBeforeSelection) is not None:
        name = type(algorithm.selection).__name__
        raise Invalid(f"{ON} hides each client's loss, by which {name} chooses: use another selection")
    if capability(algorithm.client, PostTrainingPass) is not None:
        name = type(algorithm.client).__name__
        raise Invalid(f"{ON} hides the trained models that the server would send back for {name}")
    for channel in _inside(algorithm.channel):
        if not isinstance(channel, SUMMABLE):
            raise Invalid(
                f"{ON} sums numbers, and channel {type(channel).__name__} sends something else or acts on each reply "
                "at the server: only plain, clip and noise can be summed"
            )


def _inside(channel: Channel) -> tuple[Channel, ...]:
    return channel.channels if isinstance(channel, Chain) else (channel,)
