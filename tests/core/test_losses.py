"""Losses per example, against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.core.kinds import LOSSES
from consilience.core.losses import average, binary_cross_entropy, cross_entropy, squared_error


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def random(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def test_cross_entropy(draw: torch.Generator) -> None:
    logits, classes = random(draw, 6, 4), torch.tensor([0, 3, 1, 1, 2, 0])
    got = cross_entropy(logits, classes)
    by_hand = -(logits.exp() / logits.exp().sum(1, keepdim=True)).log()[torch.arange(6), classes]
    assert got.shape == (6,)
    torch.testing.assert_close(got, by_hand, rtol=1e-12, atol=1e-12)
    assert torch.equal(got, F.cross_entropy(logits, classes, reduction="none"))


def test_cross_entropy_over_positions(draw: torch.Generator) -> None:
    logits, classes = random(draw, 3, 4, 5), torch.randint(0, 4, (3, 5), generator=draw)
    got = cross_entropy(logits, classes)
    expected = torch.stack([F.cross_entropy(logits[i : i + 1], classes[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3)])
def test_binary_cross_entropy(draw: torch.Generator, shape: tuple[int, ...]) -> None:
    logits = random(draw, *shape)
    target = torch.randint(0, 2, shape, generator=draw)
    got = binary_cross_entropy(logits, target)
    rate = torch.sigmoid(logits)
    by_hand = -(target * rate.log() + (1 - target) * (1 - rate).log())
    torch.testing.assert_close(got, by_hand.reshape(5, -1).mean(1), rtol=1e-12, atol=1e-12)


def test_binary_cross_entropy_of_one_column_against_flat_targets(draw: torch.Generator) -> None:
    logits, target = random(draw, 5, 1), torch.tensor([0, 1, 1, 0, 1])
    expected = F.binary_cross_entropy_with_logits(logits.squeeze(1), target.double(), reduction="none")
    assert torch.equal(binary_cross_entropy(logits, target), expected)


@pytest.mark.parametrize(("output", "target"), [((4,), (4,)), ((4, 1), (4,)), ((4, 3), (4, 3))])
def test_squared_error(draw: torch.Generator, output: tuple[int, ...], target: tuple[int, ...]) -> None:
    made, wanted = random(draw, *output), random(draw, *target)
    got = squared_error(made, wanted)
    assert got.shape == (4,)
    torch.testing.assert_close(got, (made.reshape(4, -1) - wanted.reshape(4, -1)).square().mean(1))
    torch.testing.assert_close(got.mean(), F.mse_loss(made.reshape(target), wanted))


def test_losses_stay_finite_for_huge_logits() -> None:
    huge = torch.tensor([[1e4, -1e4]], dtype=torch.float64)
    assert cross_entropy(huge, torch.tensor([1])).item() == 2e4
    assert binary_cross_entropy(huge[:, :1], torch.tensor([0])).item() == 1e4


def test_average_counts_live_slots_only() -> None:
    values, mask = torch.tensor([1.0, 2.0, 99.0]), torch.tensor([1.0, 1.0, 0.0])
    assert average(values, mask).item() == 1.5
    assert average(values, None).item() == 34.0
    assert average(values, torch.zeros(3)).item() == 0.0


def test_names() -> None:
    assert set(LOSSES) == {"cross_entropy", "binary_cross_entropy", "squared_error", "absolute_error", "huber"}
    assert LOSSES["cross_entropy"] is cross_entropy and LOSSES["binary_cross_entropy"] is binary_cross_entropy
