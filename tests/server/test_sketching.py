"""Random projections: exact on average, within the stated deviation, and a function of the key alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from consilience.server.geometry.geometry import measure, measure_updates, sketch


def stacked(values: np.ndarray) -> dict[str, torch.Tensor]:
    """[m, d] as tensors of several shapes, an empty one among them."""
    rows = torch.from_numpy(values)
    return {"a": rows[:, :3], "none": rows[:, :0], "b": rows[:, 3:11].reshape(-1, 2, 4), "c": rows[:, 11:]}


def alone(values: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: value[0] for name, value in stacked(values[None]).items()}


DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("length", [1, 7, 64, 300])
def test_a_sketch_is_a_signed_sum_with_every_parameter_in_one_place(length: int) -> None:
    """Row j of the projection matrix, seen through unit vectors."""
    size = 50
    matrix = sketch(stacked(np.eye(size)), alone(np.zeros(size)), length, key=3).numpy()  # [parameter, direction]
    assert (np.abs(matrix).sum(1) == 1).all() and set(np.unique(matrix)) <= {-1.0, 0.0, 1.0}
    assert 10 <= (matrix.sum(1) < 0).sum() <= 40
    w, anchor = DRAW.normal(size=(4, size)), DRAW.normal(size=size)
    np.testing.assert_allclose(sketch(stacked(w), alone(anchor), length, key=3), (w - anchor) @ matrix, atol=1e-13)


@pytest.mark.parametrize("kind", ["normal", "few", "alike"])
def test_mean_and_deviation_are_as_stated(kind: str) -> None:
    """|Sx|^2 / |x|^2 over 1,000 keys: mean 1, deviation at most sqrt(2 / k)."""
    size, length, keys = 60, 25, 1000
    x = {"normal": DRAW.normal(size=size), "few": np.eye(size)[[0, 13]].sum(0), "alike": np.ones(size)}[kind]
    y = DRAW.normal(size=size)
    both = stacked(np.stack([x, y]))
    found = [sketch(both, alone(np.zeros(size)), length, key).numpy() for key in range(keys)]
    ratio = np.array([(s[0] ** 2).sum() for s in found]) / (x @ x)
    assert abs(ratio.mean() - 1) < 4 * np.sqrt(2 / length / keys)
    assert ratio.std() <= 1.1 * np.sqrt(2 / length)
    product = np.array([s[0] @ s[1] for s in found])
    limit = np.sqrt(((x @ x) * (y @ y) + (x @ y) ** 2) / length)
    assert abs(product.mean() - x @ y) < 4 * limit / np.sqrt(keys) and product.std() <= 1.1 * limit
    for far in (0.5, 0.8):  # Chebyshev
        assert (np.abs(ratio - 1) > far).mean() <= 2 / (length * far**2)


@pytest.mark.parametrize("look", [measure, measure_updates])
def test_geometry_of_a_sketch_is_near_the_true_one(look: object) -> None:
    length, m, size = 4096, 30, 20_000
    anchor = 5 * DRAW.normal(size=size) / size**0.5
    w = anchor + DRAW.uniform(0.1, 2, size=(m, 1)) * DRAW.normal(size=(m, size)) / size**0.5
    exact, got = (look(stacked(w), alone(anchor), directions=k, key=1) for k in (None, length))  # type: ignore[operator]
    pairs = ~torch.eye(m, dtype=torch.bool)
    relative = (got.distance / exact.distance)[pairs] - 1
    assert float(relative.std()) <= 1.2 * (2 / length) ** 0.5 / 2 and float(relative.abs().max()) < 0.06
    torch.testing.assert_close(got.movement, exact.movement, rtol=1e-12, atol=0)  # not sketched
    error = 5 * (2 / length) ** 0.5 if look is measure_updates else 0.02
    torch.testing.assert_close(got.cosine, exact.cosine, rtol=0, atol=error)
    if look is measure:
        torch.testing.assert_close(got.anchor_cosine, exact.anchor_cosine, rtol=0, atol=1e-12)


def test_equal_models_stay_equal_and_zero_models_are_seen() -> None:
    w = np.concatenate([np.repeat(DRAW.normal(size=(1, 40)), 3, 0), np.zeros((1, 40))])
    got = measure(stacked(w), alone(np.ones(40)), directions=16)
    assert (got.distance[:3, :3] == 0).all() and bool(got.cosine[3].isnan().all())
    assert got.cosine[:3, :3].allclose(torch.ones(3, 3, dtype=torch.float64), atol=1e-14)


def test_many_clients_are_sketched_in_blocks() -> None:
    w, anchor = DRAW.normal(size=(150, 30)), DRAW.normal(size=30)
    whole = sketch(stacked(w), alone(anchor), 8, key=2)
    parts = torch.cat([sketch(stacked(w[k : k + 1]), alone(anchor), 8, key=2) for k in range(150)])
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-13)
    assert torch.equal(whole, sketch(stacked(w), alone(anchor), 8, key=2))
    assert not torch.equal(whole, sketch(stacked(w), alone(anchor), 8, key=3))
    exact = measure(stacked(w), alone(anchor), directions=8)
    np.testing.assert_allclose(exact.movement, np.linalg.norm(w - anchor, axis=1), rtol=1e-12)
