"""What is let in front of the server rule, piece by piece; the table of faults is in tests/faults/test_replies.py."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.refusal import tally
from consilience.core.screening import Limits, if_enough, screen_replies
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.wire.admission import Arrival, Refusal, Refused, Template, admit, identities
from consilience.wire.arrays import digest

START = {"params": {"w": torch.zeros(3, 2), "b": torch.zeros(())}, "buffers": {"n": torch.tensor(0)}}


def reply(value: float = 1.0, **more: Any) -> Tree:
    model = {"params": {"w": torch.full((3, 2), value), "b": torch.tensor(value)}, "buffers": {"n": torch.tensor(4)}}
    return {"model": model, "loss": torch.tensor(0.5), "extra": {}, **more}


TEMPLATE = Template.of(reply())


def arrival(client: Any = 0, value: float = 1.0, **more: Any) -> Arrival:
    return Arrival(**{"client": client, "round": 2, "examples": 10, "run": "r", "reply": reply(value), **more})


def let_in(*arrivals: Arrival, **options: Any) -> Any:
    options = {"template": TEMPLATE, "round": 2, "run": "r", "asked": range(5), **options}
    return admit(arrivals, **options)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_refusal_is_one_line_that_names_client_reason_and_key() -> None:
    refusal = Refusal(client=3, reason="shape", key="model/params/w", detail="expected (3, 2), received ()")
    assert str(refusal) == "client 3 refused: shape in model/params/w: expected (3, 2), received ()"
    assert str(Refused("shape", key="w", detail="no").by(3)) == "client 3 refused: shape in w: no"


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_a_refusal_cannot_forge_a_line(client: str, key: str, detail: str) -> None:
    said = str(Refusal(client=client, reason="unknown_key", key=key, detail=detail))
    assert said.isprintable() and len(said.splitlines()) == 1
    assert len(str(Refusal(client="x" * 10**5, reason="r", key="y" * 10**5, detail="z" * 10**5))) < 600


def test_refusals_are_counted_by_reason() -> None:
    refusals = [Refusal(client=k, reason=why) for k, why in enumerate(["shape", "nonfinite", "shape"])]
    assert tally(refusals) == {"nonfinite": 1, "shape": 2} and list(tally(refusals)) == ["nonfinite", "shape"]


# --- templates -------------------------------------------------------------------------------------------------------


def test_a_template_is_of_one_reply_even_without_values() -> None:
    meta = tree.to(reply(), "meta")
    assert Template.of(meta) == TEMPLATE and TEMPLATE.nbytes == 24 + 4 + 8 + 4
    assert TEMPLATE.leaves["model/params/w"] == ((3, 2), torch.float32) and TEMPLATE.empty == ("extra",)


def test_a_sound_reply_comes_out_in_the_template_s_order() -> None:
    sent = reply(2.0)
    shuffled = {"extra": {}, "loss": sent["loss"], "model": dict(reversed(sent["model"].items()))}
    back = TEMPLATE.check(shuffled)
    assert tiny.same(back, sent) and list(tree.flatten(back)) == list(TEMPLATE.leaves) and back["extra"] == {}
    assert tiny.same(TEMPLATE.read(TEMPLATE.pack(sent)), sent)


@pytest.mark.parametrize(
    ("value", "reason", "words"),
    [
        (torch.zeros(()), "shape", r"model/params/w: expected \(3, 2\), received \(\)"),
        (torch.zeros(1, 2), "shape", r"received \(1, 2\)"),
        (torch.zeros(3, 2, dtype=torch.float64), "dtype", "expected float32, received float64"),
        (torch.zeros(3, 2, dtype=torch.int64), "dtype", "received int64"),
        (torch.zeros(3, 2, dtype=torch.complex64), "dtype", "received complex64"),
        (torch.tensor([[1, 2], [3, float("nan")], [5, 6]]), "nonfinite", "1 of 6 values, NaN among them"),
        (torch.full((3, 2), float("-inf")), "nonfinite", "6 of 6 values, infinite among them"),
        (torch.zeros(3, 2).to_sparse(), "format", "sparse"),
        (torch.zeros(3, 2, device="meta"), "format", "without values"),
        (np.zeros((3, 2)), "format", "ndarray is no tree of tensors"),
        ("text", "format", "str is no tree"),
        ({"inner": torch.zeros(3, 2)}, "missing_key", "model/params/w"),
    ],
)
def test_what_differs_is_named(value: Any, reason: str, words: str) -> None:
    sent = reply()
    sent["model"]["params"]["w"] = value
    with pytest.raises(Refused, match=words) as problem:
        TEMPLATE.check(sent)
    assert problem.value.reason == reason and problem.value.key.startswith("model/params/w")


@pytest.mark.parametrize("sent", [None, [], "x", {1: torch.zeros(1)}, {"": {}}, {"a/b": torch.zeros(1)}])
def test_what_is_no_reply_at_all(sent: Any) -> None:
    with pytest.raises(Refused):
        TEMPLATE.check(sent)
    endless: Tree = {}
    endless["a"] = endless
    with pytest.raises(Refused, match="nested more than"):
        TEMPLATE.check(endless)


def test_castable_types_are_cast_and_recorded() -> None:
    sent = reply()
    sent["model"]["params"]["w"] = torch.full((3, 2), 1.5, dtype=torch.float64)
    back, casts = TEMPLATE.check_casting(sent, ("float64",))
    assert casts == ("model/params/w",) and back["model"]["params"]["w"].dtype == torch.float32
    assert TEMPLATE.check(TEMPLATE.read(TEMPLATE.pack(sent), ("float64",)), ("float64",))["loss"] == 0.5
    with pytest.raises(Refused, match="expected float32, received float64"):
        TEMPLATE.read(TEMPLATE.pack(sent), ("float16",))
    sent["model"]["params"]["w"] = torch.full((3, 2), 1e300, dtype=torch.float64)  # finite only before the cast
    with pytest.raises(Refused, match="nonfinite"):
        TEMPLATE.check(sent, ("float64",))
    sent["model"]["params"]["w"] = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(Refused, match="received int64"):
        TEMPLATE.check(sent, ("float64",))  # whole numbers never


# --- arrivals --------------------------------------------------------------------------------------------------------


def test_arrivals_become_a_cohort_in_client_order() -> None:
    found, refusals = let_in(arrival(4, 4.0, examples=7, steps=3), arrival(1, 1.0), arrival(3, 3.0, steps=0))
    assert refusals == [] and found.ids.tolist() == [1, 3, 4] and found.examples.tolist() == [10, 10, 7]
    cohort = found.cohort(round=2, seed=5, counts={"silent": 2})
    assert cohort.reply["model"]["params"]["b"].tolist() == [1, 3, 4] and cohort.steps.tolist() == [1, 0, 3]
    assert cohort.counts == {"silent": 2} and cohort.refusals == () and (cohort.round, cohort.seed) == (2, 5)
    assert cohort.examples.dtype == torch.float64 and cohort.ids.dtype == np.int64 and cohort.reply["extra"] == {}


def test_nobody_arrives() -> None:
    found, refusals = let_in()
    assert refusals == [] and len(found.cohort(round=2)) == 0 and found.reply == {}


def test_order_of_arrival_changes_nothing() -> None:
    """100 permutations of 8 arrivals, two of them bad, give one digest and one list of refusals (FAULTS G8)."""
    arrivals = [arrival(k, 1 / (k + 1)) for k in range(6)]
    arrivals += [arrival(6, float("nan")), arrival(7, 1.0, examples=-1)]
    draw, seen = random.Random(0), set()
    for _ in range(100):
        draw.shuffle(arrivals)
        found, refusals = let_in(*arrivals, asked=range(8))
        seen.add((digest(found.reply), tuple(found.ids), tuple(map(str, refusals)), tuple(found.examples.tolist())))
    assert len(seen) == 1
    assert [(r.client, r.reason) for r in refusals] == [(6, "nonfinite"), (7, "examples")]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"round": 1}, "stale_round"),
        ({"round": 3}, "future_round"),
        ({"round": -1}, "round"),
        ({"round": True}, "round"),
        ({"round": "2"}, "round"),
        ({"round": None}, "round"),
        ({"round": 10**6000}, "round"),
        ({"run": "other"}, "other_run"),
        ({"run": None}, "other_run"),
        ({"client": 5}, "unasked"),
        ({"client": "0"}, "unasked"),
        ({"client": -1}, "unasked"),
        ({"steps": -1}, "steps"),
        ({"steps": 2.5}, "steps"),
        ({"steps": 10**12}, "steps"),
        ({"steps": float("nan")}, "steps"),
        ({"reply": None}, "format"),
        ({"packed": {}}, "missing_key"),
        ({"packed": 3}, "format"),
        ({"digest": "0" * 64}, "digest"),
        ({"client": 10**6000}, "unasked"),
        ({"client": None}, "unasked"),
        ({"client": float("nan")}, "unasked"),
        ({"steps": 10**6000}, "steps"),
    ],
)
def test_an_arrival_that_was_not_asked_for_or_lies(more: dict[str, Any], reason: str) -> None:
    found, refusals = let_in(arrival(1), replace(arrival(0), **more))
    assert [r.reason for r in refusals] == [reason] and found.ids.tolist() == [1]
    assert str(refusals[0]).isprintable() and found.cohort(round=2).counts == {reason: 1}


def test_as_many_rows_and_steps_as_the_limits_say_are_let_in_and_no_more() -> None:
    limits = Limits(max_examples=10, max_steps=5)
    at_most = replace(arrival(0), examples=10, steps=5)
    found, refusals = let_in(at_most, limits=limits)
    assert refusals == [] and found.notes == () and found.examples.tolist() == [10] and found.steps.tolist() == [5]
    for more, reason in (({"examples": 11}, "examples"), ({"steps": 6}, "steps")):
        found, refusals = let_in(replace(at_most, **more), limits=limits)
        assert [r.reason for r in refusals] == [reason] and len(found.ids) == 0
    found, refusals = let_in(replace(at_most, examples=11), limits=replace(limits, on_excess="cap"))
    assert refusals == [] and found.examples.tolist() == [10]
    assert found.notes == ("client 0: 11 rows counted as 10",)


def test_at_most_one_reply_of_a_client_counts() -> None:
    found, refusals = let_in(arrival(0, 1.0), arrival(0, 9.0), arrival(0, 8.0))
    assert [r.reason for r in refusals] == ["duplicate"] * 2 and found.reply["model"]["params"]["b"].tolist() == [1]
    found, refusals = let_in(arrival(0, float("nan")), arrival(0, 2.0))  # a broken transfer, then a good one
    assert [r.reason for r in refusals] == ["nonfinite"] and found.reply["model"]["params"]["b"].tolist() == [2]


def test_digests_cover_the_reply_and_what_is_said_about_it() -> None:
    sent = arrival(0)
    sealed = replace(sent, digest=digest(sent.reply, *sent.facts))
    assert let_in(sealed, limits=Limits(needs_digest=True))[1] == []
    packed = replace(sealed, reply=None, packed=TEMPLATE.pack(sent.reply))
    assert let_in(packed, limits=Limits(needs_digest=True))[1] == []
    for changed in (replace(packed, examples=11), replace(packed, steps=2), replace(sent, digest=None)):
        _, refusals = let_in(changed, limits=Limits(needs_digest=True))
        assert [r.reason for r in refusals] == ["digest"]


def test_a_digest_is_of_what_was_sent_before_any_cast() -> None:
    sent = arrival(0, reply=tree.cast_floating(reply(0.1), torch.float64))
    found, refusals = let_in(
        replace(sent, digest=digest(sent.reply, *sent.facts)), limits=Limits(castable=("float64",))
    )
    assert refusals == [] and found.reply["loss"].dtype == torch.float32
    assert found.notes == tuple(
        f"client 0: {path} cast to float32" for path in sorted(TEMPLATE.leaves) if not path.endswith("/n")
    )


@pytest.mark.parametrize(
    "bad", [{"max_norm": 0.0}, {"min_valid": 0}, {"castable": ("int64",)}, {"on_excess": "ignore"}]
)
def test_limits_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=f"Limits.{next(iter(bad))}"):
        Limits(**bad)


# --- identities ------------------------------------------------------------------------------------------------------


def test_two_nodes_with_one_identity_are_both_kept_out() -> None:
    claims = [("n1", 0), ("n2", 1), ("n3", 1), ("n4", 2), ("n4", 2), ("n5", 7), ("n6", "0"), ("n7", True)]
    for order in itertools.islice(itertools.permutations(claims), 0, 40000, 997):
        known, refusals = identities(order, 3)
        assert known == {0: "n1", 2: "n4"}
        assert sorted(str(r.client) for r in refusals) == ["1", "n5", "n6", "n7"]
        assert "2 nodes say they are client 1: n2, n3" in " ".join(map(str, refusals))


# --- screening -------------------------------------------------------------------------------------------------------


def cohort_of(w: torch.Tensor, **buffers: torch.Tensor) -> Cohort:
    count = len(w)
    return Cohort(
        reply={"model": {"params": {"w": w}, "buffers": buffers}, "loss": torch.zeros(count)},
        ids=np.arange(count) + 10,
        examples=torch.ones(count, dtype=torch.float64),
        steps=np.ones(count, dtype=np.int64),
        round=0,
    )


def sent(w: torch.Tensor, **buffers: torch.Tensor) -> Broadcast:
    return Broadcast(shared={"model": {"params": {"w": w}, "buffers": buffers}})


def test_screening_names_the_client_and_the_key() -> None:
    w = torch.zeros(3, 2)
    w[1, 1] = torch.inf
    found = screen_replies(cohort_of(w, mean=torch.tensor([0.0, torch.nan, torch.nan])))
    assert [(r.client, r.reason, r.key) for r in found.refusals] == [
        (11, "nonfinite", "model/params/w"),
        (12, "nonfinite", "model/buffers/mean"),
    ]
    assert found.ids.tolist() == [10] and found.counts == {"nonfinite": 2}


def test_too_few_replies_are_none() -> None:
    cohort = cohort_of(torch.zeros(2, 2))
    assert if_enough(cohort, None) is cohort and if_enough(cohort, Limits(min_valid=2)) is cohort
    assert len(if_enough(cohort, Limits(min_valid=3))) == 0
    assert if_enough(cohort, Limits(min_valid=3)).counts == {"too_few": 2}


def test_long_updates_are_shortened_and_the_others_keep_their_bits() -> None:
    start = torch.tensor([1.0, 1.0])
    w = torch.tensor([[4.0, 5.0], [1.1, 1.2], [1.0, 1.0]])  # moves of length 5, 0.22 and 0
    found = screen_replies(cohort_of(w), sent(start), Limits(max_norm=0.5))
    torch.testing.assert_close(found.reply["model"]["params"]["w"][0], torch.tensor([1.3, 1.4]))
    assert torch.equal(found.reply["model"]["params"]["w"][1:], w[1:]) and found.counts == {"clipped_updates": 1}
    loose = cohort_of(w)
    assert screen_replies(loose, sent(start), Limits(max_norm=5.1)) is loose


def test_buffers_are_bounded_alike_and_counters_left_alone() -> None:
    cohort = cohort_of(torch.zeros(2, 2), mean=torch.tensor([[3.0, 4.0], [0.0, 0.1]]), n=torch.tensor([5, 10**9]))
    found = screen_replies(cohort, sent(torch.zeros(2), mean=torch.zeros(2), n=torch.tensor(0)), Limits(max_norm=1.0))
    torch.testing.assert_close(found.reply["model"]["buffers"]["mean"], torch.tensor([[0.6, 0.8], [0.0, 0.1]]))
    assert found.reply["model"]["buffers"]["n"].tolist() == [5, 10**9] and found.counts == {"clipped_updates": 1}


def test_updates_are_measured_from_what_each_was_sent_after_others_were_refused() -> None:
    own = Broadcast(
        shared={}, personal={"model": {"params": {"w": torch.tensor([[0.0], [50.0], [100.0]])}, "buffers": {}}}
    )
    found = screen_replies(cohort_of(torch.tensor([[0.5], [torch.nan], [103.0]])), own, Limits(max_norm=1.0))
    assert found.reply["model"]["params"]["w"].tolist() == [[0.5], [101.0]]
    assert found.counts == {"nonfinite": 1, "clipped_updates": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_holds_for_the_largest_numbers_there_are(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    start = torch.full((4,), -most, dtype=dtype)
    w = torch.stack([-start, start, torch.zeros(4, dtype=dtype)])
    found = screen_replies(cohort_of(w), sent(start), Limits(max_norm=most / 4))
    moved = found.reply["model"]["params"]["w"].double() / most + 1  # in units of the largest
    torch.testing.assert_close(moved.norm(dim=1), torch.tensor([0.25, 0, 0.25], dtype=torch.float64))
    assert found.counts == {"clipped_updates": 2} and tiny.finite(found.reply)


@settings(max_examples=200, deadline=None)
@given(st.integers(-40, 40), st.integers(1, 6), st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_no_update_is_longer_than_the_bound(power: int, count: int, bound: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(7, generator=draw, dtype=torch.float64)
    w = start + 10.0**power * torch.randn(count, 7, generator=draw, dtype=torch.float64)
    found = screen_replies(cohort_of(w), sent(start), Limits(max_norm=bound))
    lengths = (found.reply["model"]["params"]["w"] - start).norm(dim=1)
    assert bool((lengths <= bound * (1 + 1e-9) + 1e-14).all())
    assert found.counts.get("clipped_updates", 0) == int(((w - start).norm(dim=1) > bound).sum())


def test_a_bound_without_a_model_is_refused() -> None:
    cohort = cohort_of(torch.zeros(2, 2))
    with pytest.raises(Invalid, match=r"limits\.max_norm = 1 bounds the update of a model.*leave it out"):
        screen_replies(replace(cohort, reply={"loss": torch.zeros(2)}), sent(torch.zeros(2)), Limits(max_norm=1.0))
    with pytest.raises(Invalid, match=r"limits\.max_norm"):
        screen_replies(cohort, Broadcast(shared={"dual": torch.zeros(2)}), Limits(max_norm=1.0))
