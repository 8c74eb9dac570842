"""The usual server: weights, weighted means, buffers."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.exchange import Cohort
from consilience.core.protocols import ServerRule, waits_for_replies
from consilience.core.tree import Tree
from consilience.server import Averaging, ByExamples, Replace, SimProxWeights, UniformWeights, WeightedMean
from consilience.server.averaging.combining import weighted_mean as together
from consilience.server.averaging.combining.krum import Krum
from consilience.server.averaging.combining.weighted_mean import weighted_mean
from consilience.server.averaging.ledgers.generator import Generator
from consilience.server.averaging.ledgers.qffl_step import QfflStep
from consilience.server.protocols import Combine, Step, Weighting
from consilience.server.rules.buffered import Buffered


def uniform(count: int) -> torch.Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)


@given(st.integers(1, 6), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2**31))
def test_weighted_mean_is_the_sum_of_weight_times_value(count: int, shape: list[int], seed: int) -> None:
    if not shape:
        return  # 0-d tensors have a test of their own
    draw = np.random.default_rng(seed)
    values, weights = draw.normal(size=(count, *shape)), draw.dirichlet(np.ones(count))
    got = weighted_mean(torch.from_numpy(values), torch.from_numpy(weights))
    assert got.shape == tuple(shape) and got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), np.einsum("m,m...->...", weights, values), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weighted_mean_of_single_numbers(dtype: torch.dtype) -> None:
    got = weighted_mean(torch.tensor([1.0, 4.0], dtype=dtype), torch.tensor([0.75, 0.25], dtype=torch.float64))
    assert got.shape == () and got.dtype == dtype and got.item() == 1.75


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_weighted_mean_of_empty_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    got = weighted_mean(torch.zeros(4, *shape, dtype=dtype), uniform(4))
    assert got.shape == shape and got.dtype == dtype


@pytest.mark.parametrize("count", [2, 7, 50])
def test_half_precision_does_not_overflow(count: int) -> None:
    """60,000 x n is beyond float16's 65,504."""
    got = weighted_mean(torch.full((count, 3), 60_000.0, dtype=torch.float16), uniform(count))
    assert got.dtype == torch.float16 and got.tolist() == [60_000.0] * 3


def test_bfloat16_is_summed_in_single_precision() -> None:
    """256 + 1 is 256 in bfloat16: a sum in bfloat16 would lose every small term."""
    values = torch.ones(257, 1, dtype=torch.bfloat16)
    values[0] = 256.0
    weights = torch.full((257,), 1 / 256, dtype=torch.float64)
    assert weighted_mean(values, weights).item() == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    """1000 x 0.3001 - 1000 x 0.2999 + 0.1 x 0.4 = 0.24; in half precision the first two weights are off by 20 %."""
    weights = torch.tensor([0.3001, 0.2999, 0.4], dtype=torch.float64)
    got = weighted_mean(torch.tensor([[1000.0], [-1000.0], [0.1]], dtype=dtype), weights)
    assert got.item() == pytest.approx(0.24, rel=0.005)


def test_counters_take_the_largest_and_flags_any() -> None:
    models = {
        "n": torch.tensor([[3], [9], [5]]),
        "small": torch.tensor([3, 9, 5], dtype=torch.int32),
        "flag": torch.tensor([[False, False], [True, False], [False, False]]),
    }
    merged = WeightedMean().merge(models, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    assert merged["n"].tolist() == [9] and merged["n"].dtype == torch.int64
    assert merged["small"].item() == 9 and merged["small"].dtype == torch.int32
    assert merged["flag"].tolist() == [True, False]


def cohort_of(params: Tree, buffers: Tree, examples: list[float]) -> Cohort:
    count = len(examples)
    return Cohort(
        reply={"model": {"params": params, "buffers": buffers}},
        ids=np.arange(count),
        examples=torch.tensor(examples, dtype=torch.float64),
        steps=np.ones(count, dtype=np.int64),
        round=0,
    )


def test_fedavg_by_hand() -> None:
    """(1 x 10 + 3 x 2) / 4 = 4, buffers too, counters not."""
    server = Averaging()
    start = {"params": {"w": torch.zeros(1)}, "buffers": {"mean": torch.zeros(1), "n": torch.tensor([0])}}
    state = server.init(start, 2)
    reply = cohort_of(
        {"w": torch.tensor([[10.0], [2.0]])},
        {"mean": torch.tensor([[2.0], [6.0]]), "n": torch.tensor([[4], [7]])},
        [1, 3],
    )
    after, notes = server.update(state, reply)
    model = server.model(after)
    assert model["params"]["w"].tolist() == [4.0]
    assert model["buffers"]["mean"].tolist() == [5.0] and model["buffers"]["n"].tolist() == [7]
    assert notes["weights"].tolist() == [0.25, 0.75]
    assert server.model(state)["params"]["w"].tolist() == [0.0]


def test_weights_by_examples_and_uniform() -> None:
    cohort = cohort_of({"w": torch.zeros(3, 1)}, {}, [1, 2, 5])
    weights, state, notes = ByExamples().weigh(cohort, {}, {})
    assert weights.tolist() == [0.125, 0.25, 0.625] and state == {} and notes == {}
    weights, _, _ = UniformWeights().weigh(cohort, {}, {})
    assert weights.tolist() == [1 / 3] * 3 and weights.dtype == torch.float64


def test_huge_and_tiny_counts_keep_sane_weights() -> None:
    weights, _, _ = ByExamples().weigh(cohort_of({"w": torch.zeros(2, 1)}, {}, [1, 10**12]), {}, {})
    assert float(weights.sum()) == pytest.approx(1, abs=1e-15) and weights[0].item() == pytest.approx(1e-12)


def test_broadcast_is_the_global_model() -> None:
    server = Averaging()
    start = {"params": {"w": torch.ones(2)}, "buffers": {}}
    sent = server.broadcast(server.init(start, 3), np.arange(3))
    assert tiny.same(sent.shared, {"model": start}) and sent.personal == {}


def test_an_update_is_queued_if_no_part_waits_for_replies() -> None:
    assert not waits_for_replies(Averaging()) and not Averaging().queued  # a sum waits for nothing, undeclared
    assert not waits_for_replies(Averaging(ledgers=(Generator(),)))
    assert waits_for_replies(Averaging(weighting=SimProxWeights()))
    both = Averaging(ledgers=(Generator(), QfflStep()))
    chosen = Averaging(combine=Krum(), ledgers=(Generator(),))
    weighted = Averaging(weighting=SimProxWeights(), ledgers=(Generator(),))
    assert all(map(waits_for_replies, (both, chosen, weighted)))
    wrapped = Buffered(averaging=Averaging(ledgers=(Generator(),)))
    assert waits_for_replies(wrapped), "a wrapper declares it itself"

    class Reading(Averaging):
        needs_each_reply = True

    assert waits_for_replies(Reading())


def test_needs_each_reply_follows_the_parts() -> None:
    assert not Averaging().needs_each_reply
    assert not Averaging(weighting=ByExamples()).needs_each_reply
    assert Averaging(weighting=SimProxWeights()).needs_each_reply


@pytest.mark.parametrize("weighting", [ByExamples(), UniformWeights()], ids=str)
def test_a_weighted_sum_is_all_that_plain_averages_read(weighting: Weighting) -> None:
    """Replies may be replaced by their mean under the server's own weights, which example counts alone decide."""
    server = Averaging(weighting=weighting)
    cohort = cohort_of({"w": torch.tensor([[10.0], [2.0], [6.0]])}, {}, [1, 3, 4])
    state = server.init({"params": {"w": torch.zeros(1)}, "buffers": {}}, 3)
    after, notes = server.update(state, cohort)
    summed = (notes["weights"].float() @ torch.tensor([10.0, 2.0, 6.0])).expand(3, 1)
    again, same = server.update(state, cohort_of({"w": summed}, {}, [1, 3, 4]))
    assert torch.equal(same["weights"], notes["weights"])
    assert tiny.gap(again["model"], after["model"]) <= 1e-6


def test_parts_are_what_the_protocols_ask_for() -> None:
    for weighting in (ByExamples(), UniformWeights(), SimProxWeights()):
        assert isinstance(weighting, Weighting)
    assert isinstance(WeightedMean(), Combine) and isinstance(Replace(), Step)
    assert isinstance(Averaging(), ServerRule)


def test_sums_of_all_tensors_at_once_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: small tensors of a type together, large ones apart."""
    monkeypatch.setattr(together, "LARGE", 40)
    draw, weights = torch.Generator().manual_seed(0), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    shapes = {"a": (3, 2), "b": (3, 4, 5), "c": (3,), "d": (3, 7, 2)}
    params = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    models = {"params": params, "buffers": {"seen": torch.tensor([3, 9, 1]), "mean": torch.randn(3, 2, generator=draw)}}
    merge = functools.partial(weighted_mean, weights=weights)
    found = together._all_at_once(merge, models)
    for part, leaves in models.items():
        assert found[part].keys() == leaves.keys()
        for name, stacked in leaves.items():
            torch.testing.assert_close(found[part][name], merge(stacked), rtol=1e-6, atol=1e-12)
    assert found["buffers"]["seen"] == 9
