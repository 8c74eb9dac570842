"""Rows per second of models with attention and of LSTMs: every lane against a loop in plain PyTorch, in one run.

    python benchmarks/sequence_models.py [--device cuda] [--small] [--only vit,lstm] [--lanes batched,batched+compile]

The first column is a loop written by hand in PyTorch: one client after another, eager, torch.optim.SGD, in the same
precision. Rates count whole rounds after the first. `bert` needs `transformers` (random weights, LoRA of rank 8 on
queries and values). About four minutes on an H200.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.engines.vectorised.engine import Vectorised
from consilience.task.task import Task

CLASSES = 10
PROFILE = False


class Patches(nn.Module):
    """A vision transformer for pictures of 32 x 32."""

    def __init__(self, width: int, depth: int, heads: int, patch: int = 4) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.place = nn.Parameter(0.02 * torch.randn(1, (32 // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Block(nn.Module):
    """Attention and two dense layers, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Characters(nn.Module):
    """The LSTM of the Shakespeare benchmark: the last position's class."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(80, 8), nn.LSTM(8, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0][:, -1])


class Encoder(nn.Module):
    """nn.TransformerEncoder over tokens."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.table = nn.Embedding(1000, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.table(x)).mean(1))


class LowRank(nn.Module):
    """A frozen dense layer and a trained product of rank r beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


class Bert(nn.Module):
    """BERT-base size with LoRA on queries and values; a head is trained, too."""

    def __init__(self, **size: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **size)
        self.bert = BertModel(config, add_pooling_layer=False).requires_grad_(False)
        for layer in self.bert.encoder.layer:
            own = layer.attention.self
            own.query, own.value = LowRank(own.query), LowRank(own.value)
        self.head = nn.Linear(config.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bert(input_ids=x).last_hidden_state[:, 0])


@dataclass(frozen=True)
class Workload:
    """So many clients, each doing so many steps of so many rows."""

    name: str
    model: Callable[[], nn.Module]
    rows: Callable[[int], Tensor]
    clients: int
    steps: int
    batch: int
    precision: str


def tokens(length: int, vocabulary: int) -> Callable[[int], Tensor]:
    """Random sequences."""
    return lambda n: torch.randint(0, vocabulary, (n, length))


def workloads(small: bool) -> list[Workload]:
    """Those of docs/performance.md; `small` shrinks them for a CPU."""
    pictures: Callable[[int], Tensor] = lambda n: torch.randn(n, 3, 32, 32)  # noqa: E731
    if small:
        return [
            Workload("vit", lambda: Patches(32, 2, 2, 8), pictures, 4, 2, 8, "full"),
            Workload("lstm", lambda: Characters(32, 2), tokens(20, 80), 4, 2, 8, "full"),
            Workload("encoder", lambda: Encoder(32, 2, 2), tokens(16, 1000), 4, 2, 8, "full"),
            Workload("bert", lambda: Bert(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                          intermediate_size=64), tokens(16, 1000), 4, 2, 4, "full"),
        ]  # fmt: skip
    return [
        Workload("vit", lambda: Patches(192, 6, 3), pictures, 10, 20, 64, "bf16"),
        Workload("lstm", lambda: Characters(256, 2), tokens(80, 80), 10, 10, 32, "full"),
        Workload("encoder", lambda: Encoder(256, 4, 4), tokens(64, 1000), 20, 10, 32, "bf16"),
        Workload("bert", Bert, tokens(128, 1000), 20, 10, 16, "bf16"),
    ]


def by_hand(work: Workload, data: list[tuple[Tensor, Tensor]], device: str) -> float:
    """Rows per second, from a few clients."""
    model, some = work.model().to(device).train(), data[: min(3, len(data))]
    bf16 = torch.autocast(device, dtype=torch.bfloat16, enabled=work.precision == "bf16")
    best = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for x, y in some:
            mine = copy.deepcopy(model)
            optimiser = torch.optim.SGD([p for p in mine.parameters() if p.requires_grad], lr=0.01)
            for a, b in zip(x.to(device).split(work.batch), y.to(device).split(work.batch)):
                optimiser.zero_grad()
                with bf16:
                    loss = F.cross_entropy(mine(a).float(), b)
                loss.backward()
                optimiser.step()
        wait(device)
        best = max(best, len(some) * work.steps * work.batch / (time.perf_counter() - began))
    return best


def in_lane(work: Workload, data: list[tuple[Tensor, Tensor]], device: str, how: str, rounds: int) -> str:
    """Rows per second of whole rounds and the most memory in use, or why it does not run."""
    lane, _, compiled = how.partition("+")
    options: Any = {"device": device, "precision": work.precision, "lane": lane, "compile": bool(compiled)}
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        torch.manual_seed(0)
        convolves = work.name == "vit" and lane == "batched"
        options["lane"] = "batched-matmul" if convolves else lane
        task = Task(work.model())
        engine = Vectorised(task, Federation.from_clients(data), **options)
        times, began = [], time.perf_counter()
        for _ in run(fedavg(lr=0.01, batch_size=work.batch), engine, rounds=rounds):
            wait(device)
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
        if PROFILE:
            with torch.profiler.profile() as profile:
                list(run(fedavg(lr=0.01, batch_size=work.batch), engine, rounds=1))
                wait(device)
            print(
                profile.key_averages().table(sort_by="self_device_time_total", row_limit=14, max_name_column_width=70)
            )
    except Exception as problem:
        return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
    rate = work.clients * work.steps * work.batch / min(times[1:])
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    chosen = f" ({engine.choice.lane})" if lane == "auto" else ""
    return f"{rate:,.0f} rows/s, {memory:.1f} GiB, first round {times[0]:.0f} s{chosen}"


def wait(device: str) -> None:
    """Until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="vit,lstm,encoder,bert")
    parser.add_argument("--lanes", default="batched,batched+compile,streams", help="+compile: compiled")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="also print the kernels that take longest")
    options = parser.parse_args()
    global PROFILE
    PROFILE = options.profile
    table = []
    for work in workloads(options.small):
        if work.name not in options.only.split(","):
            continue
        torch.manual_seed(0)
        rows = work.steps * work.batch
        data = [(work.rows(rows), torch.randint(0, CLASSES, (rows,))) for _ in range(work.clients)]
        line = [work.name, work.precision, f"by hand {by_hand(work, data, options.device):,.0f} rows/s"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for lane in options.lanes.split(","):
                line.append(f"{lane} {in_lane(work, data, options.device, lane, options.rounds)}")
                print(line[0], line[-1], flush=True)
        for message in {str(one.message).partition(". Please")[0][:250] for one in caught}:
            print("   warned:", message, flush=True)
        table.append(line)
    for line in table:
        print(" | ".join(line), flush=True)


if __name__ == "__main__":
    main()
