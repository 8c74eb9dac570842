"""Generations whose every byte depends on their round, to tell a whole one from a mix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from consilience.core.tree import flatten
from consilience.runs.checkpoint import Checkpoint, save


def state(round: int) -> dict[str, Any]:
    """Every byte depends on the round: a mix of two generations cannot pass for one."""
    generator = torch.Generator().manual_seed(round)
    server = {"w": torch.randn(4, 3, generator=generator), "b": torch.randn(3, generator=generator).bfloat16()}
    memory = {"c": torch.randn(2, 5, generator=generator, dtype=torch.float64), "none": {}}
    return {"server": {"model": server, "round": torch.tensor(round)}, "memory": memory}


def save_round(root: Path, round: int) -> Path:
    return save(root, round, state(round), {"round": round, "text": f"after {round}"})


def assert_whole(found: Checkpoint | None) -> int:
    """The round that was loaded, after checking that everything in it belongs to that round."""
    assert found is not None
    expected = state(found.round)
    assert found.facts == {"round": found.round, "text": f"after {found.round}"}
    assert list(found.trees) == list(expected)
    for name, tree in expected.items():
        flat, loaded = flatten(tree), flatten(found.trees[name])
        assert list(flat) == list(loaded)
        assert all(torch.equal(flat[path], loaded[path]) for path in flat)
    return found.round


def started(root: Path) -> Path:
    for round in (1, 2):
        save_round(root, round)
    return root
