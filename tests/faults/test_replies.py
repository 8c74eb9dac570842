"""Rows 1 to 17 of the table of faults: each refusal has a message and a metric, and touches no state.

The server's state after a round with a refused reply is compared, bit for bit, with that of a round in which the client
was silent; with momentum, a clipping centre, control variates and similarity weights.
"""

from __future__ import annotations

import functools
import io
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import build
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from strangers import RUN, Strangers, altered, at, nobody, ones, packed, tensor
from test_numerics import PLAIN, SIMILAR, cohort_of, merged

from consilience.channel import TopK
from consilience.core import tree
from consilience.core.capabilities import PostTrainingPass
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.rounds import Diverged, run
from consilience.core.screening import Limits, screen_replies
from consilience.experiments.record import Observer
from consilience.reporting.progress import shown
from consilience.runs.observation import Observation
from consilience.wire.admission import Arrival, Refusal, identities
from consilience.wire.arrays import Packed

pytestmark = pytest.mark.usefixtures("untraced")

ALGORITHMS = ("fedavgm", "centred_clipping", "scaffold", "simprox", "fedadam")
W, B = "model/params/1.weight", "model/params/1.bias"  # [8, 36] and [8]


def watched(algorithm: Any, engine: Any, rounds: int = 3, limits: Limits | None = None) -> list[Observation]:
    observer = Observer(task=engine.task, test=None, every=0, rounds=rounds)
    return list(observer.watch(run(algorithm, engine, rounds=rounds, seed=1, limits=limits), engine.start()))


@functools.cache
def without_client_3(name: str) -> list[Observation]:
    """The same run with nothing from client 3 in the second round."""
    return watched(build(name), Strangers(at(3, nobody)))


def assert_refused(
    change: Callable[[Arrival], list[Arrival]],
    reason: str,
    *,
    key: str = "",
    words: str = "",
    limits: Limits | None = None,
    names: tuple[str, ...] = ("fedavgm", "scaffold"),
) -> None:
    """Client 3's reply of the second round goes, named and counted; all else is as if it had been silent."""
    for name in names:
        found, silent = watched(build(name), Strangers(at(3, change), limits)), without_client_3(name)
        for seen, expected in zip(found, silent):
            assert tiny.same(seen.round.snapshot.server, expected.round.snapshot.server)
            assert tiny.same(seen.round.snapshot.memory, expected.round.snapshot.memory)
            assert tiny.same(seen.round.model, expected.round.model)
        cohort, row = found[1].round.cohort, found[1].row
        assert row["rejected"] == {reason: 1} and cohort.counts == {reason: 1} and cohort.ids.tolist() == [0, 1, 2, 4]
        assert [one.row["rejected"] for one in found[::2]] == [{}, {}] and found[2].round.cohort.ids.tolist() == [
            *range(5)
        ]
        (refusal,) = cohort.refusals
        assert (refusal.client, refusal.reason, refusal.key) == (3, reason, key)
        assert row["refused"] == [str(refusal)] and words in str(refusal)
        out = io.StringIO()
        list(shown(found, rounds=3, console=Console(file=out, width=300)))
        assert f"refused 1 ({reason} 1)" in out.getvalue() and str(refusal) in out.getvalue()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_1_and_2_nan_and_infinities(value: float) -> None:
    weights = ones(8, 36)
    weights[2, 5] = value
    assert_refused(tensor(W, weights), "nonfinite", key=W, words="1 of 288 values", names=ALGORITHMS)


def test_rows_1_and_2_in_the_engine_of_one_process_and_of_every_part_of_a_reply() -> None:
    """No admission there: the last look, after decoding, finds them."""

    class Spoilt:
        def __init__(self, part: str) -> None:
            self._engine, self._part = tiny.engine(), part

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def exchange(self, *args: Any, **when: int) -> Cohort:
            cohort = self._engine.exchange(*args, **when)
            if when["round"] == 1:
                leaf = cohort.reply[self._part]
                while isinstance(leaf, dict):
                    leaf = next(iter(leaf.values()))
                leaf[3] = torch.nan
            return cohort

    for part in ("model", "loss", "control_change"):
        found = watched(build("scaffold"), Spoilt(part))
        silent = without_client_3("scaffold")
        for seen, expected in zip(found, silent):
            assert tiny.same(seen.round.snapshot.server, expected.round.snapshot.server)
        (refusal,) = found[1].round.cohort.refusals
        assert (refusal.client, refusal.reason) == (3, "nonfinite") and refusal.key.startswith(part)
        assert found[1].row["rejected"] == {"nonfinite": 1} and found[1].row["nonfinite"] == 1


@pytest.mark.parametrize("shape", [(), (1, 36), (8, 1), (36, 8), (8, 36, 1), (0,)], ids=str)
def test_row_3_wrong_shapes(shape: tuple[int, ...]) -> None:
    words = f"expected (8, 36), received {shape}"
    assert_refused(tensor(W, ones(*shape)), "shape", key=W, words=words)


def test_row_3_declared_and_real_shape_differ() -> None:
    lie = altered(W, lambda item: item._replace(shape=(288,)), keep_digest=False)
    assert_refused(lie, "shape", key=W, words="expected (8, 36), received (288,)")
    hidden = packed(W, Packed(_npy(np.ones((36, 8))), "float64", (8, 36)))
    assert_refused(hidden, "shape", key=W, words="expected (8, 36), received (36, 8)")


def _npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), **options)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_row_4_wrong_types(dtype: str) -> None:
    value = ones(8, 36).to(getattr(torch, dtype))
    assert_refused(tensor(W, value), "dtype", key=W, words=f"expected float64, received {dtype}")


@pytest.mark.parametrize("array", [np.ones((8, 36), "c16"), np.ones((8, 36), "U1"), np.ones((8, 36), [("a", "f8")])])
def test_row_4_types_that_cannot_be_sent(array: Any) -> None:
    assert_refused(packed(W, Packed(_npy(array), str(array.dtype), (8, 36))), "dtype", key=W)
    assert_refused(packed(W, Packed(_npy(array), "float64", (8, 36))), "dtype", key=W)


def test_row_4_castable_types_are_cast_and_recorded() -> None:
    engine = Strangers(at(3, tensor(W, ones(8, 36).float())), Limits(castable=("float32",)))
    found = watched(build("fedavgm"), engine)
    assert found[1].row["rejected"] == {} and found[1].round.cohort.ids.tolist() == [*range(5)]
    assert engine.notes == [f"client 3: {W} cast to float64"]
    wide = watched(build("fedavgm"), Strangers(at(3, tensor(W, ones(8, 36)))))
    assert tiny.same(found[2].round.model, wide[2].round.model)


def test_row_5_a_missing_key() -> None:
    def drop(one: Arrival) -> list[Arrival]:
        return [replace(one, packed={key: item for key, item in (one.packed or {}).items() if key != W})]

    assert_refused(drop, "missing_key", key=W, names=ALGORITHMS)


@pytest.mark.parametrize(
    "name", ["model/params/2.weight", "x", "../../etc/passwd", "a\nround 9/9  accuracy 1.0", "[red]b"]
)
def test_row_6_an_extra_or_renamed_key(name: str) -> None:
    assert_refused(tensor(name, ones(8, 36)), "unknown_key", key=name)

    def rename(one: Arrival) -> list[Arrival]:
        return [replace(one, packed={name if key == W else key: item for key, item in (one.packed or {}).items()})]

    assert_refused(rename, "missing_key", key=W)


@pytest.mark.parametrize("declared", [(8, 36), (10**9,), (10**15,)], ids=str)
def test_row_7_a_huge_tensor_or_a_header_that_claims_one(declared: tuple[int, ...]) -> None:
    head = _npy(np.ones((8, 36))).replace(b"(8, 36), }        ", b"(1000000000,), }  ")
    assert b"1000000000" in head
    tracemalloc.start()
    try:
        assert_refused(packed(W, Packed(head, "float64", declared)), "shape", key=W, words="expected (8, 36)")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000_000  # all those runs together; the header asks for 8 GB
    large = altered(W, lambda item: item._replace(data=item.data + bytes(100_000)))
    assert_refused(large, "size", words="a reply of")


def test_row_8_a_container_in_place_of_an_array() -> None:
    file = io.BytesIO()
    np.savez_compressed(file, a=np.zeros(10_000_000))  # 80 MB in 80 kB
    bomb = Packed(file.getvalue()[:6000], "float64", (8, 36))
    assert_refused(packed(W, bomb), "format", key=W, words="a zip container (.npz)")
    assert_refused(packed(W, bomb._replace(data=file.getvalue())), "size", words="a reply of")


@pytest.mark.parametrize("bit", [0, 7, 300, 1000])
def test_row_9_bit_flips(bit: int) -> None:
    def flip(item: Packed) -> Packed:
        data = bytearray(item.data)
        data[-1 - bit // 8] ^= 1 << bit % 8
        return item._replace(data=bytes(data))

    assert_refused(altered(W, flip), "digest", words="truncated or changed on the way")


def test_row_9_truncation_and_facts_changed_on_the_way() -> None:
    assert_refused(altered(W, lambda item: item._replace(data=item.data[:-8])), "size", key=W, words="received 2,296")
    assert_refused(lambda one: [replace(one, examples=13)], "digest")
    unsealed = Limits(needs_digest=True)
    assert_refused(lambda one: [replace(one, digest=None)], "digest", words="without one", limits=unsealed)


def test_row_10_a_replayed_reply() -> None:
    kept: list[Arrival] = []

    def replay(arrivals: list[Arrival], now: int) -> list[Arrival]:
        if now == 0:
            kept.extend(one for one in arrivals if one.client == 3)
        if now == 1:
            return [kept[0] if one.client == 3 else one for one in arrivals]
        return arrivals

    for name in ALGORITHMS:
        kept.clear()
        found, silent = watched(build(name), Strangers(replay)), without_client_3(name)
        assert tiny.same(found[2].round.snapshot.server, silent[2].round.snapshot.server)
        assert found[1].row["rejected"] == {"stale_round": 1}
        assert found[1].row["refused"] == ["client 3 refused: stale_round: r0 < 1"]


def test_row_11_a_reply_of_the_future_or_of_another_run() -> None:
    assert_refused(lambda one: [replace(one, round=2)], "future_round", words="r2 > 1")
    assert_refused(lambda one: [replace(one, run="a\nb")], "other_run", words=f"this is '{RUN}'")


def test_row_12_a_client_that_answers_twice() -> None:
    """Its first answer counts; the second is refused even if it is the same."""
    for second in (lambda one: one, lambda one: tensor(W, ones(8, 36))(one)[0]):
        for name in ALGORITHMS:
            found = watched(build(name), Strangers(at(3, lambda one, second=second: [one, second(one)])))
            plain = watched(build(name), Strangers(lambda arrivals, _: arrivals))
            assert tiny.same(found[2].round.snapshot.server, plain[2].round.snapshot.server)
            assert found[1].row["rejected"] == {"duplicate": 1} and len(found[1].round.cohort) == 5
            assert "the first answer is kept" in found[1].row["refused"][0]


def test_row_13_one_identity_in_two_places() -> None:
    known, refusals = identities([(11, 0), (12, 1), (13, 1)], clients=3)
    assert known == {0: 11}
    assert [str(one) for one in refusals] == ["client 1 refused: identity: 2 nodes say they are client 1: 12, 13"]


BAD_EXAMPLES = [-1, 0, float("nan"), float("inf"), True, "12", None, 2.5, 10**12, 10**6000, [3], -0.0]


@pytest.mark.parametrize("number", range(len(BAD_EXAMPLES)))
def test_row_14_absurd_example_counts(number: int) -> None:
    assert_refused(lambda one: [replace(one, examples=BAD_EXAMPLES[number], digest=None)], "examples")


def test_row_14_counts_are_capped_if_so_configured() -> None:
    limits = Limits(max_examples=12, on_excess="cap")
    engine = Strangers(at(3, lambda one: [replace(one, examples=10**12, digest=None)]), limits)
    found = watched(build("fedavgm"), engine)
    plain = watched(build("fedavgm"), Strangers(lambda arrivals, _: arrivals))  # client 3 has 12 rows
    assert tiny.same(found[2].round.model, plain[2].round.model) and found[1].row["rejected"] == {}
    assert engine.notes == ["client 3: 1000000000000 rows counted as 12"]


def test_row_15_weights_that_are_all_zero() -> None:
    class Weightless(Strangers):
        def exchange(self, *args: Any, **when: Any) -> Cohort:
            cohort = super().exchange(*args, **when)
            return replace(cohort, examples=cohort.examples * 0) if when["round"] == 1 else cohort

    seen = []
    with pytest.raises(Diverged, match=r"round 2: the aggregation weights are .* all zero or not finite"):
        for one in run(build("fedavgm"), Weightless(lambda arrivals, _: arrivals), rounds=3):
            seen.append(one)
    assert [one.number for one in seen] == [1]  # the last good state is there, and goes on
    engine = Strangers(lambda arrivals, _: arrivals)
    assert len(list(run(build("fedavgm"), engine, rounds=3, resume=seen[0].snapshot))) == 2


def test_row_16_metrics_are_dropped_with_a_note_and_the_update_stays() -> None:
    bad = {"loss": float("nan"), "inf": float("inf"), "list": [0.0] * 10**6, "a\nb": 1.0, "x" * 99: 1.0, 3: 1.0}
    said: dict[Any, Any] = {**bad, "flag": True, "huge": 10**6000, "good": 2}
    engine = Strangers(at(3, lambda one: [replace(one, metrics=said)]))
    found = watched(build("fedavgm"), engine)
    plain = watched(build("fedavgm"), Strangers(lambda arrivals, _: arrivals))
    assert tiny.same(found[2].round.snapshot.server, plain[2].round.snapshot.server) and not found[1].row["rejected"]
    assert engine.notes == ["client 3: metrics dropped: 8, the first is 'loss'"]
    for odd in ([1], "text", {str(n): n for n in range(1000)}):
        engine = Strangers(at(3, lambda one, odd=odd: [replace(one, metrics=odd)]))
        assert watched(build("fedavgm"), engine)[1].row["rejected"] == {} and len(engine.notes) == 1


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "simprox", "scaffold"])
def test_row_17_a_gigantic_update_is_clipped_and_counted(name: str) -> None:
    """With a bound, one client moves the sum no further than the bound, however far it goes itself."""
    limits = Limits(max_norm=0.5)
    honest = watched(build(name), Strangers(lambda arrivals, _: arrivals), limits=limits)
    ends = []
    for power in (3, 30, 300):
        found = watched(build(name), Strangers(at(3, tensor(W, 10.0**power * ones(8, 36)))), limits=limits)
        assert found[1].row["clipped_updates"] == 1 and found[1].row["rejected"] == {}
        assert honest[1].row["clipped_updates"] == 0 and tiny.finite(found[1].round.model)
        cohort, start = found[1].round.cohort, found[0].round.model["params"]
        moved = [(cohort.reply["model"]["params"][key][3] - start[key]).square().sum() for key in start]
        assert float(torch.stack(moved).sum().sqrt()) == pytest.approx(0.5)
        ends.append(found[1].round.model)
    assert tiny.gap(ends[0], ends[2]) < 1e-2 and tiny.gap(ends[1], ends[2]) < 1e-12


def test_too_few_valid_replies_change_nothing_and_count_as_a_bad_round() -> None:
    def all_but_two(arrivals: list[Arrival], now: int) -> list[Arrival]:
        return [one if now == 0 or one.client < 2 else replace(one, examples=-1) for one in arrivals]

    found: list[Observation] = []
    engine = Strangers(all_but_two)
    observer = Observer(task=engine.task, test=None, every=0, rounds=9)
    rounds = run(build("fedavgm"), engine, rounds=9, limits=Limits(min_valid=3), max_bad_rounds=2)
    with pytest.raises(Diverged, match=r"2 rounds in a row, up to round 3, .*\(3 examples, 2 too_few, fewer than"):
        for one in observer.watch(rounds, engine.start()):
            found.append(one)
    assert [one.round.snapshot.bad_rounds for one in found] == [0, 1, 2]
    assert tiny.same(found[2].round.snapshot.server, found[0].round.snapshot.server)
    assert found[1].row["rejected"] == {"examples": 3} and found[1].row["cohort"] == []
    assert len(watched(build("fedavgm"), Strangers(all_but_two), limits=Limits(min_valid=2))) == 3


def test_a_place_outside_the_model_is_refused_and_does_not_end_the_run() -> None:
    """A channel's own numbers cannot be checked by shape and type: a sparse update that points nowhere."""
    algorithm = build("fedavgm", channel=TopK(fraction=0.1))
    for wrong in (-1, 10**6, 2**31 - 1):
        places = torch.arange(32, dtype=torch.int32)
        places[5] = wrong
        engine = Strangers(at(3, tensor("model/params/places", places)))
        found = watched(algorithm, engine)
        silent = watched(algorithm, Strangers(at(3, nobody)))
        assert found[1].row["rejected"] == {"nonfinite": 1}
        assert tiny.same(found[2].round.snapshot.server, silent[2].round.snapshot.server)


def test_bytes_and_admission_change_no_bit_of_a_run() -> None:
    for name in (*ALGORITHMS, "fedbn", "simfedswap", "fednova"):
        through = watched(build(name), Strangers(lambda arrivals, now: arrivals[::-1] if now else arrivals))
        direct = watched(build(name), tiny.engine())
        for one, other in zip(through, direct):
            assert tiny.same(one.round.snapshot.server, other.round.snapshot.server)
            assert one.row == {
                **other.row,
                "bytes_up": one.row["bytes_up"],
                "bytes_up_total": one.row["bytes_up_total"],
            }


def test_names_from_outside_cannot_forge_a_line_of_the_log() -> None:
    evil = "x\nround 3/3  accuracy 1.0000\x1b[2J[bold]"
    found = watched(build("fedavg"), Strangers(at(3, tensor(evil, ones(1)))))
    out = io.StringIO()
    list(shown(found, rounds=3, console=Console(file=out, width=500)))
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and [line.split()[0] for line in lines] == ["round", "round", "client", "round"]
    assert "\\n" in lines[2] and "[bold]" in lines[2] and "\x1b" not in out.getvalue()


# --- one client's influence on similarity weights (FAULTS G15) -------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 7), st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 10.0]), st.integers(-3, 30))
def test_g15_one_client_moves_the_model_by_its_weight_times_the_bound_at_most(
    count: int, seed: int, bound: float, power: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(9, generator=draw, dtype=torch.float64)
    models = start + 0.01 * torch.randn(count, 9, generator=draw, dtype=torch.float64)
    models[0] = start + 10.0**power * (models[0] - start)
    received = Broadcast(shared={"model": {"params": {"w": start}, "buffers": {}}})
    model, weights = merged(SIMILAR, start, screen_replies(cohort_of(models), received, Limits(max_norm=bound)))
    rest = (weights[1:, None] * (models[1:] - start)).sum(0) if power < 2 else None
    assert float((model - start).norm()) <= bound + 1e-9  # a mean of bounded moves
    if rest is not None and float((models[1:] - start).norm(dim=1).max()) <= bound:
        assert float((model - start - rest).norm()) <= float(weights[0]) * bound + 1e-9


def test_refusals_are_part_of_the_cohort_only_once() -> None:
    cohort = watched(build("fedavgm"), Strangers(at(3, tensor("x", ones(1)))))[1].round.cohort
    assert cohort.refusals == (
        Refusal(client=3, reason="unknown_key", key="x", detail="in the reply, but not expected"),
    )


def test_a_second_question_is_screened_and_who_does_not_answer_it_is_left_out() -> None:
    """Rules that look back at their trained model: client 1 falls silent then, client 3 sends NaN."""
    algorithm = build("fedfa")
    assert isinstance(algorithm.client, PostTrainingPass)

    class Forgetful:
        def __init__(self) -> None:
            self._engine = tiny.engine()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def exchange(self, client: Any, *args: Any, **when: int) -> Cohort:
            cohort = self._engine.exchange(client, *args, **when)
            if client != algorithm.client.post_training or when["round"] != 1:
                return cohort
            next(leaf for leaf in tree.leaves(cohort.reply) if leaf.is_floating_point())[3] = torch.nan
            return cohort.only(cohort.ids != 1, silent=1)

    found = watched(algorithm, Forgetful())
    assert [one.round.cohort.ids.tolist() for one in found] == [[*range(5)], [0, 2, 4], [*range(5)]]
    assert found[1].round.cohort.counts == {"silent": 1, "nonfinite": 1} and found[1].row["rejected"] == {
        "nonfinite": 1
    }
    assert all(tiny.finite(one.round.snapshot.server) for one in found)


# --- identical clients and clones (FAULTS G15, rows 19 and 60) --------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**31))
def test_g15_identical_clients_give_the_plain_average_to_the_bit(count: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    start, model = torch.randn(2, 9, generator=draw, dtype=torch.float64)
    cohort = cohort_of(model.repeat(count, 1))
    (similar, weights), (plain, uniform) = merged(SIMILAR, start, cohort), merged(PLAIN, start, cohort)
    assert torch.equal(weights, uniform) and torch.equal(similar, plain)
