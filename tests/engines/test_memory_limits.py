"""When memory runs out, groups get smaller and the result stays."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from consilience.algorithms.fedavg import fedavg
from consilience.core.rounds import run
from consilience.engines.vectorised.lanes.cpu import Batched


def limit(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let groups of more than `most` clients run out of memory."""
    seen: list[int] = []
    fold = Batched.fold

    def small(self: Any, program: Any, carry: Any, context: Any, plan: Any, store: Any) -> Any:
        seen.append(len(plan.steps))
        if len(plan.steps) > most:
            raise torch.OutOfMemoryError("no more")
        return fold(self, program, carry, context, plan, store)

    monkeypatch.setattr(Batched, "fold", small)
    return seen


def test_groups_are_halved_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, expected = run(fedavg(batch_size=4), tiny.engine(lane="batched"), rounds=2)
    seen = limit(monkeypatch, most=1)
    engine = tiny.engine(lane="batched")
    *_, got = run(fedavg(batch_size=4), engine, rounds=2)
    assert seen[:3] == [5, 2, 1] and seen[3:] == [1] * (len(seen) - 3)
    assert engine.choice.clients_at_once == 1
    assert tiny.gap(got.model, expected.model) <= 1e-12


def test_a_single_client_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, most=0)
    with pytest.raises(torch.OutOfMemoryError):
        list(run(fedavg(batch_size=4), tiny.engine(lane="batched"), rounds=1))
