"""Steps of the CPU lanes: layouts of gradients, steps outside Python's lock, memory that is kept."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.core.rounds import run
from consilience.core.tree import Tree
from consilience.engines.compiler.layouts import lay_out_gradients
from consilience.engines.compiler.trace import trace
from consilience.engines.vectorised import arithmetic, program

aten = torch.ops.aten
NEVER = 10**9


def channels_last(*shape: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
    return values.contiguous(memory_format=torch.channels_last)


def pooled(name: str, picture: Tensor) -> Tensor:
    if name == "max":
        return torch.max_pool2d(picture, 2)
    if name == "avg":
        return torch.nn.functional.avg_pool2d(picture, 3, 1)
    return picture.relu() if name == "relu" else torch.nn.functional.adaptive_avg_pool2d(picture, 2)


@pytest.mark.parametrize("name", ["max", "avg", "relu", "adaptive"])
def test_gradients_of_pictures_are_laid_out_like_them_and_keep_their_bits(name: str) -> None:
    picture = channels_last(4, 6, 8, 8)
    weights = torch.randn(pooled(name, picture).flatten(1).shape[1], 5, generator=torch.Generator().manual_seed(1))

    def gradient(given: list[Tensor]) -> list[Tensor]:
        at = given[0].detach().requires_grad_()
        with torch.enable_grad():
            value = (pooled(name, at).flatten(1) @ weights).square().sum()
        return list(torch.autograd.grad(value, [at]))

    traced = trace(gradient, [picture])
    (before,) = traced([picture])
    lay_out_gradients(traced)
    (found,) = (node for node in traced.graph.nodes if "backward" in str(node.target))
    assert found.args[0].target is aten.contiguous.default
    (after,) = traced([picture])
    assert torch.equal(after, before) and after.is_contiguous(memory_format=torch.channels_last)


def test_contiguous_pictures_stay_as_they_are() -> None:
    def gradient(given: list[Tensor]) -> list[Tensor]:
        at = given[0].detach().requires_grad_()
        with torch.enable_grad():
            return list(torch.autograd.grad(torch.max_pool2d(at, 2).square().sum(), [at]))

    traced = trace(gradient, [channels_last(2, 3, 4, 4).contiguous()])
    lay_out_gradients(traced)
    assert aten.contiguous.default not in {node.target for node in traced.graph.nodes}


def wide() -> nn.Module:
    """A dense layer over so many values that a matrix product adds them in several parts."""
    return tiny.seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 256, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256 * 36, 16),
            nn.ReLU(),
            nn.Linear(16, tiny.CLASSES),
        )
    )


def trained(model: Any, hot: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tree, list[Any]]:
    monkeypatch.setattr(program, "HOT", hot)
    engine = tiny.engine(model, lane="streams", dtype="float32")
    *_, last = run(fedavg(batch_size=4, lr=0.05), engine, rounds=2, seed=1)
    (made,) = engine._programs.values()
    return last.model, list(made.one.traced.values())


@pytest.mark.parametrize("model", [tiny.mlp, tiny.convnet, tiny.plain_convnet, wide])
def test_steps_outside_the_lock_give_the_bits_of_untraced_ones(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 too: a resumed run may trace a step later than an undisturbed one."""
    plain, _ = trained(model, NEVER, monkeypatch)
    found, steps = trained(model, 0, monkeypatch)
    assert steps and all(step._script is not None for step in steps)
    assert tiny.same(found, plain)


class Allocator:
    """Notes what would be set in the C library."""

    def __init__(self) -> None:
        self.options: dict[int, int] = {}
        self.trimmed = 0

    def mallopt(self, option: int, value: int) -> int:
        self.options[option] = value
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.trimmed += 1
        return 1


def test_freed_memory_is_kept_as_long_as_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # engines of other tests, which release the memory, too
    library = Allocator()
    monkeypatch.setattr(arithmetic, "_allocator", lambda: library)
    engine = tiny.engine()
    assert not library.options
    for _ in run(fedavg(batch_size=4), engine, rounds=2):
        assert library.options == arithmetic._KEEPING and not library.trimmed
    del engine, _
    gc.collect()
    assert library.options == arithmetic._SYSTEM and library.trimmed == 1
