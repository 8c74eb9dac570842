"""Learning-rate schedules: hand-computed values, and the sequences of torch.optim.lr_scheduler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from consilience.core.rate_schedules import Cosine, Exponential, Linear, Milestones, RateSchedule, StepDecay, WarmUp
from consilience.core.settings import Invalid

LENGTH = 12


def factors(schedule: RateSchedule, length: int = LENGTH) -> list[float]:
    return [float(schedule.factor_at(torch.tensor(t))) for t in range(length)]


def of_torch(make: Any, length: int = LENGTH) -> list[float]:
    solver = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, found = make(solver), []
    for _ in range(length):
        found.append(solver.param_groups[0]["lr"])
        solver.step()
        scheduler.step()
    return found


def warm_cosine(solver: Any) -> Any:
    parts = [
        lr_scheduler.LinearLR(solver, start_factor=0.1, total_iters=4),
        lr_scheduler.CosineAnnealingLR(solver, T_max=8, eta_min=0.05),
    ]
    return lr_scheduler.SequentialLR(solver, parts, milestones=[4])


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Cosine(horizon=12), lambda s: lr_scheduler.CosineAnnealingLR(s, T_max=12)),
        (Cosine(horizon=12, floor=0.1), lambda s: lr_scheduler.CosineAnnealingLR(s, T_max=12, eta_min=0.1)),
        (Linear(horizon=7, floor=0.2), lambda s: lr_scheduler.LinearLR(s, 1.0, 0.2, total_iters=7)),
        (Linear(horizon=20), lambda s: lr_scheduler.PolynomialLR(s, total_iters=20, power=1.0)),
        (Exponential(factor=0.8), lambda s: lr_scheduler.ExponentialLR(s, gamma=0.8)),
        (StepDecay(every=3, factor=0.5), lambda s: lr_scheduler.StepLR(s, step_size=3, gamma=0.5)),
        (Milestones(at=(2, 9)), lambda s: lr_scheduler.MultiStepLR(s, milestones=[2, 9], gamma=0.1)),
        (WarmUp(length=5, start=1 / 3), lambda s: lr_scheduler.LinearLR(s, 1 / 3, total_iters=5)),
        (WarmUp(length=4, then=Cosine(horizon=8, floor=0.05)), warm_cosine),
    ],
    ids=lambda value: "torch" if callable(value) else str(value),
)
def test_a_schedule_is_the_one_of_torch(schedule: RateSchedule, make: Any) -> None:
    assert factors(schedule) == pytest.approx(of_torch(make), rel=1e-12, abs=1e-15)


def test_values_by_hand() -> None:
    assert factors(Cosine(horizon=4), 7) == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0, 0], abs=1e-15
    )
    assert factors(Linear(horizon=4, floor=0.5), 6) == [1, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert factors(WarmUp(length=2, start=0.5, then=StepDecay(every=2, factor=0.5)), 7) == [
        0.5, 0.75, 1, 1, 0.5, 0.5, 0.25,
    ]  # fmt: skip


def test_where_the_rate_ends() -> None:
    assert Cosine(horizon=5).zero_from == 5 and Cosine(horizon=5, floor=0.1).zero_from is None
    assert WarmUp(length=3, then=Linear(horizon=5)).zero_from == 8 and WarmUp(length=3).zero_from is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cosine(horizon=0), "Cosine.horizon = 0 is out of range"),
        (lambda: Cosine(horizon=3, floor=1.5), "Cosine.floor = 1.5 is out of range"),
        (lambda: Milestones(at=(3, 3)), "Milestones.at = .3, 3. must be ascending"),
        (lambda: Milestones(at=()), "must be ascending whole numbers, at least one"),
        (lambda: WarmUp(length=3, start=1.0), "WarmUp.start = 1 is no warm-up"),
        (lambda: Exponential(factor=0.0), "Exponential.factor = 0.0 is out of range"),
    ],
)
def test_bad_schedules_are_refused(make: Any, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        make()
