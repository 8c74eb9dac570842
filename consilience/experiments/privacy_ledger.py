"""What a private run has spent: written down before a round's model is seen by anyone."""

from __future__ import annotations

from dataclasses import replace

from consilience.core.capabilities import capability
from consilience.core.protocols import ServerRule
from consilience.core.rounds import Round
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.privacy import SpendsPrivacy, Spent, noise_for
from consilience.runs.folder import RunFolder


def refuse_overspending(server: ServerRule, start: Tree, *, clients: int, rounds: int) -> None:
    """Refuse, before anything starts, what would spend more than the budget or cannot be private at all."""
    private = capability(server, SpendsPrivacy)
    if private is None:
        return
    server.init(start, clients)
    spending, budget = private.spending, private.epsilon
    spending.epsilon(rounds)  # refuses to start where nobody could count
    try:
        private.refuse_overspending(rounds)
    except Spent as problem:
        assert budget is not None
        enough = noise_for(budget, rounds=rounds, rate=spending.rate, delta=spending.delta)
        raise Invalid(
            f"rounds = {rounds} would cost epsilon = {spending.epsilon(rounds):.4g}, and algorithm.epsilon = "
            f"{budget:g}: {spending.rounds_within(budget)} rounds fit, or "
            f"algorithm.noise = {enough:.4g} for all of them"
        ) from problem


def accounted(round: Round, server: ServerRule, folder: RunFolder) -> Round:
    """The round with the epsilon spent so far among its notes, after that stands in the folder.

    A round that is done again after a crash is the same to the last bit, so that it costs nothing more; what was once
    spent is never taken back.
    """
    private = capability(server, SpendsPrivacy)
    if private is None:
        return round
    spending, known = private.spending, folder.facts().get("privacy", {}).get("rounds", 0)
    known = max(known, round.number)
    terms = {
        "delta": spending.delta,
        "noise": spending.noise,
        "rate": spending.rate,
        "neighbours": "one client more",
    }
    folder.record(privacy={"rounds": known, "epsilon": spending.epsilon(known), **terms})
    return replace(round, notes={**round.notes, "epsilon": spending.epsilon(round.number)})
