"""Lanes: which way a group runs never shows in the result."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any

import numpy as np
import pytest
import rules_for_tests as parts
import tiny
import torch
from torch import nn

from consilience.algorithms.fedavg import fedavg
from consilience.core import plans
from consilience.core.plans import Work
from consilience.core.rounds import Round, run
from consilience.engines.vectorised import estimates, program, tuning
from consilience.engines.vectorised.lanes import cuda
from consilience.engines.vectorised.tuning import LaneChoice, Tuner
from consilience.environments.environment import Environment

NEVER = 10**9


def train(engine: Any, *, rounds: int = 2, **options: Any) -> list[Round]:
    return list(run(fedavg(batch_size=4, lr=0.05, **options), engine, rounds=rounds, seed=1))


@pytest.mark.parametrize("lane", ["serial", "batched", "streams"])
def test_traced_and_untraced_steps_give_the_same_bits(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over rounds, so that neither the round (a decaying rate) nor a dropout key may be baked into the trace."""
    results = []
    for hot in (NEVER, 0):
        monkeypatch.setattr(program, "HOT", hot)
        engine = tiny.engine(tiny.convnet, lane=lane, environment=Environment(steps=(2, 2, 2, 2, 2)))
        results.append(train(engine, rounds=3, lr_decay=0.5, momentum=0.9))
        (made,) = engine._programs.values()
        steps = made.group if lane == "batched" else made.one
        assert bool(steps.traced) == (hot == 0)
    for plain, traced in zip(*results):
        assert tiny.same(plain.model, traced.model)
        assert tiny.same(plain.cohort.reply, traced.cohort.reply)


def test_a_step_becomes_hot_in_the_middle_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for hot in (NEVER, 3):
        monkeypatch.setattr(program, "HOT", hot)
        engine = tiny.engine(lane="serial", environment=Environment(steps=(7, 6, 0, 5, 4)))
        results.append(train(engine, momentum=0.5)[-1].model)
    assert tiny.same(*results)


def test_traces_of_one_group_size_do_not_serve_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "HOT", 0)
    engine = tiny.engine(lane="batched", clients_at_once=3)
    traced = train(engine)
    monkeypatch.setattr(program, "HOT", NEVER)
    assert tiny.same(train(tiny.engine(lane="batched", clients_at_once=3))[-1].model, traced[-1].model)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_threads_with_many_clients_give_one_result(workers: int) -> None:
    """The same bits for any number of workers, and the serial lane's numbers (which pads nothing) to rounding."""
    data = tiny.federation(tuple(1 + (7 * k) % 11 for k in range(40)))
    (expected,) = train(tiny.engine(tiny.convnet, data), rounds=1)
    (alone,) = train(tiny.engine(tiny.convnet, data, lane="streams", workers=1), rounds=1)
    (got,) = train(tiny.engine(tiny.convnet, data, lane="streams", workers=workers), rounds=1)
    assert tiny.same(got.cohort.reply, alone.cohort.reply) and tiny.same(got.model, alone.model)
    assert tiny.gap(got.cohort.reply, expected.cohort.reply) <= 1e-12
    assert tiny.gap(got.model, expected.model) <= 1e-12


@pytest.mark.usefixtures("untraced")
def test_threads_really_work_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each on its own copy of the module, since functional_call swaps values in and out of it."""
    seen: dict[int, Any] = {}
    together = threading.Barrier(2, timeout=20)  # breaks unless two workers are inside at the same time

    def step(self: Any, task: Any, carry: Any, batch: Any, message: Any, memory: Any) -> Any:
        together.wait()
        seen[threading.get_ident()] = task._replica(True)
        return carry

    monkeypatch.setattr(parts.Remembering, "step", step)
    engine = tiny.engine(data=tiny.federation((4, 4)), lane="streams", workers=2)
    list(run(parts.remembering(), engine, rounds=1))
    assert len(seen) == 2 and len({id(module) for module in seen.values()}) == 2


@pytest.mark.usefixtures("untraced")
def test_an_error_in_a_worker_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: Any) -> Any:
        raise ZeroDivisionError("in the client")

    monkeypatch.setattr(parts.Remembering, "step", step)
    with pytest.raises(ZeroDivisionError, match="in the client"):
        list(run(parts.remembering(), tiny.engine(lane="streams"), rounds=1))


def test_streams_do_not_change_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    train(tiny.engine(lane="streams", workers=2), rounds=1)
    assert torch.get_num_threads() == before


# --- measuring -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TRIAL_SECONDS", 0.01)


@pytest.fixture
def no_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for steps that do not run outside Python's lock: no lane is left out after a few steps."""
    monkeypatch.setattr(Tuner, "_glance", lambda *_: 0.0)


@pytest.mark.usefixtures("quick")
def test_auto_measures_once_and_records_its_choice() -> None:
    engine = tiny.engine(lane="auto", clients_at_once=None)
    assert engine.choice == LaneChoice(lane="auto", clients_at_once=None)
    rounds = run(fedavg(batch_size=4, lr=0.05), engine, rounds=3, seed=1)
    first = next(rounds)
    choice = engine.choice
    assert choice.lane in ("batched", "streams", "serial")
    assert choice.clients_at_once is not None and choice.clients_at_once >= 1
    recorded = json.loads(json.dumps(dataclasses.asdict(choice)))
    assert recorded == {"lane": choice.lane, "clients_at_once": choice.clients_at_once, "compile": False}
    list(rounds)
    assert engine.choice is choice, "measured once only"
    again = tiny.engine(**recorded)
    assert tiny.same(train(again, rounds=1)[0].model, first.model), "a recorded choice repeats the run bit by bit"


@pytest.mark.usefixtures("quick", "no_glance")
def test_measuring_takes_the_fastest_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(Tuner, "_slow_step", lambda *_: False)  # a busy machine would leave batching out
    for best in ("batched", "streams", "serial"):
        rates = {"batched": 1.0, "streams": 1.0, "serial": 1.0, best: 2.0}
        monkeypatch.setattr(Tuner, "_rate", lambda self, name, *_, rates=rates: rates[name])
        engine = tiny.engine(lane="auto")
        train(engine, rounds=1)
        assert engine.choice.lane == best


@pytest.mark.usefixtures("quick", "no_glance")
@pytest.mark.parametrize(("serial", "wanted"), [(1.09, "streams"), (1.11, "serial")])
def test_serial_must_be_ten_per_cent_faster_to_be_chosen(
    serial: float, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(Tuner, "_slow_step", lambda *_: True)  # batching is left out
    monkeypatch.setattr(tuning, "balance", lambda steps, cores: 1.0)
    rates = {"streams": 1.0, "serial": serial}
    monkeypatch.setattr(Tuner, "_rate", lambda self, name, *_: rates[name])
    engine = tiny.engine(lane="auto")
    train(engine, rounds=1)
    assert engine.choice.lane == wanted


def equal_clients(**options: Any) -> Any:
    """An engine for eight equal clients that uses two cores."""
    return tiny.engine(data=tiny.federation((8,) * 8), lane="auto", workers=2, **options)


def test_streams_are_taken_without_trials_where_nothing_else_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other lanes are not even traced: on a busy machine their trials took most of the start-up."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(tuning, "SLOW_UNLOCKED_STEP", 0.0)
    monkeypatch.setattr(Tuner, "_rate", lambda *_: pytest.fail("a lane was measured"))
    drawn: list[int] = []
    draw = plans.draw
    monkeypatch.setattr(plans, "draw", lambda *given, **named: drawn.append(len(given[2])) or draw(*given, **named))
    engine = equal_clients(clients_at_once=None)
    train(engine, rounds=1)
    assert engine.choice.lane == "streams"
    assert drawn == [1, 8], "one client's, to find out what fits, and the plan of the round"
    (made,) = engine._programs.values()
    assert made.one.unlocked and not made.group.traced


@pytest.mark.parametrize(
    ("suffices", "slow", "ahead", "wanted"),
    [
        (True, 0.0, None, ["streams"]),
        (False, 0.0, None, ["streams", "serial"]),
        (True, 1e9, None, ["streams", "batched"]),
        (True, 1e9, 1, ["streams"]),
        (False, 1e9, 10**9, ["streams", "serial", "batched"]),
    ],
)
def test_after_a_few_steps_only_lanes_that_may_win_are_measured(
    suffices: bool, slow: float, ahead: int | None, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(tuning, "threads_suffice", lambda *_: suffices)
    monkeypatch.setattr(tuning, "SLOW_UNLOCKED_STEP", slow)
    monkeypatch.setattr(Tuner, "_whole_rate", lambda self, name, rate, *_: rate)
    rate_of = {"streams": 2.0, "serial": 1.0, "batched": 1.0}
    monkeypatch.setattr(Tuner, "_rate", lambda self, name, *_: seen.append(name) or rate_of[name])
    engine = equal_clients(rounds_ahead=ahead)
    train(engine, rounds=1)
    assert (seen or ["streams"]) == wanted and engine.choice.lane == "streams"


def test_steps_that_hold_pythons_lock_are_compared_by_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("consilience.engines.compiler.in_place.without_lock", lambda *_: None)
    monkeypatch.setattr(Tuner, "_slow_step", lambda *_: True)
    monkeypatch.setattr(Tuner, "_rate", lambda self, name, *_: seen.append(name) or 1.0)
    train(equal_clients(), rounds=1)
    assert seen == ["streams", "serial"]


@pytest.mark.parametrize(
    ("sizes", "carry", "cores", "wanted"),
    [
        ((8, 8, 8, 8), 2**20, 2, True),
        ((8, 8, 8), 2**20, 2, False),  # a core is idle for a quarter of the time
        ((8, 8, 8, 8), 2**24, 2, False),  # the cache may not hold two models
        ((8, 8, 8, 8), 2**20, 32, False),
        ((5, 5, 5, 5), 2**20, 2, False),  # the second batch of each is one row and three of padding
    ],
)
def test_when_clients_side_by_side_are_sure_to_be_faster(
    sizes: tuple[int, ...], carry: int, cores: int, wanted: bool
) -> None:
    engine = tiny.engine(data=tiny.federation(sizes))
    steps = np.array([-(-size // 4) for size in sizes])
    plan = engine.plan(Work(batch_size=4), np.arange(len(sizes)), steps, round=0, seed=1)
    assert estimates.threads_suffice(plan, carry, cores) is wanted


@pytest.mark.usefixtures("quick", "no_glance")
@pytest.mark.parametrize("best", ["streams", "serial"])
def test_trials_of_other_lanes_do_not_change_a_lanes_bits(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread and several run a step in different ways: neither may be given the other's."""
    layers = lambda: (nn.Flatten(), nn.Linear(36, 1024), nn.ReLU(), nn.Linear(1024, 64), nn.Linear(64, 3))  # noqa: E731
    wide = lambda: tiny.seeded(lambda: nn.Sequential(*layers()))  # noqa: E731
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(Tuner, "_slow_step", lambda *_: True)
    rate = Tuner._rate
    monkeypatch.setattr(
        Tuner, "_rate", lambda self, name, *given: rate(self, name, *given) * (1e9 if name == best else 1)
    )
    options: dict[str, Any] = {"data": tiny.federation((8,) * 6), "dtype": "float32"}
    auto = tiny.engine(wide, lane="auto", **options)
    measured = train(auto, rounds=2)
    assert auto.choice.lane == best
    assert tiny.same(measured[-1].model, train(tiny.engine(wide, lane=best, **options), rounds=2)[-1].model)


def test_steps_are_traced_in_a_worker_whose_operations_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int]] = []
    trace = program.trace

    def noted(*given: Any) -> Any:
        seen.append((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return trace(*given)

    monkeypatch.setattr(program, "HOT", 0)
    monkeypatch.setattr(program, "trace", noted)
    train(tiny.engine(lane="streams"), rounds=1)
    assert seen and set(seen) == {(False, 1)}


def test_the_longest_client_goes_first_to_the_slot_with_least_work() -> None:
    # 9 -> slot 0, 7 -> slot 1, 5 -> slot 1 (7 < 9), 4 -> slot 0 (9 < 12), 1 -> slot 1 (12 < 13); ties keep their order
    assert cuda._balanced(np.array([4, 9, 1, 7, 5]), 2) == [[1, 0], [3, 4, 2]]
    assert cuda._balanced(np.array([3, 3, 3]), 3) == [[0], [1], [2]]


@pytest.mark.usefixtures("quick", "untraced")
def test_a_lane_that_cannot_run_the_model_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(*_: Any) -> Any:
        raise RuntimeError("no batching rule for this operator")

    monkeypatch.setattr("consilience.engines.vectorised.lanes.cpu.Batched.fold", fold)
    monkeypatch.setattr("consilience.engines.vectorised.lanes.cpu.Threads.fold", fold)
    engine = tiny.engine(lane="auto")
    train(engine, rounds=1)
    assert engine.choice.lane == "serial"


@pytest.mark.usefixtures("quick", "untraced")
def test_measuring_leaves_no_trace_in_memories() -> None:
    rounds = list(run(parts.remembering(), tiny.engine(lane="auto", clients_at_once=None), rounds=2))
    assert [one.snapshot.memory["client"]["visits"].tolist() for one in rounds] == [[1] * 5, [2] * 5]


@pytest.mark.usefixtures("untraced")
def test_one_client_runs_serially_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "_time", lambda *_: pytest.fail("a lane was measured"))
    engine = tiny.engine(data=tiny.federation((9,)), lane="auto")
    train(engine, rounds=1)
    assert engine.choice.lane == "serial"


@pytest.mark.usefixtures("untraced")
def test_a_lane_that_was_asked_for_is_kept() -> None:
    for lane in ("batched", "streams", "serial"):
        engine = tiny.engine(lane=lane, clients_at_once=None)
        train(engine, rounds=1)
        assert engine.choice.lane == lane


def test_groups_are_nearly_equal_and_keep_the_order() -> None:
    for clients in (1, 2, 5, 7, 64, 100):
        for most in (1, 2, 3, 10, 64, 1000):
            tuner = Tuner(torch.device("cpu"), LaneChoice(lane="serial", clients_at_once=most), None)
            groups = list(tuner.groups(np.arange(clients)[::-1]))
            assert np.concatenate(groups).tolist() == list(range(clients))[::-1]
            sizes = [len(group) for group in groups]
            assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
            assert len(groups) == -(-clients // most)


def test_how_many_clients_fit_depends_on_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = []
    for free in (1, 10**6, 10**12):
        monkeypatch.setattr(estimates, "_free", lambda _, free=free: free)
        engine = tiny.engine(tiny.convnet, clients_at_once=None)
        train(engine, rounds=1)
        fits.append(engine.choice.clients_at_once)
    assert fits[0] == 1 and fits[0] < fits[1] < fits[2] == 4096


@pytest.mark.usefixtures("quick", "no_glance")
def test_batching_is_judged_by_a_whole_pass_where_that_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients finish one after the other: a few equal steps flatter the lane that does them at once."""
    asked: list[int] = []

    def slow_as_a_whole(
        self: Tuner, name: str, rate: float, program: Any, store: Any, group: Any, prepare: Any
    ) -> float:
        asked.append(len(group))
        return rate * 1e-9

    monkeypatch.setattr(Tuner, "_slow_step", lambda *_: False)
    monkeypatch.setattr(Tuner, "_whole_rate", slow_as_a_whole)
    engine = tiny.engine(lane="auto", clients_at_once=None)
    train(engine, rounds=1)
    assert asked == [len(tiny.SIZES)] and engine.choice.lane != "batched"


@pytest.mark.parametrize(("best", "runs"), [(0.0, 5), (99.0, 5), (101.0, 2)])
def test_a_lane_that_is_out_of_reach_is_measured_no_further(
    best: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def time_of(self: Tuner, *given: Any) -> tuple[float, int]:
        made.append(given[-1])
        return 0.1, 5

    monkeypatch.setattr(Tuner, "_time", time_of)
    engine = tiny.engine()
    (rule,) = [fedavg().client]
    made_program = engine.program(rule, fedavg().channel)
    rate = engine._tuner._rate("serial", False, made_program, engine.store("train"), np.arange(2), None, best)  # type: ignore[arg-type]
    assert (len(made), rate) == (runs, 50.0)


@pytest.mark.parametrize(("rate", "timed"), [(1e-3, 0), (1e9, 2)])
def test_a_whole_pass_is_timed_only_where_it_is_quick(rate: float, timed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    def time_of(self: Tuner, *given: Any) -> tuple[float, int]:
        passes.append(given[-1])
        return 0.5, 100

    plan = type("Plan", (), {"live": np.array([[4, 4], [4, 0]]), "steps": np.array([2, 1])})
    monkeypatch.setattr(Tuner, "_time", time_of)
    tuner = Tuner(torch.device("cpu"), LaneChoice(lane="auto"), None)
    found = tuner._whole_rate("batched", rate, None, None, np.arange(2), lambda *_: (None, None, plan))  # type: ignore[arg-type]
    assert (len(passes), found) == (timed, 200.0 if timed else rate)
    assert set(passes) <= {2}, "all steps of the longest client"


@pytest.mark.parametrize(
    ("steps", "cores", "wanted"),
    [([3, 3], 2, 1.0), ([5], 2, 0.5), ([9, 6, 5, 4], 2, 24 / 26), ([7, 5, 1, 1], 4, 14 / 28), ([8, 3], 1, 1.0)],
)
def test_a_core_may_be_left_without_a_client(steps: list[int], cores: int, wanted: float) -> None:
    assert estimates.balance(np.array(steps), cores) == pytest.approx(wanted, rel=1e-12)


def test_a_group_that_narrows_trains_fewer_rows_a_second() -> None:
    # four at once: 10 rows/s each, a step of 0.1 s; one alone: 25 rows/s, 0.04 s; so 0.02 s for each further client
    assert estimates.narrowing(40.0, 4, 25.0, np.array([5, 5, 5, 5])) == pytest.approx(40.0)
    # widths 4, 3, 1, 1, 1: 0.1 + 0.08 + 3 x 0.04 s for ten steps
    assert estimates.narrowing(40.0, 4, 25.0, np.array([5, 2, 2, 1])) == pytest.approx(10 / 0.3 / estimates.NARROWING)
    # eight clients where four were tried: 0.18 s a step
    assert estimates.narrowing(40.0, 4, 25.0, np.array([3] * 8)) == pytest.approx(8 / 0.18)
    # nobody knows what one alone takes: as much as its share
    assert estimates.narrowing(40.0, 4, 0.0, np.array([5, 2, 2, 1])) == pytest.approx(40.0 / estimates.NARROWING)
    # one alone is slower than four at once: then a narrow step saves nothing
    assert estimates.narrowing(40.0, 4, 5.0, np.array([5, 2])) == pytest.approx(7 / 0.5 / estimates.NARROWING)


@pytest.mark.usefixtures("quick", "no_glance")
def test_lanes_are_compared_over_the_whole_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long clients and three short ones: batching wins on the first steps, and loses on the others."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(Tuner, "_slow_step", lambda *_: False)
    monkeypatch.setattr(Tuner, "_whole_rate", lambda self, name, rate, *_: rate)
    rates = {"batched": 40.0, "streams": 38.0, "serial": 20.0}
    monkeypatch.setattr(Tuner, "_rate", lambda self, name, *_: rates[name])
    for sizes, best in (((60, 60, 60, 60, 60), "batched"), ((60, 60, 4, 4, 4), "streams")):
        engine = tiny.engine(data=tiny.federation(sizes), lane="auto")
        train(engine, rounds=1)
        assert engine.choice.lane == best


@pytest.mark.usefixtures("no_glance")
@pytest.mark.parametrize(("ahead", "tried"), [(None, True), (1, False), (10**6, True)])
def test_batching_is_only_tried_where_it_may_save_the_trial(
    ahead: int | None, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(Tuner, "_slow_step", lambda *_: False)
    monkeypatch.setattr(Tuner, "_whole_rate", lambda self, name, rate, *_: rate)
    monkeypatch.setattr(Tuner, "_rate", lambda self, name, *_: seen.append(name) or 1000.0)
    train(tiny.engine(lane="auto", rounds_ahead=ahead), rounds=1)
    assert ("batched" in seen) is tried and {"streams", "serial"} < {*seen, ""}


@pytest.mark.parametrize(
    ("masked", "wanted"),
    [
        ("", []),
        ("....." * 5, [(False, 16), (False, 4), (False, 4), (False, 1)]),
        ("....m", [(False, 4), (True, 1)]),
        ("mm...m", [(True, 1), (True, 1), (False, 1), (False, 1), (False, 1), (True, 1)]),
    ],
)
def test_steps_are_cut_into_few_graphs_with_masked_ones_alone(masked: str, wanted: list[tuple[bool, int]]) -> None:
    flags = np.array([letter == "m" for letter in masked], dtype=bool)
    found = list(cuda.chunks(flags, (16, 4, 1)))
    assert found == wanted
    assert [flag for flag, times in found for _ in range(times)] == flags.tolist()
