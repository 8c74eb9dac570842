"""Modules that vmap cannot batch, or that look at values: they run in the lanes that can, and the run says why."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import sequence_layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.core import tree
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.engines.vectorised import tuning
from consilience.engines.vectorised.engine import Vectorised
from consilience.task.task import Task

RULE = fedavg(lr=0.1, batch_size=4, epochs=2)


class Packed(nn.Module):
    """Sequences of unequal length, packed: what is computed depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(sequence_layers.WIDTH, sequence_layers.WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0].detach().abs() * 10).long() % sequence_layers.LENGTH
        pack = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.lstm(pack)[1][0].transpose(0, 1)


class Halving(torch.autograd.Function):
    """An operation with a gradient of its own, in the old style, which vmap refuses."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Old(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Halving.apply(x)


def engine(layer: nn.Module, lane: str, traced: bool = True) -> Vectorised:
    torch.manual_seed(0)
    made = Vectorised(
        Task(sequence_layers.Sequence(layer)), sequence_layers.federation(), device="cpu", dtype="float64", lane=lane
    )  # type: ignore[arg-type]
    if traced:
        program = made.program(RULE.client, RULE.channel)
        program.one.hot = program.group.hot = 0
    return made


def by_hand(layer: nn.Module) -> dict[str, Tensor]:
    """A round in plain PyTorch, over the batches that the engine plans."""
    planner, total = engine(nn.Identity(), "serial"), dict[str, Tensor]()
    store = planner.store("train")
    for client, size in enumerate(sequence_layers.SIZES):
        torch.manual_seed(0)
        model = sequence_layers.Sequence(copy.deepcopy(layer)).double()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = np.array([2 * -(-size // 4)])
        plan = planner.plan(RULE.client.work, np.array([client]), steps, round=0, seed=1)
        for step in range(int(steps[0])):
            rows = plan.rows[step, 0, : int(plan.live[step, 0])]
            optimiser.zero_grad()
            F.cross_entropy(model(store.x[rows]), store.y[rows]).backward()
            optimiser.step()
        for name, value in model.named_parameters():
            total[name] = total.get(name, 0.0) + value.detach() * size / sum(sequence_layers.SIZES)
    return total


@pytest.mark.parametrize("layer", [Packed, Old])
@pytest.mark.parametrize("lane", ["serial", "streams"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_runs_in_lanes_that_do_not_batch(layer: type[nn.Module], lane: str) -> None:
    torch.manual_seed(0)
    made = layer()
    (done,) = run(RULE, engine(made, lane), rounds=1, seed=1)
    expected = by_hand(made)
    for path, value in tree.flatten(done.model["params"]).items():
        torch.testing.assert_close(value, expected[path], rtol=1e-12, atol=1e-12)


def test_the_run_says_once_why_it_does_not_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SLOW_STEP", 1e9)  # try to batch however slow this machine is
    monkeypatch.setattr(tuning, "SLOW_UNLOCKED_STEP", 1e9)
    made = engine(Old(), "auto", traced=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(run(RULE, made, rounds=2, seed=1))
    told = [str(one.message) for one in caught if "cannot run this model" in str(one.message)]
    assert len(told) == 1
    assert "lane 'batched' cannot run this model: an autograd.Function without setup_context" in told[0]
    assert made.choice.lane in ("serial", "streams")


def test_the_run_says_once_why_it_is_not_traced() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(run(RULE, engine(Packed(), "serial"), rounds=2, seed=1))
    told = [str(one.message) for one in caught if "cannot be traced" in str(one.message)]
    assert len(told) == 1 and ("depends on values" in told[0] or "read out of a tensor" in told[0])


def test_auto_refuses_what_no_lane_can_run() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(-1, 1000)

    with pytest.raises(RuntimeError, match="shape"):
        list(run(RULE, engine(Wrong(), "auto", traced=False), rounds=1))

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.poisson(x.abs())

    with pytest.raises(Invalid, match="poisson cannot be drawn"):
        list(run(RULE, engine(Draws(), "auto", traced=False), rounds=1))
