"""Which lane runs a group of clients, and how."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from consilience.core.settings import Checked, Count

LaneName = Literal["auto", "batched", "batched-matmul", "streams", "serial"]


@dataclass(frozen=True, kw_only=True)
class LaneChoice(Checked):
    """How groups run; "auto" and None are measured on the first round.

    "batched" is one vmapped step for all clients, "batched-matmul" the same with convolutions as matrix products,
    "streams" clients side by side, "serial" one after another.
    """

    lane: LaneName = "auto"
    clients_at_once: Count | None = None
    compile: bool | None = None

    @functools.cached_property
    def resolved(self) -> dict[str, Any]:
        """What is decided by now, under the names of the settings."""
        known: dict[str, Any] = {"clients_at_once": self.clients_at_once, "compile": self.compile}
        known = {key: value for key, value in known.items() if value is not None}
        return known if self.lane == "auto" else {"lane": self.lane, **known}
