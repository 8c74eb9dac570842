"""The model, the data and the training loop: independent of consilience."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build() -> nn.Module:
    """Two dense layers for digits of 8 x 8 pixels, the same for every client at the start."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def load(client: int, clients: int) -> tuple[TensorDataset, TensorDataset]:
    """(training, test) rows of one client: half of its digits are of one kind."""
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    owner = rng.integers(clients, size=len(y))
    favourite = rng.random(len(y)) < 0.5
    owner[favourite] = y[favourite] % clients
    mine = np.flatnonzero(owner == client)
    rows = TensorDataset(torch.tensor(x[mine] / 16, dtype=torch.float32), torch.tensor(y[mine]))
    cut = int(0.8 * len(rows))
    return TensorDataset(*rows[:cut]), TensorDataset(*rows[cut:])


def train(model: nn.Module, rows: TensorDataset, epochs: int, lr: float) -> float:
    """Plain SGD; the mean loss."""
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for x, y in DataLoader(rows, batch_size=16, shuffle=True):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimiser.step()
            total += loss.item() * len(y)
    return total / (epochs * len(rows))


@torch.no_grad()
def test(model: nn.Module, rows: TensorDataset) -> tuple[float, float]:
    """(loss, accuracy)."""
    x, y = rows.tensors
    output = model(x)
    return F.cross_entropy(output, y).item(), (output.argmax(1) == y).float().mean().item()
