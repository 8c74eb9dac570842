"""Why a lane cannot run a model, or runs it slowly: torch's message in a line, with the operation and what to do."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Iterator

from consilience.core.settings import Invalid

_KNOWN = (
    (r"Batching rule not implemented for (\S+?)[;,. ]", "torch has no rule that batches {} over clients"),
    (r"autograd\.Function with functorch", "an autograd.Function without setup_context and vmap rules"),
    (r"\.item\(\)|value was read out of a tensor|data-dependent", "it reads a value out of a tensor (.item(), `if`)"),
    (r"vmap: (.*?)(?:\. |$)", "{}"),
)
_LOOPS = re.compile(r"batching rule for (\S+?)\. ")


def reason(problem: Exception) -> str:
    """Why a lane failed, in one line."""
    text = " ".join(str(problem).split())
    for pattern, words in _KNOWN:
        found = re.search(pattern, text)
        if found:
            return words.format(*found.groups())
    return f"{type(problem).__name__}: {text[:200]}"


def forget_values(problem: BaseException) -> None:
    """Clear the local variables that an exception keeps: a failed trial's tensors would stay on the device."""
    if problem.__traceback__ is not None:
        problem.__traceback__ = problem.__traceback__.tb_next  # the caller's frame is in use
    found: BaseException | None = problem
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


def refuse_unbatched(problem: RuntimeError, lane: str) -> None:
    """Raise `Invalid` in place of torch's error about a model that cannot be batched over clients; ignore others."""
    if lane.startswith("batched") and re.search(r"\bvmap\b|Batching rule|functorch", str(problem)):
        raise Invalid(
            f"lane = {lane!r} cannot run this model: {reason(problem)}. Use lane = 'auto', or write that part with "
            "plain tensor operations, whose shapes and steps do not depend on values"
        ) from problem


@contextlib.contextmanager
def noting_loops(into: set[str]) -> Iterator[None]:
    """Collect the operations that vmap runs once for each client because it has no rule for them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for one in caught:
        found = _LOOPS.search(str(one.message) + " ")
        if found:
            into.add(found.group(1))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def report(lane: str, stopped: dict[str, str], loops: set[str]) -> None:
    """Warn once why the run is slower than it could be."""
    for name, why in stopped.items():
        warnings.warn(
            f"lane {name!r} cannot run this model: {why}. Clients run in lane {lane!r}, which may be slower; to batch "
            "them, write that part with plain tensor operations, whose shapes and steps do not depend on values",
            stacklevel=2,
        )
    if loops and lane.startswith("batched"):
        names = ", ".join(sorted(loops))
        warnings.warn(
            f"torch has no batching rule for {names}: lane {lane!r} runs it once for each client", stacklevel=2
        )
