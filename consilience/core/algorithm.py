"""An algorithm: selection, client rule, channel and server rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from consilience.core import notebook
from consilience.core.capabilities import ChecksTask, PreparesTask, SumsOnly, capability
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.protocols import Channel, ClientRule, Selection, ServerRule
from consilience.core.settings import Invalid, check
from consilience.core.task import Task
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The channel that sends replies unchanged."""

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The reply, unchanged."""
        return reply, memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """The cohort, unchanged."""
        return cohort


@dataclass(frozen=True, kw_only=True, repr=False)
class Algorithm:
    """The four parts of an algorithm: client selection, client rule, channel (applied to replies) and server rule."""

    selection: Selection
    client: ClientRule
    server: ServerRule
    channel: Channel = field(default_factory=Plain)

    def __post_init__(self) -> None:
        """Refuse what is no part, and a channel that delivers only a sum if the server rule reads single replies."""
        check(self)
        sums = capability(self.channel, SumsOnly)
        if sums is not None and sums.sums_only and self.server.needs_each_reply:
            raise Invalid(
                f"channel {type(self.channel).__name__} delivers only the sum of the replies, but "
                f"{names_of_readers(self.server)} reads each reply: change one of the two"
            )

    def spelled(self) -> str:
        """A Python expression of an equal algorithm, with every setting of every part, defaults included."""
        return f"Algorithm({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in fields(self))})"

    def __repr__(self) -> str:
        for depth in (9, 1, 0):  # a long one loses the settings of inner parts first
            shown = [part for _, part in self._brief(depth) if part != "Plain"]
            if len(text := f"Algorithm({', '.join(shown)})") <= notebook.LINE:
                break
        return notebook.line(text)

    def _repr_html_(self) -> str:
        return notebook.table("Algorithm", self._brief())

    def _brief(self, depth: int = 9) -> list[tuple[str, str]]:
        return [(each.name, notebook.brief(getattr(self, each.name), depth)) for each in fields(self)]

    def prepared(self, task: Task) -> Task:
        """The task in the form that this algorithm trains; raises `Invalid` if a part does not support it."""
        for part in (self.client, self.server):
            checking = capability(part, ChecksTask)
            if checking is not None:
                checking.check_against(task)
        preparing = capability(self.client, PreparesTask)
        return task if preparing is None else preparing.prepare(task)


@runtime_checkable
class _LooksAtReplies(Protocol):
    """A server rule, or a part of one, that may read single replies."""

    @property
    def needs_each_reply(self) -> bool: ...


def names_of_readers(server: ServerRule) -> str:
    """Names of the parts of a server rule that read single replies."""
    return " and ".join(dict.fromkeys(type(part).__name__ for part in _readers(server)))


def _readers(part: object) -> Iterator[object]:
    """The innermost parts that read single replies."""
    held = [getattr(part, each.name) for each in fields(part)] if is_dataclass(part) else []
    flat = [inner for value in held for inner in (value if isinstance(value, tuple) else (value,))]
    inside = [inner for inner in flat if isinstance(inner, _LooksAtReplies) and inner.needs_each_reply]
    for inner in inside:
        yield from _readers(inner)
    if not inside:
        yield part
