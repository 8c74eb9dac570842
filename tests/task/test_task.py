"""A model and its loss as pure functions of a tree of values."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.core import tree
from consilience.core.algorithm import Plain
from consilience.core.evaluate import Evaluate, LossQuery
from consilience.core.exchange import Broadcast
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.task.task import Task


class Tied(nn.Module):
    """Two layers that share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.first = nn.Linear(36, 36, bias=False)
        self.second = nn.Linear(36, 36)
        self.second.weight = self.first.weight
        self.head = nn.Linear(36, tiny.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(self.flatten(x))))))


class Frozen(nn.Module):
    """A frozen encoder with batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten())
        self.encoder.requires_grad_(False)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, tiny.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.encoder(x)))

    def features(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def trained_by(module: nn.Module, *, rounds: int = 2, lane: str = "serial") -> tuple[Task, tree.Tree]:
    engine = tiny.engine(lambda: module, lane=lane)
    *_, last = run(fedavg(lr=0.1, batch_size=4), engine, rounds=rounds, seed=0)
    return Task(module), last.model


def test_start_holds_the_modules_values_and_shares_nothing() -> None:
    module = tiny.convnet()
    task = Task(module)
    start = task.start()
    assert list(start) == ["params", "buffers"]
    assert list(start["params"]) == [name for name, _ in module.named_parameters()]
    assert list(start["buffers"]) == [name for name, _ in module.named_buffers()]
    assert all(torch.equal(value, start["params"][name]) for name, value in module.named_parameters())
    start["params"]["0.weight"].zero_()
    assert bool((module.get_parameter("0.weight") != 0).any())


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_training_leaves_the_module_alone(lane: str) -> None:
    module = tiny.convnet()
    before = copy.deepcopy(module.state_dict())
    modes = [part.training for part in module.modules()]
    trained_by(module, lane=lane)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())
    assert [part.training for part in module.modules()] == modes
    assert type(module[1]) is nn.BatchNorm2d and type(module[8]) is nn.Dropout  # not swapped in place


def test_apply_in_evaluation_equals_the_module() -> None:
    module = tiny.convnet().double()
    x = tiny.federation().train.x
    task = Task(module)
    output, buffers = task.to(torch.device("cpu"), torch.float64).apply(task.start(), x, train=False)
    assert torch.equal(output, module.eval()(x))
    assert tiny.same(buffers, task.start()["buffers"])


def test_apply_in_training_returns_moved_buffers_and_keeps_its_inputs() -> None:
    module = nn.Sequential(*list(tiny.convnet())[:8], nn.Linear(8, 3)).double()  # without dropout
    x = tiny.federation().train.x
    task = Task(module).to(torch.device("cpu"), torch.float64)
    model = task.start()
    before = tree.clone(model)
    output, buffers = task.apply(model, x, train=True)
    assert torch.equal(output, module.train()(x))
    assert tiny.same(model, before)
    assert tiny.same(buffers, dict(module.named_buffers()))
    assert int(buffers["1.num_batches_tracked"]) == 1


def test_tied_weights_are_one_parameter_and_stay_tied() -> None:
    module = tiny.seeded(Tied)
    task, model = trained_by(module)
    assert "first.weight" in model["params"] and "second.weight" not in model["params"]
    assert not torch.equal(model["params"]["first.weight"], module.first.weight.double())
    result = task.trained(model)
    assert result.first.weight is result.second.weight
    assert torch.equal(result.first.weight, model["params"]["first.weight"].float())


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_tied_weights_get_the_gradient_of_both_uses(lane: str) -> None:
    """One full-batch step of one client equals PyTorch's step on the tied module."""
    module = tiny.seeded(Tied).double()
    data = tiny.federation((8,))
    engine = tiny.engine(lambda: copy.deepcopy(module), data, lane=lane)
    (one,) = run(fedavg(lr=0.1, batch_size=None), engine, rounds=1)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(module(data.train.x), data.train.y).backward()
    optimiser.step()
    assert tiny.gap(one.model["params"], {n: p.detach() for n, p in module.named_parameters()}) <= 1e-12


@pytest.mark.parametrize("lane", ["serial", "batched", "streams"])
def test_frozen_parts_are_constants(lane: str) -> None:
    module = tiny.seeded(Frozen)
    with torch.no_grad():
        module.encoder[1].running_mean.fill_(0.3)
    _, model = trained_by(module, lane=lane)
    assert sorted(model["params"]) == ["head.bias", "head.weight", "norm.bias", "norm.weight"]
    assert sorted(model["buffers"]) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    result = Task(module).trained(model)
    for name, value in module.encoder.state_dict().items():  # neither trained nor touched by batch statistics
        assert torch.equal(value, result.encoder.state_dict()[name]), name
    assert float(result.encoder[1].running_mean[0]) == pytest.approx(0.3)


def test_a_frozen_encoder_runs_in_evaluation_mode_while_the_head_trains() -> None:
    """Its dropout is off and its batch norm uses its own statistics."""
    module = tiny.seeded(Frozen).double()
    task = Task(module).to(torch.device("cpu"), torch.float64)
    x = tiny.federation().train.x
    output, _ = task.apply(task.start(), x, train=True, key=torch.tensor(1))
    module.train()
    module.encoder.eval()
    assert torch.equal(output, module(x))


def test_a_single_frozen_parameter_is_not_in_the_tree() -> None:
    module = nn.Linear(3, 2)
    module.weight.requires_grad_(False)
    task = Task(module)
    assert list(task.start()["params"]) == ["bias"]
    output, _ = task.apply(
        {"params": {"bias": torch.tensor([1.0, 2.0])}, "buffers": {}}, torch.zeros(1, 3), train=False
    )
    assert output.tolist() == [[1, 2]]


def test_trained_returns_a_module_with_the_values() -> None:
    module = tiny.convnet()
    task = Task(module)
    model = tree.map_leaves(lambda leaf: torch.full_like(leaf, 3), task.start())
    result = task.trained(model)
    assert type(result) is nn.Sequential and type(result[1]) is nn.BatchNorm2d and not result.training
    assert all(bool((value == 3).all()) for value in result.state_dict().values())
    assert not any(bool((value == 3).all()) for value in module.state_dict().values())
    task.start()["params"]["0.weight"].fill_(7)
    assert bool((result[0].weight == 3).all())


def test_features_are_the_modules_own() -> None:
    module = tiny.seeded(Frozen).double()
    task = Task(module).to(torch.device("cpu"), torch.float64)
    x = tiny.federation().train.x
    assert torch.equal(task.features(task.start(), x), module.eval().features(x))
    output, _ = task.apply(task.start(), x, train=False)
    assert torch.equal(output, module(x)), "features() must not leave the module's forward replaced"


def test_a_pass_through_other_methods_is_the_pass_of_forward() -> None:
    """Same dropout pattern, same statistics of live rows, same new buffers; forward is put back."""
    module = tiny.MODELS_WITH_HEADS["convnet"]().double()
    task = Task(module).to(torch.device("cpu"), torch.float64)
    x, key = tiny.federation().train.x[:6], torch.tensor(11)
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    live = {"train": True, "mask": mask, "key": key}
    output, buffers = task.apply(task.start(), x, **live)
    (z, logits), moved = task.apply(
        task.start(), x, **live, through=lambda net, x: ((z := net.features(x)), net.head(z))
    )
    assert torch.equal(logits, output) and tiny.same(moved, buffers)
    assert torch.equal(task.features(task.start(), x, **live), z)
    assert torch.equal(task.apply(task.start(), x, **live)[0], output)
    assert not tiny.same(buffers, task.start()["buffers"])


def test_features_without_the_method_is_refused() -> None:
    task = Task(tiny.mlp())
    with pytest.raises(Invalid, match=r"Sequential has no features\(x\) method"):
        task.features(task.start(), torch.zeros(1, 1, 6, 6))


def test_dropout_follows_the_key() -> None:
    task = Task(tiny.convnet())
    x = tiny.federation().train.x.float()
    outputs = [task.apply(task.start(), x, train=True, key=torch.tensor(k))[0] for k in (1, 1, 2)]
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    with pytest.raises(Invalid, match="trained without a key"):
        task.apply(task.start(), x, train=True)


class OneDropoutTwice(nn.Module):
    """The usual way to write it: one dropout module, called after each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.drop(x * self.scale), self.drop(x * self.scale)])


def test_two_calls_of_one_dropout_draw_two_patterns() -> None:
    task = Task(OneDropoutTwice())
    output, _ = task.apply(task.start(), torch.ones(20, 50), train=True, key=torch.tensor(3))
    agree = float((output[0] == output[1]).double().mean())
    assert 0.4 < agree < 0.6
    again, _ = task.apply(task.start(), torch.ones(20, 50), train=True, key=torch.tensor(3))
    assert torch.equal(output, again)


def test_global_generator_is_neither_used_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    _, first = trained_by(tiny.convnet())
    after = torch.random.get_rng_state()
    torch.manual_seed(1)
    _, second = trained_by(tiny.convnet())
    assert tiny.same(first, second)
    # building the module forks the generator; training must not touch it
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Task(tiny.mlp(), loss="cross_entopy"),
            r"loss = 'cross_entopy' is not one of .*did you mean 'cross_entropy'",
        ),
        (lambda: Task(tiny.mlp(), loss="MSE"), "loss = 'MSE' is not one of .*: it is called 'squared_error' here"),
        (lambda: Task(tiny.mlp(), "regresion"), "kind = 'regresion' is not one of .*did you mean 'regression'"),
        (lambda: Task(tiny.mlp(), "squared_error"), "it is a loss, write loss='squared_error'"),
        (
            lambda: Task(tiny.mlp(), "regression", loss="cross_entropy"),
            "loss = 'cross_entropy' is not a loss of regression: it has squared_error",
        ),
        (lambda: Task(nn.Flatten()), "no trainable parameters"),
        (lambda: Task(tiny.mlp().requires_grad_(False)), "no trainable parameters"),
        (lambda: Task(nn.Sequential(nn.LazyLinear(3))), "parameter '0.weight' is not initialised"),
    ],
)
def test_refusals(build: object, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        build()  # type: ignore[operator]


def test_repr_says_what_is_trained() -> None:
    assert repr(Task(nn.Linear(3, 2))) == "Task(Linear with 8 parameters, loss='cross_entropy')"


def test_own_loss_function() -> None:
    def distance(output: Tensor, target: Tensor) -> Tensor:
        return (output.squeeze(1) - target).abs()

    assert Task(nn.Linear(1, 1), loss=distance).loss_name == "distance"


def test_convolves() -> None:
    assert Task(tiny.convnet()).convolves and not Task(tiny.mlp()).convolves


def test_a_task_can_be_moved_without_moving_the_first() -> None:
    task = Task(tiny.seeded(Frozen))
    wide = task.to(torch.device("cpu"), torch.float64)
    x = torch.zeros(2, 1, 6, 6)
    assert task.apply(task.start(), x, train=False)[0].dtype == torch.float32
    model = tree.cast_floating(task.start(), torch.float64)
    assert wide.apply(model, x.double(), train=False)[0].dtype == torch.float64


# --- decisions and federated evaluation ------------------------------------------------------------------------------


def evaluated(
    module: nn.Module, loss: str, x: Tensor, y: Tensor, lane: str = "serial", rule: object = None
) -> tree.Tree:
    """Sums over two clients whose training and test rows are x, y."""
    half = len(y) // 2 + 1
    parts = [(x[:half], y[:half]), (x[half:], y[half:])]
    data = Federation.from_clients(parts, client_tests=parts)
    engine = Vectorised(Task(module, loss=loss), data, device="cpu", dtype="float64", lane=lane, clients_at_once=8)  # type: ignore[arg-type]
    shared = {"model": engine.start()}
    ids = np.arange(2)
    return engine.exchange(rule or Evaluate(), Plain(), Broadcast(shared=shared), ids, round=0, seed=0).reply  # type: ignore[arg-type]


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_evaluation_counts_losses_and_decisions(lane: str) -> None:
    data = tiny.federation((5, 6))
    x, y = data.train.x, data.train.y
    module = tiny.convnet()
    reply = evaluated(module, "cross_entropy", x, y, lane)
    logits = module.double().eval()(x).detach()
    expected = torch.nn.functional.cross_entropy(logits, y, reduction="sum")
    assert set(reply) == {"loss", "accuracy"}, "without the number of classes, there are no macro scores"
    assert float(reply["loss"]["count"].sum()) == float(reply["accuracy"]["count"].sum()) == 11
    assert float(reply["accuracy"]["total"].sum()) == int((logits.argmax(1) == y).sum())
    assert float(reply["loss"]["total"].sum()) == pytest.approx(float(expected), abs=1e-10)
    asked = evaluated(module, "cross_entropy", x, y, lane, LossQuery())
    assert torch.equal(asked["correct"], reply["accuracy"]["total"])
    assert torch.equal(asked["loss"], reply["loss"]["total"]) and float(asked["rows"].sum()) == 11


class Column(nn.Module):
    """A linear model whose output has a given shape behind the batch axis."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape
        self.linear = nn.Linear(2, int(torch.Size(shape).numel()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).reshape(len(x), *self.shape)


@pytest.mark.parametrize("output", [(), (1,)])
@pytest.mark.parametrize("target", [(), (1,)])
def test_evaluation_of_a_binary_model(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    x = 5 * torch.randn(7, 2, generator=draw, dtype=torch.float64)
    module = tiny.seeded(lambda: Column(*output))
    decided = (copy.deepcopy(module).double()(x).reshape(7) > 0).long()
    assert 0 < int(decided.sum()) < 7
    y = decided.clone()
    y[2] = 1 - y[2]  # all right but one
    reply = evaluated(module, "binary_cross_entropy", x, y.reshape(7, *target))
    assert float(reply["accuracy"]["total"].sum()) == 6
    counts = reply["precision"]["counts"].sum(0)  # right, decided, occurring: of class 0 and of class 1
    assert counts[0].sum() == 6 and counts[1].tolist() == decided.bincount().tolist()
    assert counts[2].tolist() == y.bincount().tolist()


def test_evaluation_of_several_binary_labels() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(7, 2, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 2, (7, 3), generator=draw)
    module = tiny.seeded(lambda: Column(3))
    reply = evaluated(module, "binary_cross_entropy", x, y)
    share = ((module.double()(x) > 0).long() == y).double().mean(1)
    assert float(reply["accuracy"]["total"].sum()) == pytest.approx(float(share.sum()))


@pytest.mark.parametrize("output", [(), (1,)])
def test_evaluation_of_a_regression(output: tuple[int, ...]) -> None:
    x, y = torch.randn(7, 2, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    module = tiny.seeded(lambda: Column(*output))
    reply = evaluated(module, "squared_error", x, y)
    given = module.double()(x).detach().reshape(7)
    assert float(reply["loss"]["total"].sum()) == pytest.approx(float(given.square().sum()))
    assert float(reply["absolute_error"]["total"].sum()) == pytest.approx(float(given.abs().sum()))
    asked = evaluated(module, "squared_error", x, y, rule=LossQuery())
    assert float(asked["correct"].sum()) == 0, "a regression makes no decisions"
