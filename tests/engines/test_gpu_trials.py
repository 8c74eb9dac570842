"""Choosing a lane, a group size and compilation from rates, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from consilience.engines.vectorised.gpu_trials import COMPILE_SECONDS, Trials, group_sizes
from consilience.engines.vectorised.lane_choice import LaneChoice

Rates = Callable[[LaneChoice], float]


def choose(
    rate: Rates, asked: LaneChoice, clients: int, *, rows: int = 0, grows: bool = True
) -> tuple[LaneChoice, list[LaneChoice], list[LaneChoice]]:
    """The choice, all that was tried, and what was kept after each trial; `rows` are those of all rounds ahead."""
    tried: list[LaneChoice] = []
    kept: list[LaneChoice] = []

    def noted(choice: LaneChoice) -> float:
        tried.append(choice)
        return rate(choice)

    trials = Trials(asked, noted, kept.append, lambda speed: rows / speed)
    return trials.best(clients, products=True, grows=grows), tried, kept


def slower_in_large_groups(choice: LaneChoice) -> float:
    """Of the ways to run 500 clients, compiled products in groups of 125 are fastest."""
    if choice.lane == "streams":
        return 118.0
    if choice.lane == "batched":
        return 60.0
    return (200.0 if choice.compile else 110.0) * (1.0 if (choice.clients_at_once or 999) < 200 else 0.8)


def test_the_best_way_of_batching_is_compiled_though_streams_are_faster_without() -> None:
    asked = LaneChoice(clients_at_once=4000)
    found, tried, kept = choose(slower_in_large_groups, asked, 500, rows=int(118 * 2 * COMPILE_SECONDS))
    assert found == LaneChoice(lane="batched-matmul", clients_at_once=125, compile=True)
    assert max(one.clients_at_once or 0 for one in tried if one.lane == "batched-matmul") == 250  # no larger group
    assert kept[-1] == found


def test_streams_are_compiled_where_they_gain_more() -> None:
    """A network of small groups of channels: slow to batch, and half as slow in compiled streams."""
    speed = {("batched", False): 15.0, ("batched", True): 23.0, ("streams", False): 18.0, ("streams", True): 31.0}

    def rate(choice: LaneChoice) -> float:
        return speed.get((choice.lane, bool(choice.compile)), 0.0)

    found, tried, kept = choose(rate, LaneChoice(clients_at_once=36), 6, rows=int(31 * 2 * COMPILE_SECONDS))
    assert found == LaneChoice(lane="streams", clients_at_once=36, compile=True) and kept[-1] == found
    assert [one.lane for one in tried if one.compile] == ["streams", "batched"]  # the faster of both first
    found, tried, _ = choose(rate, LaneChoice(clients_at_once=36), 6, rows=int(18 * 1.1 * COMPILE_SECONDS))
    assert [one.lane for one in tried if one.compile] == ["streams"]  # what is left is too short for a second one


def test_products_are_compiled_though_batched_convolutions_are_faster_without() -> None:
    """500 small convolutional networks: cuDNN's grouped kernels gain little by compiling, products much."""

    def rate(choice: LaneChoice) -> float:
        speed = {"batched": (145.0, 179.0), "batched-matmul": (130.0, 215.0), "streams": (40.0, 0.0)}[choice.lane]
        return speed[bool(choice.compile)]

    asked = LaneChoice(clients_at_once=125)
    found, tried, kept = choose(rate, asked, 125, rows=int(179 * 2 * COMPILE_SECONDS), grows=False)
    assert found == LaneChoice(lane="batched-matmul", clients_at_once=125, compile=True) and kept[-1] == found
    assert [one.lane for one in tried if one.compile] == ["batched", "batched-matmul", "streams"]


def test_a_lane_that_cannot_run_is_not_tried_again() -> None:
    def rate(choice: LaneChoice) -> float:
        return 0.0 if choice.lane == "batched-matmul" else 10.0

    _, tried, _ = choose(rate, LaneChoice(clients_at_once=30), 30, rows=20 * COMPILE_SECONDS, grows=False)
    assert [one.lane for one in tried].count("batched-matmul") == 1


def test_a_lane_that_is_given_is_compiled_in_a_long_run() -> None:
    asked = LaneChoice(lane="streams", clients_at_once=10)
    found, _, _ = choose(lambda choice: 2.0 if choice.compile else 1.0, asked, 20, rows=10 * COMPILE_SECONDS)
    assert found.lane == "streams" and found.compile


def test_a_short_run_is_not_compiled() -> None:
    found, tried, _ = choose(slower_in_large_groups, LaneChoice(clients_at_once=4000), 500, rows=1000)
    assert found.lane == "streams" and not found.compile and found.clients_at_once == 4000
    assert not any(one.compile for one in tried)


def test_groups_grow_while_that_pays() -> None:
    asked = LaneChoice(lane="batched", clients_at_once=4000, compile=False)
    found, tried, _ = choose(lambda choice: float(choice.clients_at_once or 0), asked, 300)
    assert [one.clients_at_once for one in tried] == [75, 150, 4000] and found == asked
    found, tried, _ = choose(lambda choice: 100.0, asked, 300)
    assert [one.clients_at_once for one in tried] == [75, 150] and found.clients_at_once == 75


def test_a_size_that_is_given_is_kept() -> None:
    asked = LaneChoice(lane="batched", clients_at_once=300, compile=True)
    found, tried, kept = choose(lambda _: 1.0, asked, 300, grows=False)
    assert found == asked and tried == [] and kept == [asked]


def test_a_model_that_cannot_be_batched_runs_client_by_client() -> None:
    found, _, _ = choose(lambda choice: float(choice.lane == "serial"), LaneChoice(), 20)
    assert found.lane == "serial"


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (127, [127]), (128, [64, 128]), (500, [125, 250, 500])])
def test_group_sizes(most: int, sizes: list[int]) -> None:
    assert group_sizes(most) == sizes
