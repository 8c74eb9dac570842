"""Server steps against hand-run updates of the papers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.algorithms.fedadagrad import fedadagrad
from consilience.algorithms.fedadam import fedadam
from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedavgm import fedavgm
from consilience.algorithms.fedyogi import fedyogi
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.steps.adaptive import AdagradStep, AdamStep, YogiStep
from consilience.server.averaging.steps.plain import MomentumStep
from consilience.server.protocols import Step


def params(*values: float) -> Tree:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def follow(step: Step, start: float, merged: list[float]) -> list[float]:
    """Where a single parameter goes when these models are merged in turn."""
    at, state, path = params(start), step.init(params(start)), []
    for value in merged:
        at, state = step.move(at, params(value), state)
        path.append(at["w"].item())
    return path


def test_momentum_by_hand() -> None:
    """d = 1, v = 1, w = 2; then d = 3 - 2 = 1, v = 0.5 + 1 = 1.5, w = 5; then d = -1, v = 0.75 - 1 = -0.25, w = 4.5."""
    assert follow(MomentumStep(lr=2.0, beta=0.5), 0.0, [1.0, 3.0, 4.0]) == [2.0, 5.0, 4.5]


def test_adam_by_hand() -> None:
    """Round 1: d = 4, m = 0.5 x 4 = 2, v = 0.25 x 16 = 4, w = 1 + 0.1 x 2 / (2 + 0.5) = 1.08.
    Round 2: d = 2.08 - 1.08 = 1, m = 0.5 x 2 + 0.5 = 1.5, v = 0.75 x 4 + 0.25 = 3.25."""
    first, second = follow(AdamStep(lr=0.1, beta1=0.5, beta2=0.75, tau=0.5), 1.0, [5.0, 2.08])
    assert first == pytest.approx(1.08, abs=1e-15)
    assert second == pytest.approx(1.08 + 0.15 / (math.sqrt(3.25) + 0.5), abs=1e-15)


def test_adagrad_by_hand() -> None:
    """d = 3, v = 9, w = 0.3 / (3 + 1); then d = 4, v = 25, w += 0.4 / (5 + 1)."""
    first, second = follow(AdagradStep(lr=0.1, tau=1.0), 0.0, [3.0, 4.075])
    assert first == pytest.approx(0.075, abs=1e-15) and second == pytest.approx(0.075 + 0.4 / 6, abs=1e-15)


def test_yogi_by_hand() -> None:
    """d = 2: v = 0 + 0.25 x 4 = 1 (v < d^2); then d = 0.5: v = 1 - 0.25 x 0.25 = 0.9375 (v > d^2)."""
    step, state = YogiStep(lr=1.0, beta1=0.0, beta2=0.75, tau=1.0), YogiStep().init(params(0.0))
    at, state = step.move(params(0.0), params(2.0), state)
    assert state["square"]["w"].item() == 1.0 and at["w"].item() == 1.0
    at, state = step.move(at, params(1.5), state)
    assert state["square"]["w"].item() == 0.9375
    assert at["w"].item() == pytest.approx(1 + 0.5 / (math.sqrt(0.9375) + 1), abs=1e-15)


def test_an_exact_tie_leaves_yogi_where_it_is() -> None:
    """sign(0) = 0: with v = d^2 nothing changes."""
    state = {"mean": params(0.0), "square": params(4.0)}
    _, after = YogiStep().move(params(0.0), params(2.0), state)
    assert after["square"]["w"].item() == 4.0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 0.99), st.floats(0, 0.999), st.floats(1e-6, 1.0))
def test_adaptive_steps_equal_a_plain_loop(seed: int, beta1: float, beta2: float, tau: float) -> None:
    """Every coordinate on its own, in Python floats."""
    rng = np.random.default_rng(seed)
    start, merged = rng.normal(size=3), rng.normal(size=(6, 3))
    rules: dict[str, Any] = {
        "adagrad": lambda v, d: v + d**2,
        "adam": lambda v, d: beta2 * v + (1 - beta2) * d**2,
        "yogi": lambda v, d: v - (1 - beta2) * d**2 * np.sign(v - d**2),
    }
    steps: dict[str, Step] = {
        "adagrad": AdagradStep(lr=0.3, beta1=beta1, tau=tau),
        "adam": AdamStep(lr=0.3, beta1=beta1, beta2=beta2, tau=tau),
        "yogi": YogiStep(lr=0.3, beta1=beta1, beta2=beta2, tau=tau),
    }
    for name, step in steps.items():
        at, state = params(*start), step.init(params(*start))
        for target in merged:
            at, state = step.move(at, params(*target), state)
        for k in range(3):
            x, m, v = float(start[k]), 0.0, 0.0
            for target in merged[:, k]:
                d = float(target) - x
                m, v = beta1 * m + (1 - beta1) * d, rules[name](v, d)
                x += 0.3 * m / (math.sqrt(v) + tau)
            assert at["w"][k].item() == pytest.approx(x, rel=1e-10, abs=1e-12)


def test_the_first_adam_step_has_no_bias_correction() -> None:
    """m = 0.1 d and sqrt(v) = 0.1 |d|: the step is lr sign(d), whatever d; with a correction it would be the same in
    size only for tau = 0, and v_0 = tau^2 would make it smaller."""
    (w,) = follow(AdamStep(lr=0.01, beta1=0.9, beta2=0.99, tau=1e-12), 0.0, [7.0])
    assert w == pytest.approx(0.01, rel=1e-10)
    (w,) = follow(AdamStep(lr=0.01, beta1=0.9, beta2=0.999, tau=1e-12), 0.0, [7.0])
    assert w == pytest.approx(0.01 * 0.1 / math.sqrt(0.001), rel=1e-9)


@pytest.mark.parametrize("step", [MomentumStep(), AdagradStep(), AdamStep(), YogiStep()], ids=str)
def test_no_news_no_move(step: Step) -> None:
    assert isinstance(step, Step)
    start = {"a": torch.randn(3), "b": {"c": torch.randn(2, 2)}}
    at, state = step.move(start, start, step.init(start))
    assert tiny.same(at, start) and tiny.finite(state)
    assert tiny.structure(state) == tiny.structure(step.init(start))


def test_fedavgm_without_momentum_is_fedavg() -> None:
    plain = list(run(fedavg(lr=0.05, batch_size=4), tiny.engine(tiny.convnet), rounds=3, seed=1))
    other = list(run(fedavgm(lr=0.05, batch_size=4, beta=0.0), tiny.engine(tiny.convnet), rounds=3, seed=1))
    assert tiny.gap(other[-1].model, plain[-1].model) <= 1e-12


def test_fedadam_follows_the_papers_update_in_a_real_run() -> None:
    """Three rounds of training; the server's part redone by hand from the replies and example counts."""
    algorithm = fedadam(lr=0.05, batch_size=4, server_lr=0.02, beta1=0.8, beta2=0.9, tau=0.01)
    engine = tiny.engine(tiny.mlp)
    x = {name: leaf.numpy().copy() for name, leaf in engine.start()["params"].items()}
    m, v = {k: np.zeros_like(a) for k, a in x.items()}, {k: np.zeros_like(a) for k, a in x.items()}
    for one in run(algorithm, engine, rounds=3, seed=1):
        share = np.array(tiny.SIZES) / sum(tiny.SIZES)
        for name, stacked in one.cohort.reply["model"]["params"].items():
            delta = np.tensordot(share, stacked.numpy() - x[name], axes=1)
            m[name] = 0.8 * m[name] + 0.2 * delta
            v[name] = 0.9 * v[name] + 0.1 * delta**2
            x[name] = x[name] + 0.02 * m[name] / (np.sqrt(v[name]) + 0.01)
            np.testing.assert_allclose(one.model["params"][name].numpy(), x[name], rtol=0, atol=1e-12)


def test_recipes_pass_their_options_on() -> None:
    def step(algorithm: Any) -> Step:
        assert isinstance(algorithm.server, Averaging)
        return algorithm.server.step

    assert step(fedavgm(server_lr=0.5, beta=0.7)) == MomentumStep(lr=0.5, beta=0.7)
    assert step(fedadagrad(server_lr=0.5, beta1=0.1, tau=0.2)) == AdagradStep(lr=0.5, beta1=0.1, tau=0.2)
    assert step(fedadam(server_lr=0.5, beta1=0.1, beta2=0.3, tau=0.2)) == AdamStep(
        lr=0.5, beta1=0.1, beta2=0.3, tau=0.2
    )
    assert step(fedyogi(server_lr=0.5, beta1=0.1, beta2=0.3, tau=0.2)) == YogiStep(
        lr=0.5, beta1=0.1, beta2=0.3, tau=0.2
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (MomentumStep, {"beta": 1.0}),
        (MomentumStep, {"lr": 0.0}),
        (AdamStep, {"beta2": -0.1}),
        (AdagradStep, {"tau": 0.0}),
        (YogiStep, {"beta1": float("nan")}),
    ],
)
def test_bad_settings_are_refused(kind: Any, options: dict[str, float]) -> None:
    with pytest.raises(Invalid, match=f"{kind.__name__}.{next(iter(options))}"):
        kind(**options)
