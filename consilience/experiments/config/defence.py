"""`defence = "auto"`: the bounds and the robust rule for a declared number of untrusted members."""

from __future__ import annotations

from dataclasses import replace

from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import capability
from consilience.core.screening import Limits
from consilience.core.settings import Invalid
from consilience.privacy import SpendsPrivacy
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.weighting.agreement import AgreementWeights
from consilience.server.protocols import uses_weights

GROWTH = 4.0  # maximal update norm over the running median; above AgreementWeights.far, where updates are left out


def defended(algorithm: Algorithm, untrusted: int) -> Algorithm:
    """The algorithm with weights that leave out clients whose updates disagree with the others."""
    server = algorithm.server
    if capability(server, SpendsPrivacy) is not None:
        raise Invalid(
            "defence = 'auto' weighs replies by what the others sent, so that one client's rows decide how much "
            "another counts, for which no privacy proof is known: leave it out. dp_fedavg clips every update, so f "
            "hostile members move a round's model by at most 2 f bound / (rate x clients)"
        )
    if not isinstance(server, Averaging) or not uses_weights(server.combine):
        what = type(server).__name__ if not isinstance(server, Averaging) else f"combine = {server.combine!r}"
        raise Invalid(
            f"defence = 'auto' lowers the weights of single replies, and {what} has none: "
            "use an algorithm that averages, or leave it out"
        )
    return replace(
        algorithm, server=replace(server, weighting=AgreementWeights(inner=server.weighting, untrusted=untrusted))
    )


def bounded(limits: Limits) -> Limits:
    """The limits, with a bound on the update norm unless one is given."""
    return limits if limits.max_growth is not None else replace(limits, max_growth=GROWTH)


def check(defence: str | None, untrusted: int | None) -> None:
    """Refuse one of the two settings without the other."""
    if (defence is None) != (untrusted is None):
        raise Invalid(
            "defence = 'auto' and untrusted, the number of members that may be hostile, belong together: give both"
        )
