"""What a private run has spent: written down before a round's model is seen by anyone."""

from __future__ import annotations

from dataclasses import replace

from consilience.core.protocols import ServerRule
from consilience.core.rounds import Round
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.privacy import Spent, noise_for
from consilience.runs.folder import RunFolder
from consilience.server.rules.private_averaging import PrivateAveraging


def refuse_overspending(server: ServerRule, start: Tree, *, clients: int, rounds: int) -> None:
    """Refuse, before anything starts, what would spend more than the budget or cannot be private at all."""
    if not isinstance(server, PrivateAveraging):
        return
    server.init(start, clients)
    server.spending.epsilon(rounds)  # refuses to start where nobody could count
    try:
        server.refuse_overspending(rounds)
    except Spent as problem:
        assert server.epsilon is not None
        enough = noise_for(server.epsilon, rounds=rounds, rate=server.rate, delta=server.delta)
        raise Invalid(
            f"rounds = {rounds} would cost epsilon = {server.spending.epsilon(rounds):.4g}, and algorithm.epsilon = "
            f"{server.epsilon:g}: {server.spending.rounds_within(server.epsilon)} rounds fit, or "
            f"algorithm.noise = {enough:.4g} for all of them"
        ) from problem


def accounted(round: Round, server: ServerRule, folder: RunFolder) -> Round:
    """The round with the epsilon spent so far among its notes, after that stands in the folder.

    A round that is done again after a crash is the same to the last bit, so that it costs nothing more; what was once
    spent is never taken back.
    """
    if not isinstance(server, PrivateAveraging):
        return round
    spending, known = server.spending, folder.facts().get("privacy", {}).get("rounds", 0)
    known = max(known, round.number)
    terms = {
        "delta": spending.delta,
        "noise": spending.noise,
        "rate": spending.rate,
        "neighbours": "one client more",
    }
    folder.record(privacy={"rounds": known, "epsilon": spending.epsilon(known), **terms})
    return replace(round, notes={**round.notes, "epsilon": spending.epsilon(round.number)})
