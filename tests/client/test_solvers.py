"""Solvers against torch.optim, step by step; schedules, clipping and accumulation against loops written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import lr_scheduler

from consilience import algorithms
from consilience.algorithms.fedavg import fedavg
from consilience.client import adaptive_solvers as more
from consilience.client.solver_wrappers import Accumulated, Clipped, Scheduled, solve
from consilience.client.solvers import SGD, Adam, Solver
from consilience.core import plans
from consilience.core.rate_schedules import Cosine, Exponential, StepDecay, WarmUp
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree, map_leaves, stack


@pytest.fixture(autouse=True)
def _counts_in_float64() -> Iterator[None]:
    """torch's NAdam keeps a product of momenta in the default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


SHAPES = {"w": (3, 2), "b": (2,)}
ROUND = torch.tensor(0)
LANES = ("serial", "batched", "streams")


def numbers(seed: int) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}


def by_torch(make: Callable[[list[Tensor]], torch.optim.Optimizer], steps: int = 6) -> list[Tree]:
    params = map_leaves(lambda leaf: leaf.clone().requires_grad_(), numbers(0))
    solver, found = make(list(params.values())), []
    for step in range(steps):
        for name, value in numbers(step + 1).items():
            params[name].grad = value
        solver.step()
        found.append(map_leaves(lambda leaf: leaf.detach().clone(), params))
    return found


def ours(solver: Solver, steps: int = 6) -> list[Tree]:
    params, found = numbers(0), []
    state = solver.init(params)
    for step in range(steps):
        params, state = solver.step(params, numbers(step + 1), state, ROUND)
        found.append(params)
    return found


def assert_same(one: list[Tree], other: list[Tree]) -> None:
    for a, b in zip(one, other, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-14)


SOLVERS: list[tuple[Solver, Callable[[list[Tensor]], torch.optim.Optimizer]]] = [
    (SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
    (Adam(lr=0.1, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1)),
    (Adam(lr=0.1, weight_decay=0.1, decoupled=True), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
    (more.RMSprop(lr=0.1), lambda p: torch.optim.RMSprop(p, lr=0.1)),
    (more.RMSprop(lr=0.1, alpha=0.9, momentum=0.8, centred=True, weight_decay=0.1), lambda p: torch.optim.RMSprop(
        p, lr=0.1, alpha=0.9, momentum=0.8, centered=True, weight_decay=0.1)),
    (more.Adagrad(lr=0.1, initial=0.3, weight_decay=0.1), lambda p: torch.optim.Adagrad(
        p, lr=0.1, initial_accumulator_value=0.3, weight_decay=0.1)),
    (more.Adadelta(weight_decay=0.1), lambda p: torch.optim.Adadelta(p, weight_decay=0.1)),
    (more.Adamax(lr=0.1, weight_decay=0.1), lambda p: torch.optim.Adamax(p, lr=0.1, weight_decay=0.1)),
    (more.NAdam(lr=0.1, weight_decay=0.1), lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1)),
    (more.NAdam(lr=0.1, weight_decay=0.1, decoupled=True), lambda p: torch.optim.NAdam(
        p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True)),
]  # fmt: skip


@pytest.mark.parametrize(("solver", "make"), SOLVERS, ids=lambda x: repr(x) if isinstance(x, Solver) else "")
def test_a_solver_is_the_one_of_torch(solver: Solver, make: Any) -> None:
    assert_same(ours(solver), by_torch(make))


def test_lion_by_hand() -> None:
    """Chen et al. 2023, Algorithm 2."""
    params, mean, found = numbers(0), map_leaves(torch.zeros_like, numbers(0)), []
    for step in range(6):
        for name, g in numbers(step + 1).items():
            towards = torch.sign(0.9 * mean[name] + 0.1 * g)
            params[name] = params[name] - 0.1 * (towards + 0.3 * params[name])
            mean[name] = 0.99 * mean[name] + 0.01 * g
        found.append(dict(params))
    assert_same(ours(more.Lion(lr=0.1, weight_decay=0.3)), found)


@pytest.mark.parametrize("solver", [solver for solver, _ in SOLVERS] + [more.Lion(lr=0.1)], ids=repr)
def test_a_stack_of_clients_is_each_client(solver: Solver) -> None:
    """Under vmap, with schedules, clipping and accumulation around it."""
    whole = Accumulated(
        solver=Scheduled(solver=Clipped(solver=solver, norm=0.5), steps=Exponential(factor=0.5)), every=2
    )
    clients = [ours(whole, 5)[-1]]
    other, state = numbers(50), whole.init(numbers(50))
    for step in range(5):
        other, state = whole.step(other, numbers(step + 60), state, ROUND)
    both = stack([numbers(0), numbers(50)])
    states = vmap(whole.init)(both)
    for step in range(5):
        grads = stack([numbers(step + 1), numbers(step + 60)])
        both, states = vmap(lambda p, g, s: whole.step(p, g, s, ROUND))(both, grads, states)
    for name in SHAPES:
        torch.testing.assert_close(both[name][0], clients[0][name], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(both[name][1], other[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("solver", "make"), SOLVERS, ids=lambda x: repr(x) if isinstance(x, Solver) else "")
def test_a_schedule_is_that_of_the_rate(solver: Solver, make: Any) -> None:
    """Also where the rate is in the weight decay, and whatever the solver's state."""
    params = map_leaves(lambda leaf: leaf.clone().requires_grad_(), numbers(0))
    theirs = make(list(params.values()))
    scheduler, found = lr_scheduler.StepLR(theirs, step_size=2, gamma=0.5), []
    for step in range(6):
        for name, value in numbers(step + 1).items():
            params[name].grad = value
        theirs.step()
        scheduler.step()
        found.append(map_leaves(lambda leaf: leaf.detach().clone(), params))
    assert_same(ours(Scheduled(solver=solver, steps=StepDecay(every=2, factor=0.5))), found)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_clipping_is_that_of_torch(by: str) -> None:
    params = map_leaves(lambda leaf: leaf.clone().requires_grad_(), numbers(0))
    solver, found = torch.optim.SGD(params.values(), lr=0.1, weight_decay=0.2), []
    for step in range(6):
        for name, value in numbers(step + 1).items():
            params[name].grad = value * (10.0 ** (step - 3))  # far below and far above the bound
        if by == "norm":
            nn.utils.clip_grad_norm_(params.values(), 0.7)
        else:
            nn.utils.clip_grad_value_(params.values(), 0.7)
        solver.step()
        found.append(map_leaves(lambda leaf: leaf.detach().clone(), params))
    clipped = Clipped(solver=SGD(lr=0.1, weight_decay=0.2), **{by: 0.7})  # type: ignore[arg-type]
    mine, trail = numbers(0), []
    for step in range(6):
        grads = {name: value * (10.0 ** (step - 3)) for name, value in numbers(step + 1).items()}
        mine, _ = clipped.step(mine, grads, {}, ROUND)
        trail.append(mine)
    assert_same(trail, found)


def test_accumulation_is_one_step_along_the_mean_over_rows() -> None:
    """Batches of 5, 3 and 2 rows, two at a time: one step on eight rows, and one at the end on two."""
    solver = Accumulated(solver=SGD(lr=0.1, momentum=0.9), every=2)
    params, state = numbers(0), solver.init(numbers(0))
    for step, rows in enumerate((5, 3, 2)):
        params, state = solve(solver, params, numbers(step + 1), state, ROUND, rows)
    last = solver.finish(params, state, ROUND)
    inner = SGD(lr=0.1, momentum=0.9)
    mean = map_leaves(lambda a, b: (5 * a + 3 * b) / 8, numbers(1), numbers(2))
    first, kept = inner.step(numbers(0), mean, inner.init(numbers(0)), ROUND)
    assert_same([params], [first])
    assert_same([last], [inner.step(first, numbers(3), kept, ROUND)[0]])
    assert_same([solver.finish(first, solver.init(first), ROUND)], [first])  # nothing is left, nothing moves


# --- a whole run against a loop written by hand ----------------------------------------------------------------------


def by_hand(rounds: int, *, every: int, norm: float) -> Tree:
    """FedAvg of five clients of unequal size: AdamW, warm-up and cosine over rounds, decay within, clip, accumulate."""
    data, model = tiny.federation(), tiny.mlp().double()
    work = plans.Work(epochs=2, batch_size=4)
    for number in range(rounds):
        sent, total = {k: v.detach().clone() for k, v in model.state_dict().items()}, {}
        for client in range(len(data)):
            model.load_state_dict(sent)
            solver = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
            outer = WarmUp(length=2, then=Cosine(horizon=3)).factor_at(torch.tensor(number)).item()
            scheduler = lr_scheduler.LambdaLR(solver, lambda step, outer=outer: outer * 0.5**step)
            rows = int(data.train.sizes[client])
            steps = work.steps_per_epoch(np.array([rows])) * 2
            plan = plans.draw(work, data.train, np.array([client]), steps, seed=3, round=number)
            window = 0
            for step in range(int(steps[0])):
                batch = plan.single(step, 0, data.train)
                loss = nn.functional.cross_entropy(model(batch.x.double()), batch.y, reduction="sum")
                loss.backward()
                window += len(batch.y)
                if (step + 1) % every == 0 or step + 1 == steps[0]:
                    for value in model.parameters():
                        value.grad /= window
                    nn.utils.clip_grad_norm_(model.parameters(), norm)
                    solver.step()
                    scheduler.step()
                    solver.zero_grad()
                    window = 0
            for name, value in model.state_dict().items():
                share = rows / int(data.train.sizes.sum())
                total[name] = total.get(name, 0) + share * value.detach()
        model.load_state_dict(total)
    return model.state_dict()


OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "optimiser": "adamw",
    "weight_decay": 0.1,
    "epochs": 2,
    "batch_size": 4,
    "lr_schedule": WarmUp(length=2, then=Cosine(horizon=3)),
    "lr_schedule_in_round": Exponential(factor=0.5),
    "clip_norm": 0.3,
    "accumulate": 3,
}


@pytest.mark.parametrize("lane", LANES)
def test_everything_together_is_a_loop_written_by_hand(lane: str) -> None:
    found = list(run(fedavg(**OPTIONS), tiny.engine(lane=lane), rounds=4, seed=3))[-1].model["params"]
    for name, value in by_hand(4, every=3, norm=0.3).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["scaffold", "fednova", "duw_fednova"])
def test_methods_that_read_gradients_off_moves_follow_a_schedule(name: str) -> None:
    """A schedule over rounds is `lr_decay`, written otherwise."""
    recipe = algorithms.recipe(name)
    more: dict[str, Any] = {"weighting": "by_examples"} if name == "duw_fednova" else {}
    models = []
    for options in ({"lr_decay": 0.5}, {"lr_schedule": Exponential(factor=0.5)}):
        rounds = run(recipe(lr=0.1, batch_size=4, **more, **options), tiny.engine(), rounds=3, seed=1)
        models.append(list(rounds)[-1].model["params"])
    for key in models[0]:
        torch.testing.assert_close(models[0][key], models[1][key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["ditto", "fedsiam_da", "fedper", "local_only", "moon", "feddm"])
def test_lanes_agree_in_other_recipes(name: str) -> None:
    options = {key: value for key, value in OPTIONS.items() if not (name == "feddm" and key == "accumulate")}
    data = tiny.federation(side=4) if name == "feddm" else None
    build: Any = tiny.mlp
    if name == "fedsiam_da":
        build = tiny.MODELS_WITH_HEADS["mlp"]
    elif name == "moon":
        build = lambda: tiny.Backbone(tiny.mlp())  # noqa: E731
    elif name == "feddm":
        build = lambda: tiny.seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)))  # noqa: E731
        options["shape"] = (1, 4, 4)
    states = []
    for lane in ("serial", "batched"):
        engine = tiny.engine(build, data, lane=lane)
        last = list(run(algorithms.recipe(name)(**options), engine, rounds=2, seed=3))[-1]
        states.append({"model": last.model, "memory": last.snapshot.memory})
    assert tiny.gap(*states) < 1e-9


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_norm": 0}, "fedavg.clip_norm = 0.0 is out of range: it must be > 0"),
        ({"clip_norm": 1, "clip_value": 1}, "give one of the two"),
        ({"accumulate": 1}, "fedavg.accumulate = 1 is out of range: it must be >= 2"),
        ({"lr_schedule": "cosin"}, "fedavg.lr_schedule = 'cosin' is not one of cosine"),
        ({"lr_schedule": "cosine"}, "fedavg.lr_schedule.horizon is missing: cosine needs it"),
        ({"lr_schedule": {"name": "exponential"}, "lr_decay": 0.5}, "both set the rate of a round: give one"),
        ({"optimiser": {"name": "rmsprop", "lr": 0.1}, "lr": 0.2}, "lr = 0.2 has no effect with optimiser"),
        ({"optimiser": "lion", "momentum": 0.9}, "momentum = 0.9 has no effect with optimiser = 'lion'"),
        ({"optimiser": "sgdd"}, "is not one of sgd, adam, adamw, rmsprop, adagrad, adadelta, adamax, nadam, lion"),
        ({"optimiser": Accumulated(), "clip_norm": 1.0}, "must be the outermost solver"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Invalid) as caught:
        fedavg(**options)
    assert words in str(caught.value)


def test_a_solver_of_ones_own_is_a_part() -> None:
    class SignDescent:
        """w <- w - lr sign(g)."""

        lr = 0.01

        def init(self, params: Tree) -> Tree:
            """No state."""
            return {}

        def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
            """One step."""
            return map_leaves(lambda w, g: w - self.lr * g.sign(), params, grads), state

    algorithm = fedavg(optimiser=SignDescent(), lr_schedule=Exponential(factor=0.9), batch_size=4)
    serial, batched = (
        list(run(algorithm, tiny.engine(lane=lane), rounds=2, seed=0))[-1].model for lane in ("serial", "batched")
    )
    assert tiny.gap(serial, batched) < 1e-9
