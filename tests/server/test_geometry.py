"""Distances and angles between models, against direct norms in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from consilience.core.settings import Invalid
from consilience.server.geometry.geometry import Geometry, cosines, measure, measure_updates


def split(models: np.ndarray, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """[m, d] -> parameters of several shapes, one of them 0-d per model."""
    stacked = torch.from_numpy(models).to(dtype)
    cut = max(1, stacked.shape[1] // 2)
    return {"scale": stacked[:, 0], "a": stacked[:, 1:cut], "b": stacked[:, cut:].unsqueeze(-1)}


def measured(models: np.ndarray, anchor: np.ndarray, dtype: torch.dtype = torch.float64) -> Geometry:
    return measure(split(models, dtype), {name: value[0] for name, value in split(anchor[None], dtype).items()})


def distances(models: np.ndarray) -> np.ndarray:
    """Direct: one subtraction and one norm per pair, scaled against overflow."""
    wide = models.astype(np.float64)
    differences = wide[:, None] - wide[None]
    largest = max(float(np.abs(differences).max()), 1e-300)
    return largest * np.linalg.norm(differences / largest, axis=2)


def assert_geometry(models: np.ndarray, anchor: np.ndarray, tolerance: float = 1e-12) -> None:
    got = measured(models, anchor)
    expected = distances(models)
    np.testing.assert_allclose(got.distance.numpy(), expected, rtol=tolerance, atol=0)
    np.testing.assert_allclose(got.movement.numpy(), np.linalg.norm(models - anchor, axis=1), rtol=tolerance, atol=0)
    between, to_anchor = cosines(got, list(range(len(models))))
    lengths = np.linalg.norm(models, axis=1)
    np.testing.assert_allclose(between.numpy(), models @ models.T / np.outer(lengths, lengths), rtol=0, atol=tolerance)
    np.testing.assert_allclose(
        to_anchor.numpy(), models @ anchor / (lengths * np.linalg.norm(anchor)), rtol=0, atol=tolerance
    )


@given(st.integers(2, 8), st.integers(3, 60), st.integers(0, 2**31), st.sampled_from([1e-8, 1e-3, 1.0, 1e4]))
def test_random_models(count: int, size: int, seed: int, scale: float) -> None:
    draw = np.random.default_rng(seed)
    assert_geometry(scale * draw.normal(size=(count, size)), scale * draw.normal(size=size))


@given(st.integers(2, 8), st.integers(3, 200), st.integers(0, 2**31), st.sampled_from([1e-3, 1e-6, 1e-9]))
def test_nearly_equal_models_lose_no_digits(count: int, size: int, seed: int, spread: float) -> None:
    """Like fine-tuned networks: the naive |a|^2 + |b|^2 - 2ab would be all noise at 1e-9."""
    draw = np.random.default_rng(seed)
    anchor = draw.normal(size=size)
    models = anchor * (1 + spread * draw.normal(size=(count, size)))
    got = measured(models, anchor)
    np.testing.assert_allclose(got.distance.numpy(), distances(models), rtol=1e-10, atol=0)
    np.testing.assert_allclose(got.movement.numpy(), np.linalg.norm(models - anchor, axis=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("outlier", [0, 1, 5])
@pytest.mark.parametrize("far", [1.0, 1e3, 1e6])
def test_nearly_equal_models_beside_an_outlier(outlier: int, far: float) -> None:
    draw = np.random.default_rng(0)
    anchor = draw.normal(size=1003)
    models = anchor * (1 + 1e-9 * draw.normal(size=(6, 1003)))
    models[outlier] = far * draw.normal(size=1003)
    got = measured(models, anchor).distance.numpy()
    np.testing.assert_allclose(got, distances(models), rtol=1e-6, atol=0)


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("far", [1e6, 1e9, 1e12])
def test_one_huge_model_does_not_spoil_the_others_angles(place: int, far: float) -> None:
    draw = np.random.default_rng(1)
    anchor = draw.normal(size=40)
    models = anchor + 0.1 * draw.normal(size=(4, 40))
    models[place] *= far
    between, to_anchor = cosines(measured(models, anchor), [0, 1, 2, 3])
    lengths = np.linalg.norm(models, axis=1)
    np.testing.assert_allclose(between.numpy(), models @ models.T / np.outer(lengths, lengths), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        to_anchor.numpy(), models @ anchor / (lengths * np.linalg.norm(anchor)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("copies", [[0, 1], [0, 1, 2, 3, 4], [1, 2], [2, 4]])
def test_identical_models_are_at_distance_exactly_zero(copies: list[int]) -> None:
    draw = np.random.default_rng(0)
    models = draw.normal(size=(5, 777))
    models[copies] = models[copies[0]]
    got = measured(models, draw.normal(size=777)).distance
    for i in copies:
        for j in copies:
            assert float(got[i, j]) == 0.0
    torch.testing.assert_close(got, got.T, rtol=1e-14, atol=0)
    others = [k for k in range(5) if k not in copies]
    assert all(float(got[k, copies[0]]) > 1 for k in others)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e200), (torch.float64, 1e-200)])
def test_extreme_entries_neither_overflow_nor_vanish(dtype: torch.dtype, size: float) -> None:
    draw = np.random.default_rng(0)
    unit = draw.normal(size=(4, 30))
    anchor = draw.normal(size=30)
    models = torch.from_numpy(size * unit).to(dtype).double().numpy()
    got = measured(models, size * anchor, dtype)
    np.testing.assert_allclose(got.distance.numpy(), distances(models), rtol=1e-12)
    between, to_anchor = cosines(got, [0, 1, 2, 3])
    lengths = np.linalg.norm(unit, axis=1)
    expected = unit @ unit.T / np.outer(lengths, lengths)
    np.testing.assert_allclose(between.numpy(), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)
    assert bool(to_anchor.isfinite().all())


def test_equal_huge_vectors_have_cosine_one() -> None:
    """torch's own cosine in float32 says 0."""
    models = np.full((2, 8), 1e30)
    between, to_anchor = cosines(measured(models, models[0], torch.float32), [0, 1])
    np.testing.assert_allclose(between.numpy(), 1, rtol=0, atol=1e-15)
    np.testing.assert_allclose(to_anchor.numpy(), 1, rtol=0, atol=1e-15)


def test_half_precision_is_measured_in_float64() -> None:
    models = np.full((2, 4), 200.0)
    models[1] = -200.0
    got = measured(models, np.zeros(4), torch.float16)
    assert got.distance[0, 1].item() == 800.0 and got.movement.tolist() == [400.0, 400.0]


@pytest.mark.parametrize("size", [1e-42, 1e-20, 1.0, 1e30])
@pytest.mark.parametrize("take", [measure, measure_updates])
def test_single_precision_is_measured_to_the_same_bits_as_its_copy_in_float64(take: Any, size: float) -> None:
    """Only the copy's entries are scaled before they are multiplied."""
    draw = np.random.default_rng(0)
    models = draw.normal(size=(6, 40))
    models[3] = models[1] * (1 + 1e-6)
    models[4] *= 1e5
    stacked = split(size * models, torch.float32)
    anchor = {name: value[0] for name, value in split(size * draw.normal(size=(1, 40)), torch.float32).items()}
    double = take({n: v.double() for n, v in stacked.items()}, {n: v.double() for n, v in anchor.items()})
    assert all(torch.equal(one, other) for one, other in zip(take(stacked, anchor), double))


def test_cosines_stay_within_minus_one_and_one() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        row = draw.normal(size=7)
        between, to_anchor = cosines(measured(np.stack([row, 3 * row, -row]), row), [0, 1, 2])
        assert float(between.abs().max()) <= 1 and float(to_anchor.abs().max()) <= 1


def test_zero_vectors_are_refused() -> None:
    models = np.ones((3, 4))
    with pytest.raises(Invalid, match="the global model is all zeros, so its cosine similarity is undefined"):
        cosines(measured(models, np.zeros(4)), [0, 1, 2])
    models[1] = 0
    with pytest.raises(Invalid, match=r"the model of clients \[8\] is all zeros"):
        cosines(measured(models, np.ones(4)), [7, 8, 9])


def test_inputs_are_not_modified() -> None:
    models, anchor = split(np.ones((3, 6))), {n: v[0] for n, v in split(np.ones((1, 6))).items()}
    before = {n: v.clone() for n, v in models.items()}
    measure(models, anchor)
    assert all(torch.equal(before[n], v) for n, v in models.items())


def test_empty_tensors_are_harmless() -> None:
    stacked = {
        "w": torch.tensor([[3.0, 4.0], [0.0, 0.0]]),
        "none": torch.zeros(2, 0),
        "none either": torch.zeros(2, 3, 0),
    }
    anchor = {"w": torch.zeros(2), "none": torch.zeros(0), "none either": torch.zeros(3, 0)}
    assert measure(stacked, anchor).distance[0, 1].item() == 5.0


@pytest.mark.parametrize("seed", range(20))
def test_updates_that_cancel_have_no_mean_direction_and_those_that_nearly_do_have_theirs(seed: int) -> None:
    """What is left of updates that sum to zero is rounding, and points anywhere."""
    draw = np.random.default_rng(seed)
    updates = draw.normal(size=(5, 40))
    updates[4] = -updates[:4].sum(0)
    anchor = {"w": torch.zeros(40, dtype=torch.float64)}
    cancelled = measure_updates({"w": torch.from_numpy(updates)}, anchor)
    assert cancelled.anchor_cosine.tolist() == [0.0] * 5
    updates += 1e-5 * draw.normal(size=40)
    left = measure_updates({"w": torch.from_numpy(updates)}, anchor).anchor_cosine.numpy()
    mean = updates.mean(0)
    expected = updates @ mean / (np.linalg.norm(updates, axis=1) * np.linalg.norm(mean))
    np.testing.assert_allclose(left, expected, rtol=1e-4, atol=1e-4)
