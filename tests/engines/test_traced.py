"""Functions of trees that are traced once their shapes recur."""

from __future__ import annotations

import pytest
import torch

from consilience.core.tree import Tree
from consilience.engines.vectorised import traced
from consilience.engines.vectorised.traced import Traced


def test_shapes_that_recur_are_traced_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "HOT", 2)
    calls = []

    def double(values: Tree) -> tuple[Tree, torch.Tensor]:
        calls.append(len(values["x"]))
        return {"x": values["x"] * 2}, values["x"].sum()

    run = Traced(double)
    for times in range(5):
        for length in (3, 4) if times < 2 else (3,):
            x = torch.arange(float(length)) + times
            doubled, total = run({"x": x})
            assert torch.equal(doubled["x"], 2 * x) and float(total) == float(x.sum())
    assert calls == [3, 4, 3, 4, 3]  # twice each as it is, then the trace of the one that came again
    assert len(run._traced) == 1
