"""Recurrent layers of a group of clients, against torch's own for each client."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from consilience.core import recurrent
from consilience.core.randomness import KeyedDraws

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
