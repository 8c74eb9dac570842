"""One similarity, two systems: SimProx weighs by what SimFedSwap pairs by, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from consilience.algorithms.simfedswap import simfedswap
from consilience.algorithms.simprox import simprox
from consilience.algorithms.simprox_buffered import simprox_buffered
from consilience.channel import OverTheAir
from consilience.core.exchange import Cohort
from consilience.core.remote import RemoteTensor
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.experiments.assembly import assemble
from consilience.experiments.config import config
from consilience.selection import Everyone
from consilience.server import SimProxWeights
from consilience.server.geometry.gaussian_cosine import GaussianCosine
from consilience.server.geometry.model_similarity import Layerwise, Mixed

USUAL: dict[str, Any] = {"lr": 0.05, "epochs": 1, "batch_size": 4, "selection": Everyone()}


def models(seed: int = 0, m: int = 5) -> tuple[Tree, Tree]:
    draw = torch.Generator().manual_seed(seed)
    start = {
        "a.weight": torch.randn(12, 5, generator=draw, dtype=torch.float64),
        "b.weight": torch.randn(3, 12, generator=draw, dtype=torch.float64),
        "b.bias": torch.randn(3, generator=draw, dtype=torch.float64),
    }
    near = {
        k: v
        + 0.3
        * torch.randn(m, *v.shape, generator=draw, dtype=torch.float64)
        * torch.rand(m, *[1] * v.dim(), generator=draw)
        for k, v in start.items()
    }
    return near, start


def weigh(stacked: Tree, start: Tree, **options: Any) -> tuple[Tensor, Any]:
    m = len(next(iter(stacked.values())))
    cohort = Cohort(
        reply={"model": {"params": stacked, "buffers": {}}},
        ids=np.arange(m),
        examples=torch.ones(m, dtype=torch.float64),
        steps=np.ones(m, np.int64),
        round=0,
    )
    weights, _, notes = SimProxWeights(**options).weigh(cohort, {"params": start, "buffers": {}}, {})
    return weights, notes


@pytest.mark.parametrize("metric", ["cka_linear", "cka_rbf", "cka_debiased", "cka_deconfounded", "cca"])
@pytest.mark.parametrize("softmax", [False, True])
def test_simprox_weighs_by_any_metric_as_equation_12_says(metric: Any, softmax: bool) -> None:
    stacked, start = models()
    part = Layerwise(metric=metric, layers=(2.0, 1.0))
    weights, notes = weigh(stacked, start, similarity=part, softmax=softmax)
    s = part.compare(stacked, start).numpy()
    g = np.sqrt(sum(((v - start[k]).numpy() ** 2).reshape(5, -1).sum(1) for k, v in stacked.items()))
    alpha = np.array([np.exp(-g[i]) * (1 + np.delete(s[i], i).mean()) for i in range(5)])
    alpha /= alpha.sum()
    expected = np.exp(alpha) / np.exp(alpha).sum() if softmax else alpha
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)
    assert np.array_equal(notes["similarity"].numpy(), s) and "lambda" not in notes
    assert np.abs(weights.numpy() - weigh(stacked, start, softmax=softmax)[0].numpy()).max() > 1e-6


@pytest.mark.parametrize("take", ["both", "cosine", "gaussian"])
@pytest.mark.parametrize("compare_on", ["weights", "updates"])
def test_simproxs_own_similarity_is_the_same_part(take: Any, compare_on: Any) -> None:
    stacked, start = models(1)
    chosen = {} if take == "gaussian" else {"compare_on": compare_on}
    expected, notes = weigh(stacked, start, similarity=take, **chosen)
    part = GaussianCosine(take=take, **chosen)
    assert torch.equal(part.compare(stacked, start), notes["similarity"])
    assert torch.equal(weigh(stacked, start, similarity=part)[0], expected)


def test_swapping_pairs_by_distance_where_directions_are_equal_by_hand() -> None:
    """Models 1, 2, 4 and 8 times one vector: all cosines are 1, so the farthest swap, 8 with 1, then 4 with 2."""
    vector = torch.ones(3, 4, dtype=torch.float64)
    stacked = {"w": torch.stack([scale * vector for scale in (1.0, 4.0, 2.0, 8.0)])}
    s = GaussianCosine().compare(stacked, {"w": vector})
    distance = np.abs(np.subtract.outer([1, 4, 2, 8], [1, 4, 2, 8])) * np.sqrt(12)
    sigma = distance.sum() / 12
    np.testing.assert_allclose(s.numpy(), 0.7 + 0.3 * np.exp(-(distance**2) / (2 * sigma**2)), rtol=1e-12)
    pairs = simfedswap().server.pairing.pairs(s.numpy(), 2, np.random.default_rng(0))
    assert pairs == [(0, 3), (1, 2)]


def test_simfedswap_runs_with_simproxs_similarity() -> None:
    one = next(run(simfedswap(similarity=GaussianCosine(), **USUAL), tiny.engine(), rounds=1, seed=1))
    start = tiny.engine().start()["params"]
    assert torch.equal(one.notes["similarity"], GaussianCosine().compare(one.cohort.reply["model"]["params"], start))


def test_a_metrics_name_is_a_similarity_of_both_systems() -> None:
    assert simfedswap(similarity="cka_rbf").server.similarity == Layerwise(metric="cka_rbf")
    assert simfedswap(metric="cka_rbf").server.similarity == simfedswap(similarity="cka_rbf").server.similarity
    assert simprox(similarity="cka_rbf").server.weighting.similarity == Layerwise(metric="cka_rbf")


@pytest.mark.parametrize("metric", ["hsic", "osad"])
def test_similarities_without_limits_must_be_put_on_a_scale(metric: Any) -> None:
    part = Layerwise(metric=metric)
    for bare in (part, Mixed(parts=(part,), normalise="none")):
        with pytest.raises(Invalid, match=r"must have values in \[-1, 1\]: put it inside Mixed"):
            SimProxWeights(similarity=bare)
    stacked, start = models()
    for normalise in ("range", "rank"):
        weights, notes = weigh(stacked, start, similarity=Mixed(parts=(part,), normalise=normalise))  # type: ignore[arg-type]
        off = notes["similarity"][~torch.eye(5, dtype=torch.bool)]
        assert float(off.min()) == 0 and float(off.max()) == 1 and float(weights.sum()) == pytest.approx(1)


class Own:
    """A similarity of one's own: a method is all it takes."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def compare(self, stacked: Tree, ancestor: Tree) -> Tensor:
        bias = stacked["b.bias"][:, 0]
        return self.scale * torch.exp(-(bias[:, None] - bias[None, :]).abs())


def test_a_similarity_of_ones_own_is_used_and_its_range_is_checked() -> None:
    stacked, start = models()
    weights, notes = weigh(stacked, start, similarity=Own(0.5), temperature=1.0)
    assert torch.equal(notes["similarity"], Own(0.5).compare(stacked, start)) and float(weights.sum()) == pytest.approx(
        1
    )
    for scale in (-7.0, float("nan")):
        with pytest.raises(Invalid, match=r"Own gave similarities from .* need them in \[-1, 1\]"):
            weigh(stacked, start, similarity=Own(scale))
    with pytest.raises(Invalid, match="is not one of both, cosine, gaussian"):
        SimProxWeights(similarity=7)  # type: ignore[arg-type]


class Elsewhere:
    """Rows that are fetched, and on which nobody works."""

    place = lengths = None
    lasting = False

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def fetch(self, rows: np.ndarray) -> Tensor:
        return self.values[torch.from_numpy(rows)]


@pytest.mark.parametrize("part", [Layerwise(), GaussianCosine(), Mixed(parts=(Layerwise(metric="osad"),))])
def test_models_that_lie_elsewhere_weigh_the_same_to_the_last_bit(part: Any) -> None:
    stacked, start = models()
    away = {
        name: RemoteTensor(Elsewhere(value), np.arange(5), value.shape[1:], value.dtype, value.device)
        for name, value in stacked.items()
    }
    assert torch.equal(weigh(away, start, similarity=part)[0], weigh(stacked, start, similarity=part)[0])


def test_a_server_that_sees_sums_alone_cannot_compare_models() -> None:
    for build in (simprox, simfedswap):
        with pytest.raises(Invalid, match="only the sum of the replies"):
            build(similarity=Layerwise(metric="cca"), channel=OverTheAir())


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("simprox", "{name='layerwise', metric='cca', layers='by_size'}", Layerwise(metric="cca", layers="by_size")),
        ("simprox", "{name='mixed', parts=[{name='layerwise', metric='osad'}, {name='gaussian_cosine'}]}", None),
        ("simprox", "Cosine", "cosine"),
        ("simprox", "gaussian_cosine", GaussianCosine()),
        ("simprox", "cka_linear", Layerwise(metric="cka_linear")),
        ("simfedswap", "gaussian_cosine", GaussianCosine()),
        ("simfedswap", "{name='gaussian_cosine', take='cosine', compare_on='updates'}", None),
    ],
)
def test_configs_name_any_similarity_in_both(name: str, given: str, expected: Any, tmp_path: Path) -> None:
    settings = (f"algorithm={name}", f"algorithm.similarity={given}", "partition.clients=4", f"runs={tmp_path}")
    server: Any = assemble(config.load(None, settings)).algorithm.server
    found = server.weighting.similarity if name == "simprox" else server.similarity
    parts = (Layerwise(metric="osad"), GaussianCosine())
    usual = Mixed(parts=parts) if name == "simprox" else GaussianCosine(take="cosine", compare_on="updates")
    assert found == (expected or usual)


def test_configs_refuse_what_has_no_meaning() -> None:
    for given, message in (
        (
            "cosin",
            r"is not one of both, cosine, gaussian, cka_linear, .*adapters, .*layerwise, mixed .*mean 'cosine'\?\)",
        ),
        ("{name='layerwise', metric='hsic'}", "put it inside Mixed"),
        ("osad", r"put it inside Mixed.*, in a config \{name = 'mixed'"),
    ):
        with pytest.raises(Invalid, match=message):
            config.load(None, ["algorithm=simprox", f"algorithm.similarity={given}"]).algorithm  # noqa: B018
    for option in ({"lambda_0": 0.2}, {"compare_on": "updates"}, {"sketch": 8}):
        with pytest.raises(Invalid, match="has no effect with similarity"):
            SimProxWeights(similarity=Layerwise(), **option)


def test_the_buffered_variant_takes_it_with_its_weighting() -> None:
    part = Layerwise(metric="cka_debiased")
    algorithm = simprox_buffered(weighting=SimProxWeights(similarity=part), buffer=3, **USUAL)
    last = list(run(algorithm, tiny.engine(), rounds=2, seed=1))[-1]
    assert last.notes["similarity"].shape == (3, 3) and tiny.finite(last.model)
