"""An engine without data, for schedules that can be followed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort, WaitPolicy


class Script:
    """Client k takes `seconds[k]` and sends the one-number model it was sent plus `gains[k]`."""

    def __init__(self, seconds: list[float], gains: list[float], wait_policy: WaitPolicy | None = None) -> None:
        self._seconds, self._gains = np.array(seconds), torch.tensor(gains, dtype=torch.float64)
        self.wait_policy = wait_policy or WaitPolicy()
        self.sizes = np.ones(len(seconds), dtype=np.int64)

    def start(self) -> tree.Tree:
        return {"params": {"w": torch.zeros(1, dtype=torch.float64)}, "buffers": {}}

    def available(self, round: int, seed: int) -> np.ndarray:
        return np.ones(len(self.sizes), dtype=bool)

    def seconds(self, client: Any, channel: Any, broadcast: Broadcast, ids: np.ndarray, **when: int) -> np.ndarray:
        return self._seconds[ids]

    def exchange(self, client: Any, channel: Any, broadcast: Broadcast, ids: np.ndarray, **when: int) -> Cohort:
        model = {**broadcast.shared, **broadcast.personal}["model"]["params"]["w"]
        ended = model.expand(len(ids), 1) + self._gains[torch.from_numpy(ids)].unsqueeze(1)
        return Cohort(
            reply={"model": {"params": {"w": ended}, "buffers": {}}},
            ids=ids,
            examples=torch.ones(len(ids), dtype=torch.float64),
            steps=np.ones(len(ids), dtype=np.int64),
            round=when["round"],
        )

    def recall(self) -> tree.Tree:
        return {}

    def restore(self, memory: tree.Tree) -> None:
        pass
