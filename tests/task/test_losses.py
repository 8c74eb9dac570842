"""Losses per example, against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.task.kinds import LOSSES
from consilience.task.losses import (
    IGNORED,
    BinaryCrossEntropy,
    CrossEntropy,
    absolute_error,
    average,
    binary_cross_entropy,
    cross_entropy,
    huber,
    squared_error,
)


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


def test_cross_entropy_with_settings(draw: torch.Generator) -> None:
    """Weights, smoothing and ignored entries as PyTorch has them, in every layout; the mean is over what counts."""
    weights, logits = (0.5, 2.0, 1.0, 0.0), random(draw, 3, 5, 4)
    target = torch.randint(0, 4, (3, 5), generator=draw)
    target[0, 1:] = target[1, 2] = IGNORED
    target[2] = IGNORED
    options = {"weights": weights, "smoothing": 0.2, "ignored": IGNORED}
    by_torch = F.cross_entropy(
        logits.movedim(-1, 1),
        target,
        weight=torch.tensor(weights, dtype=torch.float64),
        label_smoothing=0.2,
        ignore_index=IGNORED,
        reduction="none",
    )
    wanted = torch.stack([by_torch[0, 0], by_torch[1, [0, 1, 3, 4]].mean(), torch.zeros((), dtype=torch.float64)])
    for layout, output in (("last", logits), ("first", logits.movedim(-1, 1))):
        got = CrossEntropy(layout=layout, **options)(output, target)  # type: ignore[arg-type]
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    shifted = torch.cat([torch.zeros(3, 1, dtype=torch.int64), target], 1)
    longer = torch.cat([logits, random(draw, 3, 1, 4)], 1)
    got = CrossEntropy(layout="next", **options)(longer, shifted)  # type: ignore[arg-type]
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    together = torch.vmap(CrossEntropy(layout="last", **options))  # type: ignore[arg-type]
    torch.testing.assert_close(together(logits.unsqueeze(0), target.unsqueeze(0))[0], wanted, rtol=1e-12, atol=1e-12)


def test_binary_cross_entropy_with_settings(draw: torch.Generator) -> None:
    logits, target = random(draw, 4, 3), torch.tensor([[0, 1, 1], [1, IGNORED, 0], [IGNORED] * 3, [1, 1, 1]])
    smooth = target.double() * 0.8 + 0.1
    each = F.binary_cross_entropy_with_logits(logits, smooth, reduction="none")
    labels = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    counts = (target != IGNORED).double()
    for per_label, factor in ((True, labels), (False, torch.where(target > 0, 4.0, 0.5))):
        weights = (1.0, 2.0, 3.0) if per_label else (0.5, 4.0)
        loss = BinaryCrossEntropy(weights=weights, per_label=per_label, smoothing=0.2, ignored=IGNORED)
        wanted = (each * factor * counts).nan_to_num().sum(1) / counts.sum(1).clamp(min=1)
        torch.testing.assert_close(loss(logits, target), wanted, rtol=1e-12, atol=1e-12)


def test_absolute_error_and_huber(draw: torch.Generator) -> None:
    made, wanted = 3 * random(draw, 5, 2), random(draw, 5, 2)
    torch.testing.assert_close(absolute_error(made, wanted), (made - wanted).abs().mean(1))
    expected = F.huber_loss(made, wanted, reduction="none").mean(1)
    torch.testing.assert_close(huber(made, wanted), expected)
