"""Learning a schedule: where it starts, what a step does, what it improves, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from typer.testing import CliRunner

import consilience as cs
from consilience.cli import app
from consilience.core.federation import Federation
from consilience.core.settings import Invalid
from consilience.environments.environment import Environment
from consilience.meta import Schedule, learning, simplex
from consilience.meta.initial import initial_table
from consilience.meta.learning import learned
from consilience.meta.schedule import variance_table
from consilience.selection import Uniform

pytestmark = pytest.mark.usefixtures("untraced")
LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 4}


@pytest.mark.parametrize("constraint", ["square", "softmax", "raw"])
def test_weights_start_at_the_shares_of_the_examples(constraint: Any) -> None:
    engine = tiny.engine(tiny.mlp)
    table = initial_table(None, cs.fedavg(), engine, engine.start(), rounds=4, seed=0)
    theta = simplex.free(table, constraint)
    sizes = np.array(tiny.SIZES)
    np.testing.assert_allclose(simplex.weights(theta, constraint), np.tile(sizes / sizes.sum(), (4, 1)), rtol=1e-12)


def test_a_first_step_of_adam_by_hand() -> None:
    """Adam's first step moves every theta by lr against the sign of its gradient."""
    engine = tiny.engine(tiny.mlp)
    (step,) = learning(cs.fedavg(**LOCAL), engine, rounds=2, iterations=1, lr=0.01)
    theta = np.sqrt(np.array(tiny.SIZES) / sum(tiny.SIZES))
    slope = step.slope.numpy()
    # dL/dtheta_k = 2 theta_k (slope_k - sum_j Theta_j slope_j), since sum theta^2 = 1
    inner = 2 * theta * (slope - slope @ (theta**2)[:, None])
    moved = (theta - 0.01 * inner / (np.abs(inner) + 1e-8)) ** 2
    np.testing.assert_allclose(step.weights, moved / moved.sum(1, keepdims=True), rtol=1e-6)


def test_learning_goes_on_from_a_state_as_if_it_had_never_stopped() -> None:
    settings: dict[str, Any] = {"rounds": 2, "lr": 0.05, "seed": 3}
    whole = list(learning(cs.fedavg(**LOCAL), tiny.engine(tiny.mlp), iterations=4, **settings))
    rest = list(learning(cs.fedavg(**LOCAL), tiny.engine(tiny.mlp), iterations=4, resume=whole[1].state, **settings))
    assert [step.number for step in rest] == [3, 4]
    for one, other in zip(whole[2:], rest):
        assert one.loss == other.loss and torch.equal(one.weights, other.weights)
    assert torch.equal(learned(whole).losses, learned(rest).losses)  # of all four runs
    with pytest.raises(Invalid, match="weights for 2 rounds, not for 3"):
        next(learning(cs.fedavg(**LOCAL), tiny.engine(tiny.mlp), rounds=3, resume=whole[1].state))
    with pytest.raises(Invalid, match="all 4 iterations"):
        next(learning(cs.fedavg(**LOCAL), tiny.engine(tiny.mlp), iterations=4, resume=whole[3].state, **settings))


def spoiled() -> Federation:
    """Two clients that agree and a large one whose labels are shuffled."""
    draw = torch.Generator().manual_seed(0)

    def client(rows: int, honest: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, 4, generator=draw, dtype=torch.float64)
        y = (x[:, 0] > 0).long()
        return x, y if honest else y[torch.randperm(rows, generator=draw)]

    return Federation.from_clients([client(20, True), client(20, True), client(40, False)])


def test_learned_weights_lower_the_loss_and_leave_the_spoiler_behind() -> None:
    module = tiny.seeded(lambda: torch.nn.Linear(4, 2, dtype=torch.float64))
    engine = cs.Vectorised(cs.Task(module), spoiled(), device="cpu", dtype="float64", lane="serial")
    algorithm = cs.duw_fedavg(lr=0.5, batch_size=10)
    schedule = cs.learn_schedule(algorithm, engine, rounds=3, iterations=40, lr=0.05, progress=False)
    assert schedule.gradient == "server" and schedule.losses.shape == (40,)
    assert float(schedule.losses[-5:].mean()) < float(schedule.losses[:5].mean())
    np.testing.assert_allclose(schedule.weights.sum(1), 1, rtol=1e-12)
    assert float(schedule.weights[:, 2].max()) < 0.45  # it began at its share of the rows, a half
    models = [
        [one.model for one in cs.run(which, engine, rounds=3, seed=9)][-1]
        for which in (
            cs.fedavg(lr=0.5, batch_size=10, weighting=schedule.weighting()),
            cs.fedavg(lr=0.5, batch_size=10),
        )
    ]
    x, y = engine.store("train").of(0)
    losses = [float(torch.nn.functional.cross_entropy(engine.task.apply(m, x, train=False)[0], y)) for m in models]
    assert losses[0] < losses[1]


def test_learned_for_a_selection_and_for_softmax() -> None:
    engine = tiny.engine(tiny.mlp)
    algorithm = cs.fedavg(selection=Uniform(count=3), **LOCAL)
    for constraint in ("softmax", "raw"):
        runs = [
            list(learning(algorithm, engine, rounds=2, iterations=2, constraint=constraint, gradient=way))
            for way in ("server", "autograd")
        ]
        for server, graph in zip(*runs):
            np.testing.assert_allclose(server.slope, graph.slope, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(server.weights, graph.weights, rtol=1e-9)


def test_a_round_without_replies_changes_nothing() -> None:
    dead = tiny.engine(tiny.mlp, environment=Environment(communication=0.0, silent="renormalise"))
    for way in ("server", "autograd"):
        (step,) = learning(cs.fedavg(**LOCAL), dead, rounds=2, iterations=1, gradient=way)
        assert float(step.slope.abs().max()) == 0 and step.loss > 0  # losses are met, but no weight can change them


@pytest.mark.parametrize(
    ("algorithm", "gradient", "message"),
    [
        (
            lambda: cs.fedprox(**LOCAL),
            "server",
            "the terms Proximal, whose gradients are mixed into the model; what can",
        ),
        (lambda: cs.fedavg(momentum=0.9, **LOCAL), "server", "only with plain SGD does a model tell the gradients"),
        (lambda: cs.fedavgm(**LOCAL), "reported", "not to the weighted mean; what can: autograd, full"),
        (lambda: cs.fednova(**LOCAL), "server", "NormalisedAveraging does not simply take the weighted mean"),
        (lambda: cs.coordinate_median(**LOCAL), "auto", "counts every reply the same: .* such as fedavg"),
        (
            lambda: cs.fedbuff(**LOCAL),
            "auto",
            "has no weighting.*: choose an algorithm that averages|does not wait for a round's clients",
        ),
        (lambda: cs.fedavg(**LOCAL), "guess", "gradient = 'guess' is not one of"),
        (lambda: cs.fedsplit(step=1.0, keeps_z=True, **LOCAL), "full", "z as plain numbers, which no gradient"),
        (lambda: cs.fedsplit(step=1.0, **LOCAL), "auto", "a weighting needs keeps_z"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(algorithm: Any, gradient: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        list(learning(algorithm(), tiny.engine(tiny.mlp), rounds=1, iterations=1, gradient=gradient))


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        ("fedavg", "server"),
        ("duw_fednova", "server"),
        ("scaffold", "reported"),
        ("moon", "reported"),
        ("fednova", "autograd"),
        ("fedadam", "autograd"),
        ("fedsplit", "autograd"),
    ],
)
def test_auto_takes_the_cheapest_way_that_fits(recipe: str, way: str) -> None:
    model = tiny.MODELS_WITH_HEADS["mlp"] if recipe == "moon" else tiny.mlp
    more = {"step": 1.0, "keeps_z": True} if recipe == "fedsplit" else {}
    (step,) = learning(getattr(cs, recipe)(**more, **LOCAL), tiny.engine(model), rounds=1, iterations=1)
    assert step.gradient == way and float(step.slope.abs().max()) > 0


# --- the result ------------------------------------------------------------------------------------------------------


def schedule() -> Schedule:
    weights = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.2, 0.8], [0.5, 0.5]], dtype=torch.float64)
    return Schedule(weights=weights, losses=torch.tensor([3.0, 2.0], dtype=torch.float64), gradient="server")


def test_a_schedule_is_saved_loaded_and_used(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    schedule().save(path)
    again = Schedule.load(path)
    assert torch.equal(again.weights, schedule().weights) and torch.equal(again.losses, schedule().losses)
    assert cs.duw_fedavg(schedule=str(path)).server.weighting.table == schedule().weighting().table


def test_variance_against_one_over_root_t() -> None:
    """Every weight is 0.15 from its mean: variance 0.0225, far below 1/sqrt(4)."""
    np.testing.assert_allclose(schedule().variance(), [0.0225, 0.0225], rtol=1e-12)
    assert schedule().within_rate()
    swinging = Schedule(weights=torch.tensor([[1.0, 0.0], [-1.0, 2.0]]).double(), losses=torch.empty(0))
    assert not swinging.within_rate()
    assert variance_table([schedule()]).splitlines()[1].split() == ["4", "2.250e-02", "0.5000"]


def test_the_table_on_the_screen() -> None:
    lines = schedule().text().splitlines()
    assert lines[0].split() == ["client", *(word for t in range(1, 5) for word in ("round", str(t)))]
    assert lines[1].split() == ["0", "0.2000", ":", "0.5000", "*", "0.2000", ":", "0.5000", "*"]
    assert lines[2].split()[1:3] == ["0.8000", "@"]


def test_a_plot_needs_matplotlib_or_makes_a_picture(tmp_path: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r'pip install "consilience\[report\]"'):
            schedule().plot(tmp_path / "weights.png")
    else:
        schedule().plot(tmp_path / "weights.png")
        assert (tmp_path / "weights.png").stat().st_size > 1000


# --- the command -----------------------------------------------------------------------------------------------------


def test_learn_from_the_command_line_then_run(tmp_path: Path) -> None:
    small = ["rounds=2", "model=logistic", "partition.clients=3", "engine.lane=serial", "algorithm=duw_fedavg"]
    out = str(tmp_path / "weights.safetensors")
    learn = [*small, "algorithm.epochs=1", "--iterations", "2", "--lr", "0.01", "--out", out]

    def call(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})

    done = call("learn", *learn)
    assert done.exit_code == 0, done.output
    assert "run 2/2" in done.output and "saved:" in done.output and Schedule.load(out).weights.shape == (2, 3)
    again = call("learn", *learn)
    assert again.exit_code == 2 and "is there already" in again.output
    ran = call("run", *small, f"algorithm.schedule={out}", f"runs={tmp_path}", "--quiet")
    assert ran.exit_code == 0, ran.output
    empty = call("run", *small, f"runs={tmp_path}", "--quiet")
    assert empty.exit_code == 2 and "schedule of aggregation weights is empty" in empty.output
