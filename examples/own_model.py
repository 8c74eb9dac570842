"""Your own module and tensors, federated: `python examples/own_model.py`."""

import torch
from torch import nn

import consilience as cs

# Eight hospitals with 40 to 180 patients each; what they measure is shifted a little from one to the next.
draw = torch.Generator().manual_seed(0)
teacher = torch.randn(12, 3, generator=draw)


def hospital(patients: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(patients, 12, generator=draw) + shift
    return x, (x @ teacher).argmax(1)


clients = [hospital(40 + 20 * k, shift=0.1 * k) for k in range(8)]
tests = [hospital(50, shift=0.1 * k) for k in range(8)]

# From here on, ten lines of yours.
module = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
federation = cs.Federation.from_clients(clients, client_tests=tests)
result = cs.train(module, federation, cs.simprox(lr=0.1, epochs=2), rounds=30, seed=1)

print(result.table())
