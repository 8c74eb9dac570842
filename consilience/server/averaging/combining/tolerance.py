"""The number of faulty replies that a robust rule tolerates, and the number of replies it needs."""

from __future__ import annotations

from typing import Annotated

from consilience.core.settings import Invalid, Range, Whole

Faulty = Whole | Annotated[float, Range(least=0, below=0.5)]
"""A number of replies, or a share of those that arrive (0.2 of 14 is 2)."""


def faulty(f: Faulty, replies: int) -> int:
    """The number of faulty replies for a number or share `f`; a share is rounded down."""
    return f if isinstance(f, int) else int(f * replies + 1e-9)  # 0.3 * 10 must be 3, not 2.999


def require(rule: str, f: Faulty, replies: int, *, times: int, plus: int) -> int:
    """The number of faulty replies, if n >= times f + plus; with f = 0 there is nothing to defend against."""
    number = faulty(f, replies)
    needed = times * number + plus
    if number and replies < needed:
        share = "" if isinstance(f, int) else f" (a share of {f:g})"
        raise Invalid(
            f"{rule} with f = {number}{share} needs n >= {times}f + {plus} = {needed} replies, but n = {replies}: "
            "lower f, or let more clients take part"
        )
    return number
