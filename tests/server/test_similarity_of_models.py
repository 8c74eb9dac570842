"""Whole models layer by layer: which tensors, which way round, which weights; mixtures; across layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.server.geometry.model_similarity import Layerwise, Mixed, matrices
from consilience.server.geometry.similarity import (
    METRICS,
    cca,
    cka_deconfounded,
    cka_linear,
    cka_rbf,
    gram_linear,
    hsic,
    osad,
)

M = 4


def models(seed: int = 0, m: int = M) -> Tree:
    """A convolution [6, 2, 3, 3], a tall layer [9, 4], a wide one [4, 9], a bias, a scale."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"conv": (6, 2, 3, 3), "tall": (9, 4), "wide": (4, 9), "bias": (9,), "scale": ()}
    return {name: torch.randn(m, *shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def ancestor(seed: int = 9) -> Tree:
    return {name: value[0] for name, value in models(seed, 1).items()}


def by_hand(name: str, value: Tensor) -> np.ndarray:
    """One model's layer as a tall matrix, written out."""
    if name == "conv":
        return value.numpy().reshape(6, 18).T
    return value.numpy() if name == "tall" else value.numpy().T


def test_layers_are_tall_matrices_and_vectors_are_left_out() -> None:
    found = matrices(models())
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "conv": (M, 18, 6),
        "tall": (M, 9, 4),
        "wide": (M, 9, 4),
    }
    for name, stack in found.items():
        np.testing.assert_array_equal(stack[1].numpy(), by_hand(name, models()[name][1]))
    with pytest.raises(Invalid, match="no weight matrix"):
        matrices({"bias": torch.ones(2, 5)})


@pytest.mark.parametrize(
    ("metric", "function"), [("cka_linear", cka_linear), ("cka_rbf", cka_rbf), ("cca", cca), ("hsic", hsic)]
)
def test_a_model_similarity_is_the_mean_over_layers(metric: str, function: object) -> None:
    stacked = models()
    got = Layerwise(metric=metric).compare(stacked, ancestor())
    for i, j in itertools.product(range(M), repeat=2):
        layers = [
            function(*(torch.from_numpy(by_hand(name, stacked[name][k]).copy()) for k in (i, j)))  # type: ignore
            for name in ("conv", "tall", "wide")
        ]
        assert float(got[i, j]) == pytest.approx(float(sum(layers)) / 3, rel=1e-10)


def test_osad_by_hand() -> None:
    stacked = {
        "w": torch.tensor([[[1.0, 2.0]], [[4.0, 0.0]]]),
        "v": torch.tensor([[[1.0]], [[1.5]]]),
        "b": torch.ones(2, 9),
    }
    got = Layerwise(metric="osad").compare(stacked, {name: value[0] for name, value in stacked.items()})
    assert got.tolist() == [[0, -2.75], [-2.75, 0]]  # -(5 + 0.5) / 2 layers


def test_layer_weights() -> None:
    stacked, own = models(), {}
    for name in ("conv", "tall", "wide"):
        own[name] = Layerwise().compare({name: stacked[name]}, {name: ancestor()[name]})
    got = Layerwise(layers=(1.0, 0.0, 3.0)).compare(stacked, ancestor())
    torch.testing.assert_close(got, (own["conv"] + 3 * own["wide"]) / 4, rtol=1e-12, atol=1e-12)
    got = Layerwise(layers="by_size").compare(stacked, ancestor())
    expected = (108 * own["conv"] + 36 * own["tall"] + 36 * own["wide"]) / 180
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(Invalid, match="has 2 weights for 3 weight matrices: give one for each of conv, tall, wide"):
        Layerwise(layers=(1.0, 2.0)).compare(stacked, ancestor())
    with pytest.raises(Invalid, match="gives no layer any weight"):
        Layerwise(layers=(0.0,))


def test_the_confounder_is_the_common_ancestor() -> None:
    stacked, origin = models(), ancestor()
    got = Layerwise(metric="cka_deconfounded").compare({"tall": stacked["tall"]}, {"tall": origin["tall"]})
    grams = [gram_linear(stacked["tall"][k]) for k in (0, 2)]
    assert float(got[0, 2]) == pytest.approx(float(cka_deconfounded(*grams, gram_linear(origin["tall"]))), rel=1e-9)
    keeping = Layerwise(metric="cka_deconfounded", negative_eigenvalues="keep")
    kept = keeping.compare({"tall": stacked["tall"]}, {"tall": origin["tall"]})
    expected = cka_deconfounded(*grams, gram_linear(origin["tall"]), negative_eigenvalues="keep")
    assert float(kept[0, 2]) == pytest.approx(float(expected), rel=1e-9) != float(got[0, 2])
    still = {"tall": origin["tall"].repeat(3, 1, 1)}  # models that never moved have nothing of their own
    assert not Layerwise(metric="cka_deconfounded").compare(still, {"tall": origin["tall"]}).any()


def test_across_layers_of_equal_height() -> None:
    stacked = models()
    across = Layerwise(cross=1.0).compare(stacked, ancestor())
    for i, j in itertools.product(range(M), repeat=2):  # only tall and wide share a height, 9
        tall, wide = ([torch.from_numpy(by_hand(n, stacked[n][k]).copy()) for k in (i, j)] for n in ("tall", "wide"))
        expected = (cka_linear(tall[0], wide[1]) + cka_linear(wide[0], tall[1])) / 2
        assert float(across[i, j]) == pytest.approx(float(expected), rel=1e-10)
    mixed = Layerwise(cross=0.25).compare(stacked, ancestor())
    torch.testing.assert_close(mixed, 0.75 * Layerwise().compare(stacked, ancestor()) + 0.25 * across)
    assert torch.isfinite(Layerwise(metric="osad", cross=0.5).compare(stacked, ancestor())).all()
    with pytest.raises(Invalid, match="no two weight matrices have the same longer side"):
        Layerwise(cross=0.5).compare({"conv": stacked["conv"]}, {"conv": ancestor()["conv"]})
    with pytest.raises(Invalid, match="cross is incompatible with cka_deconfounded"):
        Layerwise(metric="cka_deconfounded", cross=0.5)


@pytest.mark.parametrize("metric", METRICS)
def test_constant_layers_do_no_harm(metric: str) -> None:
    stacked = models()
    stacked["wide"] = torch.zeros_like(stacked["wide"])
    stacked["tall"][1] = 0.1
    got = Layerwise(metric=metric).compare(stacked, ancestor())
    assert bool(got.isfinite().all()) and torch.equal(got, got.T)


def test_mixtures_put_every_metric_on_one_scale() -> None:
    parts = (Layerwise(metric="cka_linear"), Layerwise(metric="osad"))
    one, two = (part.compare(models(), ancestor()) for part in parts)
    upper = np.triu_indices(M, 1)
    scaled = [(v - v[upper].min()) / (v[upper].max() - v[upper].min()) for v in (one, two)]
    got = Mixed(parts=parts, weights=(1.0, 3.0)).compare(models(), ancestor())
    torch.testing.assert_close(got, (scaled[0] + 3 * scaled[1]) / 4)
    assert float(got[upper].min()) >= 0 and float(got[upper].max()) <= 1
    lowest = Mixed(parts=parts, take="lowest").compare(models(), ancestor())
    torch.testing.assert_close(lowest, torch.minimum(*scaled))
    plain = Mixed(parts=parts, normalise="none").compare(models(), ancestor())
    torch.testing.assert_close(plain, (one + two) / 2)
    ranks = Mixed(parts=parts[:1], normalise="rank").compare(models(), ancestor())[upper]
    expected = np.argsort(np.argsort(one[upper].numpy())) / 5  # six pairs
    np.testing.assert_allclose(ranks.numpy(), expected)


def test_mixtures_of_models_that_are_all_alike_are_flat() -> None:
    alike = {name: value[:1].repeat(M, *(1,) * (value.dim() - 1)) for name, value in models().items()}
    for normalise in ("range", "rank"):
        parts = (Layerwise(metric="osad"),)
        got = Mixed(parts=parts, normalise=normalise).compare(alike, ancestor())  # type: ignore[arg-type]
        assert not got.any()


def test_mixtures_that_cannot_be_are_refused() -> None:
    with pytest.raises(Invalid, match=r"Mixed\.parts is empty"):
        Mixed(parts=())
    with pytest.raises(Invalid, match="must be 1 numbers, not all zero"):
        Mixed(parts=(Layerwise(),), weights=(1.0, 2.0))
    with pytest.raises(Invalid, match="has no effect with take = 'lowest'"):
        Mixed(parts=(Layerwise(),), weights=(1.0,), take="lowest")


def test_osad_is_a_metric_of_two_matrices_too() -> None:
    x = torch.tensor([[1.0, -2.0], [0.5, 0.0]])
    assert float(osad(x, torch.zeros(2, 2))) == -3.5
