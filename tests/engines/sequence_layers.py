"""Small models with recurrent layers, attention and randomness of their own, for tests of lanes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.core.federation import Federation

WIDTH, LENGTH, CLASSES = 8, 6, 3
SIZES = (7, 12, 3)  # unequal: short last batches, and groups that narrow


class Sequence(nn.Module):
    """Something that reads and gives [n, length, width], between two dense layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.first(x))
        y = y[0] if isinstance(y, tuple) else y
        return self.head(y.mean(1))


class LengthFirst(nn.Module):
    """A layer whose batch is the second dimension."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.transpose(0, 1))
        return (y[0] if isinstance(y, tuple) else y).transpose(0, 1)


class Attention(nn.Module):
    """Scaled dot-product attention with dropout of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.2 * self.training).transpose(1, 2).flatten(2)


class DropPath(nn.Module):
    """Stochastic depth as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.7)
        return x * kept.div_(0.7)


class Draws(nn.Module):
    """Random operations of many kinds, also in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.empty(x.shape, dtype=x.dtype, device=x.device).uniform_(-1, 1)
        x = F.dropout(x, 0.2, self.training) + F.gumbel_softmax(x, dim=-1) * torch.bernoulli(torch.full_like(x, 0.5))
        mixed = x[torch.randperm(len(x), device=x.device)]
        some = torch.multinomial(torch.ones(LENGTH, device=x.device), 3)
        return x + 0.1 * mixed + x[:, some].mean(1, keepdim=True) + torch.zeros_like(x).exponential_().log1p()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "LSTM, dropout": lambda: nn.LSTM(WIDTH, WIDTH // 2, 2, dropout=0.2, bidirectional=True, batch_first=True),
    "GRU, length first": lambda: LengthFirst(nn.GRU(WIDTH, WIDTH, 2, dropout=0.2)),
    "RNN": lambda: nn.RNN(WIDTH, WIDTH, batch_first=True, bias=False),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True),
    "encoder, length first": lambda: LengthFirst(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1)),
    "attention": Attention,
    "drop path": DropPath,
    "draws": Draws,
}


def model(name: str) -> nn.Module:
    """The model, its values from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Sequence(MODELS[name]())


def federation() -> Federation:
    """Clients with sequences."""
    draw = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(n, LENGTH, WIDTH, generator=draw), torch.randint(0, CLASSES, (n,), generator=draw)) for n in SIZES
    ]
    return Federation.from_clients(rows, client_tests=[(x[:3], y[:3]) for x, y in rows])
