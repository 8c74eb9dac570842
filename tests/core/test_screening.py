"""Which replies are too large, seen without any engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_remote import Shelf
from torch import Tensor

from consilience.algorithms.fedavg import fedavg
from consilience.core import lengths
from consilience.core.conclusion import conclude
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.screening import Limits, screen_replies, unusable
from consilience.server.averaging.weighting.by_size import UniformWeights

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def cohort_of(w: Tensor, more: dict[str, Any] | None = None, **buffers: Tensor) -> Cohort:
    count = len(w)
    return Cohort(
        reply={"model": {"params": {"w": w}, "buffers": buffers}, **(more or {})},
        ids=np.arange(count) + 10,
        examples=torch.ones(count, dtype=torch.float64),
        steps=np.ones(count, dtype=np.int64),
        round=0,
    )


def sent(w: Tensor, **buffers: Tensor) -> Broadcast:
    return Broadcast(shared={"model": {"params": {"w": w}, "buffers": buffers}})


def refused(found: Cohort) -> list[tuple[int, str, str]]:
    return [(int(r.client), r.reason, r.key) for r in found.refusals]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [3e38, 1e30, 1e19, -3e38])
@pytest.mark.parametrize("limits", [None, Limits(max_ratio=None)])
def test_values_whose_squares_overflow_are_refused_whatever_the_limits(
    value: float, limits: Limits | None, device: str
) -> None:
    w = torch.ones(3, 4, device=device)
    w[1] = value
    found = screen_replies(cohort_of(w), sent(torch.ones(4, device=device)), limits)
    assert found.ids.tolist() == [10, 12] and found.counts == {"too_large": 1}
    assert refused(found) == [(11, "too_large", "model/params")] and "overflow" in found.refusals[0].detail
    assert torch.equal(found.reply["model"]["params"]["w"], torch.ones(2, 4, device=device))


def test_what_overflows_in_float32_is_an_ordinary_length_in_float64() -> None:
    w = torch.ones(2, 4, dtype=torch.float64)
    w[1] = 1e30
    assert len(screen_replies(cohort_of(w), limits=Limits(max_ratio=None))) == 2
    w[1] = 1e160
    assert refused(screen_replies(cohort_of(w))) == [(11, "too_large", "model/params")]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_narrow_types_are_squared_in_float32(kind: torch.dtype) -> None:
    w = torch.full((2, 100), 200.0, dtype=kind)  # squares of 40,000 add up to more than float16 can hold
    assert len(screen_replies(cohort_of(w), sent(torch.zeros(100, dtype=kind)))) == 2


def test_every_floating_tree_of_a_reply_must_have_squares() -> None:
    w, fine = torch.ones(4, 2), torch.ones(4, 3)
    large = fine.clone()
    large[2, 1] = 1e25
    loss = torch.tensor([1.0, 1.0, 1.0, 2e19])
    more = {"control_change": {"w": large, "b": fine}, "loss": loss, "count": torch.full((4,), 2**62)}
    found = screen_replies(cohort_of(w, more, mean=torch.tensor([[1.0], [1e30], [1.0], [1.0]])), sent(torch.ones(2)))
    assert refused(found) == [
        (11, "too_large", "model/buffers"),
        (12, "too_large", "control_change"),
        (13, "too_large", "loss"),
    ]
    assert found.ids.tolist() == [10] and found.counts == {"too_large": 3}


def test_nan_comes_first_and_each_is_refused_once() -> None:
    w = torch.ones(4, 2)
    w[1, 0], w[2], w[3, 1] = torch.nan, 3e38, torch.inf
    found = screen_replies(cohort_of(w), sent(torch.ones(2)))
    assert found.counts == {"nonfinite": 2, "too_large": 1} and found.ids.tolist() == [10]
    assert [client for client, *_ in refused(found)] == [11, 13, 12]


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_out_of_all_proportion_is_refused(device: str) -> None:
    start = torch.tensor([3.0, 4.0], device=device)  # length 5
    w = start + torch.tensor([[0.1, 0.0], [0.0, 4999.0], [0.0, 5001.0], [0.0, 0.2]], device=device)
    found = screen_replies(cohort_of(w), sent(start))
    assert refused(found) == [(12, "too_large", "model/params")]
    assert "5e+03" in found.refusals[0].detail and "limits.max_ratio" in found.refusals[0].detail
    off = cohort_of(w)
    assert (
        screen_replies(off, sent(start), Limits(max_ratio=None)) is off
        and screen_replies(off, sent(start), Limits(max_ratio=1e4)) is off
    )
    assert screen_replies(off, sent(start), Limits(max_ratio=100.0)).ids.tolist() == [10, 13]


def test_a_short_reply_can_be_a_long_update() -> None:
    """A model turned round is as long as before, but twice its length away."""
    start = torch.tensor([3.0, 4.0])
    w = torch.stack([start + 0.1, -1.2 * start, start - 0.1])
    assert refused(screen_replies(cohort_of(w), sent(start), Limits(max_ratio=1.5))) == [
        (11, "too_large", "model/params")
    ]
    assert len(screen_replies(cohort_of(w), sent(start), Limits(max_ratio=2.3))) == 3


def test_where_all_go_far_nobody_is_refused() -> None:
    """The first round of a regression whose targets are in the millions: the model is small, every update is not."""
    w = 1e6 * torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 40.0], [2.0, 2.0], [0.0, 0.0]])
    cohort = cohort_of(w)
    assert screen_replies(cohort, sent(torch.tensor([0.1, 0.1]))) is cohort


def test_a_model_of_zeros_and_updates_of_zero() -> None:
    zeros = sent(torch.zeros(2))
    far = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 2.0], [2.0, 1.0]])  # most did not move
    cohort = cohort_of(far)
    assert screen_replies(cohort, zeros) is cohort
    alone = cohort_of(torch.tensor([[1e9, 0.0]]))
    assert screen_replies(alone, zeros) is alone  # nothing to compare it with
    nobody_moved = cohort_of(torch.zeros(3, 2))
    assert screen_replies(nobody_moved, zeros) is nobody_moved
    two = screen_replies(cohort_of(torch.tensor([[1.0, 0.0], [1e9, 0.0]])), zeros)
    assert refused(two) == [(11, "too_large", "model/params")]
    assert len(screen_replies(cohort_of(torch.tensor([[1e19, 1e19]])), zeros)) == 0


def test_each_is_measured_from_what_it_was_sent() -> None:
    own = Broadcast(
        shared={}, personal={"model": {"params": {"w": torch.tensor([[1.0], [1e6], [1.0]])}, "buffers": {}}}
    )
    w = torch.tensor([[1.5], [1e6 + 5], [1e6]])
    assert refused(screen_replies(cohort_of(w), own)) == [(12, "too_large", "model/params")]
    w[0] = torch.nan  # the others are still measured from their own
    assert refused(screen_replies(cohort_of(w), own)) == [
        (10, "nonfinite", "model/params/w"),
        (12, "too_large", "model/params"),
    ]


def test_buffers_may_go_the_square_of_it() -> None:
    start = sent(torch.ones(2), var=torch.ones(1))
    var = torch.tensor([[1.0], [9e5], [2e6], [1.1], [1.2], [0.9]])
    assert refused(screen_replies(cohort_of(torch.ones(6, 2), var=var), start)) == [(12, "too_large", "model/buffers")]


def test_models_that_nobody_was_sent_are_compared_with_each_other() -> None:
    cohort = cohort_of(torch.tensor([[1.0], [1e9], [2.0]]))
    part = Broadcast(shared={"model": {"params": {"other": torch.ones(1)}, "buffers": {}}})
    for received in (None, Broadcast(shared={"dual": torch.ones(1)}), part):
        found = screen_replies(cohort, received)
        assert refused(found) == [(11, "too_large", "model/params")] and "a model of length" in str(found.refusals[0])
    only = cohort_of(torch.tensor([[1e9]]))
    assert screen_replies(only) is only


def test_an_update_of_just_the_bound_or_a_little_less_keeps_its_bits_and_is_not_counted() -> None:
    start = torch.tensor([0.1, 0.2])
    w = start + torch.tensor([[0.6, 0.8], [0.597, 0.796], [0.61, 0.81]])  # of length 1, 0.995 and 1.014
    bound = float((w[0].double() - start.double()).norm())
    found = screen_replies(cohort_of(w), sent(start), Limits(max_norm=bound))
    assert found.counts == {"clipped_updates": 1}
    assert torch.equal(found.reply["model"]["params"]["w"][:2], w[:2])
    within = screen_replies(cohort_of(w[:2]), sent(start), Limits(max_norm=bound))
    assert within.counts == {} and torch.equal(within.reply["model"]["params"]["w"], w[:2])


def test_with_max_norm_large_updates_are_clipped_and_other_trees_still_refused() -> None:
    w, more = torch.tensor([[1.0], [3e38], [1.0]]), {"control_change": torch.tensor([[1.0], [1.0], [3e38]])}
    found = screen_replies(cohort_of(w, more), sent(torch.ones(1)), Limits(max_norm=1.0))
    assert found.ids.tolist() == [10, 11] and found.counts == {"too_large": 1, "clipped_updates": 1}
    torch.testing.assert_close(found.reply["model"]["params"]["w"], torch.tensor([[1.0], [2.0]]))


def test_rows_that_lie_elsewhere_are_measured_there() -> None:
    values = 1 + 0.1 * torch.eye(6, 4)
    values[1], values[2], values[3, 0] = 3e38, 1e9, torch.nan
    found = torch.where(values.isfinite().all(1), lengths.quick(values), torch.nan)
    far = Shelf(values, lengths=found.tolist())
    kept = screen_replies(cohort_of(far.leaf()), sent(torch.ones(4)))
    assert kept.ids.tolist() == [10, 14, 15] and kept.counts == {"nonfinite": 1, "too_large": 2}
    assert all(rows == [3] for rows in far.fetched)  # to name the tensor of one reply
    unknown = Shelf(torch.ones(6, 4))
    assert len(screen_replies(cohort_of(unknown.leaf()), sent(torch.ones(4)))) == 6 and not unknown.fetched


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9), st.sampled_from([1.5, 10.0, 1000.0]), st.booleans())
def test_the_quick_look_acquits_nobody_whom_the_exact_rule_refuses(
    seed: int, count: int, ratio: float, zero: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    start = torch.zeros(5) if zero else torch.randn(5, generator=draw)
    scale = 10 ** torch.empty(count, 1).uniform_(-6, 9, generator=draw)
    w = start + scale * torch.randn(count, 5, generator=draw)
    found = screen_replies(cohort_of(w), sent(start), Limits(max_ratio=ratio))
    moved = (w.double() - start.double()).norm(dim=1)
    middle = moved[moved > 0].median() if bool((moved > 0).any()) else torch.tensor(0.0)
    bound = ratio * torch.maximum(middle, start.double().norm())
    assert set(found.ids - 10) == set(torch.nonzero(moved <= bound).flatten().tolist())
    assert len(found) >= (count + 1) // 2  # the median and all below it stay


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 6), st.sampled_from(["block", "mostly others", "repeated", "own"]))
def test_replies_in_one_block_of_memory_are_screened_as_copies_of_them(seed: int, count: int, lies: str) -> None:
    draw = torch.Generator().manual_seed(seed)
    block = torch.randn(count, 64 if lies == "mostly others" else 8, generator=draw)
    block *= 10 ** torch.empty(count, 1).uniform_(-3, 25, generator=draw)  # the squares of some overflow
    start = {"w": torch.randn(5, generator=draw), "b": torch.randn(3, generator=draw)}
    views = {"w": block[:, :5], "b": block[:, 5:8]}
    if lies == "repeated":
        views["b"] = block[0, 5].expand(count, 3)
    params = {name: leaf.clone() for name, leaf in views.items()} if lies == "own" else views
    received = Broadcast(shared={"model": {"params": start, "buffers": {}}})
    found = screen_replies(cohort_of(block, {"model": {"params": params, "buffers": {}}}), received)
    anchor = torch.cat([start["w"], start["b"]]).double()
    w = torch.cat([views["w"], views["b"]], 1).double()
    usable = w.norm(dim=1) <= torch.finfo(torch.float32).max ** 0.5 / 4
    moved = (w - anchor).norm(dim=1)
    middle = moved[usable].sort().values[(int(usable.sum()) - 1) // 2] if bool(usable.any()) else torch.tensor(0.0)
    kept = usable & (moved <= 1000 * torch.maximum(middle, anchor.norm()))
    assert (found.ids - 10).tolist() == torch.nonzero(kept).flatten().tolist()


def test_a_block_of_memory_is_measured_once_for_all_its_leaves() -> None:
    block, alone = torch.arange(12.0).reshape(3, 4).clone(), torch.full((2,), 3.0, dtype=torch.float16)
    parts = [block[:, :1], block[:, 1:]]
    assert [part is block for part in lengths.sources(parts)] == [True]  # one, and not two leaves
    assert [part is parts[0] for part in lengths.sources(parts[:1])] == [False]  # a quarter of the block is enough
    wide = torch.zeros(3, 8)[:, :1]
    assert lengths.sources([wide])[0] is wide and lengths.sources([alone])[0] is alone
    repeated = block[0, :1].expand(3, 1)
    assert lengths.sources([repeated])[0] is repeated
    test = lengths.NormTest([[block], [alone, block], []], lambda found: bool(found[0] < found[1]))
    assert len(test.values) == 2, "the block is in two groups, and measured once"
    assert test.passes() and test.passes(test.values.numpy()) and not test.passes(np.array([1.0, 0.0]))
    test.passes()
    np.testing.assert_allclose(test.lengths, [506**0.5, 524**0.5, 0.0], rtol=1e-6)
    assert not torch.isfinite(lengths.NormTest([[torch.full((2,), 1e30)]], lambda _: True).values).any()


def test_lengths_are_exact_for_the_largest_numbers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "BLOCK", 8)  # two rows at a time
    most = torch.finfo(torch.float32).max
    leaf = torch.stack(
        [torch.full((4,), most), -torch.full((4,), most), torch.zeros(4), torch.full((4,), 1e-40), *torch.eye(4)]
    )
    found = lengths.exact_lengths([leaf, leaf], [torch.full((4,), -most), torch.zeros(8, 4)])
    expected = [(4 * (2 * most) ** 2 + 4 * most**2) ** 0.5, 2 * most, 2 * most, 2 * most, *[2 * most] * 4]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isinf(lengths.exact_lengths([torch.full((1, 4), 1.7e308, dtype=torch.float64)]))


def test_models_that_cannot_be_used() -> None:
    good = {"params": {"w": torch.ones(3), "none": torch.zeros(0)}, "buffers": {"n": torch.tensor(2**62)}}
    assert unusable(good) == "" and unusable({}) == ""
    for value, words in (
        (1e19, "is too large in params/w: its squares overflow float32"),
        (torch.nan, "NaN or infinite"),
    ):
        assert words in unusable({"params": {"w": torch.full((3,), value), "v": torch.ones(2)}})
    assert unusable({"params": {"w": torch.full((3,), 1e30, dtype=torch.float64)}}) == ""


def test_growth_is_measured_from_what_each_was_sent_also_after_a_refusal() -> None:
    """The first client is refused: of the others, each starts from its own model, and only the last moved far."""
    starts = torch.tensor([[7.0], [0.0], [100.0], [-50.0]])
    own = Broadcast(shared={}, personal={"model": {"params": {"w": starts}, "buffers": {}}})
    cohort = cohort_of(starts + torch.tensor([[torch.nan], [1.0], [-1.0], [80.0]]))
    limits = Limits(max_growth=4.0)
    algorithm = fedavg(weighting=UniformWeights())
    state = algorithm.server.init({"params": {"w": torch.zeros(1)}, "buffers": {}}, 4)
    ended = conclude(algorithm, state, cohort, own, round=0, seed=0, limits=limits)
    assert ended.cohort.ids.tolist() == [11, 12, 13] and ended.length == 1.0
    assert ended.cohort.counts == {"nonfinite": 1, "clipped_updates": 1} and ended.updated
    assert ended.cohort.reply["model"]["params"]["w"].flatten().tolist() == [1.0, 99.0, -46.0]
    ended = conclude(algorithm, state, cohort, own, round=1, seed=0, limits=limits, lengths=(30.0, 25.0, 20.0))
    assert ended.cohort.counts == {"nonfinite": 1} and ended.length == 1.0  # 80 is less than 4 x 25
