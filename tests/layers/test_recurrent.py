"""Recurrent layers of a group of clients, against torch's own for each client."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import consilience as cs
from consilience.layers import recurrent
from consilience.layers.randomness import KeyedDraws

CASES: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"bias": False}),
    (nn.LSTM, {"proj_size": 2, "bidirectional": True}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.GRU, {"bias": False}),
    (nn.RNN, {"bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_values_and_gradients(kind: type[nn.Module], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "BATCHED_BY_TORCH", ())  # as on a GPU
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nets = [kind(4, 5, **options).double() for _ in range(3)]
        x = torch.randn(3, 6, 7, 4, dtype=torch.float64)
    values = {n: torch.stack([dict(net.named_parameters())[n].detach() for net in nets]) for n in nets[0].state_dict()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        out, last = functional_call(nets[0], values, (x,))
        return out.sin().sum() + sum((state**3).sum() for state in (last if isinstance(last, tuple) else [last]))

    def keyed(values: dict[str, Tensor], x: Tensor) -> Tensor:
        with KeyedDraws(torch.tensor(1)):
            return loss(values, x)

    found, by_x = vmap(grad(keyed, argnums=(0, 1)))(values, x)
    values_of = vmap(keyed)(values, x)
    for client in range(3):
        mine = {name: value[client].clone().requires_grad_() for name, value in values.items()}
        own = x[client].clone().requires_grad_()
        expected = loss(mine, own)
        torch.testing.assert_close(values_of[client], expected.detach(), rtol=1e-12, atol=1e-12)
        *grads, grad_x = torch.autograd.grad(expected, [*mine.values(), own])
        torch.testing.assert_close(by_x[client], grad_x, rtol=1e-11, atol=1e-12)
        for name, value in zip(mine, grads):
            torch.testing.assert_close(found[name][client], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_one_client_alone(kind: type[nn.Module], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "BATCHED_BY_TORCH", ())  # as on a GPU, where no lane uses cuDNN's layers
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net, x = kind(4, 5, **options).double(), torch.randn(6, 7, 4, dtype=torch.float64)
    values = {name: value.detach() for name, value in net.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, values, (x,))[0].sin().sum()

    def keyed(values: dict[str, Tensor], x: Tensor) -> Tensor:
        with KeyedDraws(torch.tensor(1)):
            return loss(values, x)

    found, expected = grad(keyed)(values, x), grad(loss)(values, x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("lane", ["serial", "streams", "batched"])
def test_traced_steps_of_every_lane(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough steps that they are traced: the layers of a GPU give what torch's own give."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x)[0][:, -1])

    def trained() -> dict[str, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            net = Net().double()
            clients = [(torch.randn(40, 5, 3, dtype=torch.float64), torch.randint(0, 2, (40,))) for _ in range(3)]
        federation = cs.Federation.from_clients(clients, client_tests=clients)
        algorithm = cs.fedavg(lr=0.5, batch_size=4, epochs=6)
        found = cs.train(net, federation, algorithm, rounds=2, progress=False, lane=lane, dtype="float64")
        return found.model.state_dict()

    expected = trained()
    monkeypatch.setattr(recurrent, "BATCHED_BY_TORCH", ())
    for name, value in trained().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-11)
