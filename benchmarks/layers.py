"""Every recurrent, attention, normalisation, embedding and dropout layer of torch.nn in every lane.

    python benchmarks/layers.py [--device cuda] [--only LSTM,Embedding] [--store docs/results/layers_cpu.json]

Each cell trains a small model with the layer in float64 for a round (unequal clients, short last batches, traced
steps) and compares the new model with a loop in plain PyTorch over the same batches; layers that draw random numbers
are compared with the lane `serial`. "works" is agreement to 1e-9; everything else is the reason why not. About three
minutes on two cores, three on a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.engines.vectorised import program
from consilience.engines.vectorised.engine import Vectorised
from consilience.task.task import Task

LANES = ("serial", "streams", "batched")
SIZES = (7, 12, 6, 10)  # batches of four: some are short, none has a single row
WIDTH, LENGTH, SIDE, TOKENS, CLASSES = 8, 6, 5, 11, 3
LR, EPOCHS, BATCH, SEED = 0.05, 2, 4, 3
program.HOT = 2  # trace early: a table of untraced steps would show nothing


class Model(nn.Module):
    """A layer between a dense layer and a head."""

    def __init__(self, layer: nn.Module, use: Callable[[Any, Tensor], Tensor], inputs: str) -> None:
        super().__init__()
        channels = 1 if inputs == "tokens" else WIDTH
        self.first = nn.Identity() if inputs == "tokens" else nn.Linear(channels, channels)
        self.layer, self.use = layer, use
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self.layer, self.first(x)).flatten(1))


@dataclass(frozen=True)
class Case:
    """A layer, what it reads, and how it is called; `draws`: whether it draws random numbers."""

    family: str
    name: str
    make: Callable[[], nn.Module]
    inputs: str = "sequence"
    use: Callable[[Any, Tensor], Any] = field(default=lambda layer, x: layer(x))
    draws: bool = False


def _output(layer: Any, x: Tensor) -> Tensor:
    return layer(x)[0]


def _length_first(layer: Any, x: Tensor) -> Tensor:
    out = layer(x.transpose(0, 1))
    return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


def _cell(layer: Any, x: Tensor) -> Tensor:
    state: Any = None
    for step in x.unbind(1):
        state = layer(step) if state is None else layer(step, state)
    return state[0] if isinstance(state, tuple) else state


def _packed(layer: Any, x: Tensor) -> Tensor:
    lengths = 1 + (x[:, 0, 0].detach().abs() * 10).long() % LENGTH
    pack = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    _, state = layer(pack)
    state = state[0] if isinstance(state, tuple) else state
    return state.transpose(0, 1)


def _attend(**options: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda layer, x: layer(x, x, x, **options)[0]


def _padded_keys(layer: Any, x: Tensor) -> Tensor:
    return layer(x, x, x, key_padding_mask=torch.arange(LENGTH, device=x.device).expand(x.shape[:2]) > 3)[0]


def _padded(layer: Any, x: Tensor) -> Tensor:
    return layer(x, src_key_padding_mask=torch.arange(LENGTH, device=x.device).expand(x.shape[:2]) > 3)


def _causal(layer: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device, dtype=x.dtype)
    return layer(x, mask, is_causal=True)


def _both(layer: Any, x: Tensor) -> Tensor:
    return layer(x, x.flip(1))


def _bag(layer: Any, x: Tensor) -> Tensor:
    return layer(x.flatten(), torch.arange(0, x.numel(), LENGTH, device=x.device))


class Attention(nn.Module):
    """`F.scaled_dot_product_attention` by itself."""

    def __init__(self, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.dropout, self.causal = dropout, causal

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (2, -1)).transpose(1, 2)
        rate = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(x, x, x, dropout_p=rate, is_causal=self.causal)


class OwnNoise(nn.Module):
    """A user's noise."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class DropPath(nn.Module):
    """Stochastic depth as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.8)
        return x * kept.div_(0.8) if self.training else x


def cases() -> list[Case]:
    """All of them."""
    found: list[Case] = []

    def add(family: str, name: str, make: Callable[[], nn.Module], *rest: Any, **options: Any) -> None:
        found.append(Case(family, name, make, *rest, **options))

    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        first, options = kind.__name__, {"batch_first": True}
        add("recurrent", first, lambda k=kind, o=options: k(WIDTH, 5, **o), use=_output)
        add("recurrent", f"{first}, length first", lambda k=kind: k(WIDTH, 5), use=_length_first)
        add(
            "recurrent",
            f"{first}, two layers, bidirectional",
            lambda k=kind, o=options: k(WIDTH, 5, 2, bidirectional=True, **o),
            use=_output,
        )
        add("recurrent", f"{first}, bias=False", lambda k=kind, o=options: k(WIDTH, 5, bias=False, **o), use=_output)
        add(
            "recurrent",
            f"{first}, two layers, dropout=0.2",
            lambda k=kind, o=options: k(WIDTH, 5, 2, dropout=0.2, **o),
            use=_output,
            draws=True,
        )
        add("recurrent", f"{first}, packed sequences", lambda k=kind, o=options: k(WIDTH, 5, **o), use=_packed)
    add(
        "recurrent",
        "RNN, nonlinearity='relu'",
        lambda: nn.RNN(WIDTH, 5, nonlinearity="relu", batch_first=True),
        use=_output,
    )
    add("recurrent", "LSTM, proj_size=3", lambda: nn.LSTM(WIDTH, 5, proj_size=3, batch_first=True), use=_output)
    for cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        add("recurrent", cell.__name__, lambda k=cell: k(WIDTH, 5), use=_cell)

    heads = lambda **o: nn.MultiheadAttention(WIDTH, 2, batch_first=True, **o)  # noqa: E731
    add("attention", "scaled_dot_product_attention", Attention)
    add("attention", "scaled_dot_product_attention, is_causal", lambda: Attention(causal=True))
    add("attention", "scaled_dot_product_attention, dropout_p=0.2", lambda: Attention(0.2), draws=True)
    add("attention", "MultiheadAttention", heads, use=_attend())
    add("attention", "MultiheadAttention, need_weights=False", heads, use=_attend(need_weights=False))
    add("attention", "MultiheadAttention, key_padding_mask", heads, use=_padded_keys)
    add(
        "attention",
        "MultiheadAttention, length first",
        lambda: nn.MultiheadAttention(WIDTH, 2),
        use=lambda m, x: _length_first(lambda y: m(y, y, y), x),
    )
    add(
        "attention",
        "MultiheadAttention, add_bias_kv, add_zero_attn",
        lambda: heads(add_bias_kv=True, add_zero_attn=True),
        use=_attend(),
    )
    add(
        "attention",
        "MultiheadAttention, kdim, vdim",
        lambda: heads(kdim=4, vdim=5),
        use=lambda m, x: m(x, x[..., :4], x[..., :5])[0],
    )
    add("attention", "MultiheadAttention, dropout=0.1", lambda: heads(dropout=0.1), use=_attend(), draws=True)
    add(
        "attention",
        "MultiheadAttention, dropout=0.1, need_weights=False",
        lambda: heads(dropout=0.1),
        use=_attend(need_weights=False),
        draws=True,
    )
    layer = lambda rate=0.0, **o: nn.TransformerEncoderLayer(WIDTH, 2, 16, rate, **{"batch_first": True, **o})  # noqa: E731
    add("attention", "TransformerEncoderLayer, dropout=0", layer)
    add("attention", "TransformerEncoderLayer, dropout=0.1", lambda: layer(0.1), draws=True)
    add(
        "attention",
        "TransformerEncoderLayer, length first, dropout=0.1",
        lambda: layer(0.1, batch_first=False),
        use=_length_first,
        draws=True,
    )
    add("attention", "TransformerEncoderLayer, norm_first", lambda: layer(norm_first=True))
    add("attention", "TransformerEncoderLayer, causal mask", layer, use=_causal)
    add("attention", "TransformerEncoder, src_key_padding_mask", lambda: nn.TransformerEncoder(layer(), 2), use=_padded)
    add("attention", "TransformerEncoder, dropout=0.1", lambda: nn.TransformerEncoder(layer(0.1), 2), draws=True)
    decoder = lambda rate=0.0: nn.TransformerDecoderLayer(WIDTH, 2, 16, rate, batch_first=True)  # noqa: E731
    add("attention", "TransformerDecoderLayer, dropout=0", decoder, use=_both)
    add(
        "attention",
        "TransformerDecoder, dropout=0.1",
        lambda: nn.TransformerDecoder(decoder(0.1), 2),
        use=_both,
        draws=True,
    )
    add(
        "attention",
        "Transformer, dropout=0",
        lambda: nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, batch_first=True),
        use=_both,
    )

    for number, inputs in ((1, "vector"), (1, "sequence"), (2, "picture"), (3, "volume")):
        over = ", over a length" if inputs == "sequence" else ""
        norm = getattr(nn, f"BatchNorm{number}d")
        add(
            "normalisation",
            f"BatchNorm{number}d{over}",
            lambda k=norm, i=inputs: k(LENGTH if i == "sequence" else WIDTH),
            inputs,
        )
    add("normalisation", "BatchNorm2d, momentum=None", lambda: nn.BatchNorm2d(WIDTH, momentum=None), "picture")
    add(
        "normalisation",
        "BatchNorm2d, track_running_stats=False",
        lambda: nn.BatchNorm2d(WIDTH, track_running_stats=False),
        "picture",
    )
    add("normalisation", "SyncBatchNorm", lambda: nn.SyncBatchNorm(WIDTH), "picture")
    for number, inputs, channels in ((1, "sequence", LENGTH), (2, "picture", WIDTH), (3, "volume", WIDTH)):
        norm = getattr(nn, f"InstanceNorm{number}d")
        add("normalisation", f"InstanceNorm{number}d, affine", lambda k=norm, c=channels: k(c, affine=True), inputs)
    add(
        "normalisation",
        "InstanceNorm2d, track_running_stats",
        lambda: nn.InstanceNorm2d(WIDTH, track_running_stats=True),
        "picture",
    )
    add("normalisation", "LayerNorm", lambda: nn.LayerNorm(WIDTH))
    add("normalisation", "LayerNorm, bias=False", lambda: nn.LayerNorm(WIDTH, bias=False))
    add("normalisation", "LayerNorm over a picture", lambda: nn.LayerNorm((WIDTH, SIDE, SIDE)), "picture")
    add("normalisation", "GroupNorm", lambda: nn.GroupNorm(2, WIDTH), "picture")
    add("normalisation", "RMSNorm", lambda: nn.RMSNorm(WIDTH))
    add("normalisation", "LocalResponseNorm", lambda: nn.LocalResponseNorm(3), "picture")
    add("normalisation", "CrossMapLRN2d", lambda: nn.CrossMapLRN2d(3), "picture")
    add("normalisation", "weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4)))
    add("normalisation", "spectral_norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 4)))

    table = lambda **o: nn.Embedding(TOKENS, 4, **o)  # noqa: E731
    add("embedding", "Embedding", table, "tokens")
    add("embedding", "Embedding, padding_idx=0", lambda: table(padding_idx=0), "tokens")
    add("embedding", "Embedding, max_norm=1", lambda: table(max_norm=1.0), "tokens")
    add("embedding", "Embedding, scale_grad_by_freq", lambda: table(scale_grad_by_freq=True), "tokens")
    add("embedding", "Embedding, sparse", lambda: table(sparse=True), "tokens")
    for mode in ("mean", "sum", "max"):
        add("embedding", f"EmbeddingBag, mode={mode!r}", lambda m=mode: nn.EmbeddingBag(TOKENS, 4, mode=m), "tokens")
    add("embedding", "EmbeddingBag, offsets", lambda: nn.EmbeddingBag(TOKENS, 4), "tokens", use=_bag)
    add("embedding", "EmbeddingBag, sparse", lambda: nn.EmbeddingBag(TOKENS, 4, sparse=True), "tokens")
    add("embedding", "EmbeddingBag, padding_idx=0", lambda: nn.EmbeddingBag(TOKENS, 4, padding_idx=0), "tokens")
    add("embedding", "Bilinear", lambda: nn.Bilinear(WIDTH, WIDTH, 4), use=_both)

    for make in (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout):
        add("random", make.__name__, lambda k=make: k(0.2), draws=True)
    for number, inputs in ((1, "sequence"), (2, "picture"), (3, "volume")):
        add("random", f"Dropout{number}d", lambda n=number: getattr(nn, f"Dropout{n}d")(0.2), inputs, draws=True)
    add("random", "RReLU", nn.RReLU, draws=True)
    add("random", "FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, 3), "picture", draws=True)
    add("random", "torch.randn_like in forward", OwnNoise, draws=True)
    add("random", "drop path", DropPath, draws=True)
    return found


SHAPES = {"vector": (WIDTH,), "sequence": (LENGTH, WIDTH), "picture": (WIDTH, SIDE, SIDE), "volume": (WIDTH, 3, 3, 3),
          "tokens": (LENGTH,)}  # fmt: skip


def model_of(case: Case) -> nn.Module:
    """The model with the layer, its values from a fixed seed."""
    torch.manual_seed(0)
    model = Model(case.make(), case.use, "tokens" if case.inputs == "tokens" else "other").double()
    if case.inputs in ("picture", "volume"):
        model.first = nn.Identity()
    model.eval()(_clients(case)[0][0][:2])
    return model.train()


def _clients(case: Case) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    shape = SHAPES[case.inputs]

    def rows(n: int) -> Tensor:
        if case.inputs == "tokens":
            return torch.randint(0, TOKENS, (n, *shape), generator=draw)
        return torch.randn(n, *shape, generator=draw, dtype=torch.float64)

    return [(rows(n), torch.randint(0, CLASSES, (n,), generator=draw)) for n in SIZES]


def in_lane(case: Case, lane: str, device: str) -> dict[str, Tensor]:
    """The global model after a round in the engine."""
    engine = Vectorised(
        Task(model_of(case)), Federation.from_clients(_clients(case)), device=device, dtype="float64", lane=lane
    )
    (done,) = run(fedavg(lr=LR, epochs=EPOCHS, batch_size=BATCH), engine, rounds=1, seed=SEED)
    return {name: value.cpu() for part in done.model.values() for name, value in part.items()}


def by_hand(case: Case, device: str) -> dict[str, Tensor]:
    """The same round in plain PyTorch, over the batches that the engine plans."""
    planner = Task(nn.Linear(1, 1))  # which is not used: the batches do not depend on the model
    engine = Vectorised(planner, Federation.from_clients(_clients(case)), device="cpu", dtype="float64")
    work = fedavg(lr=LR, epochs=EPOCHS, batch_size=BATCH).client.work
    total: dict[str, Tensor] = {}
    for client, (x, y) in enumerate(_clients(case)):
        ids, model = np.array([client]), model_of(case).to(device)
        steps = np.array([EPOCHS * -(-len(y) // BATCH)])
        plan = engine.plan(work, ids, steps, round=0, seed=SEED)
        begin = int(engine.store("train").starts[client])
        optimiser = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(int(steps[0])):
            rows = plan.rows[step, 0, : int(plan.live[step, 0])] - begin
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows].to(device)), y[rows].to(device)).backward()
            optimiser.step()
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, value in values.items():
            part = value.detach().cpu().double() * len(y) / sum(SIZES)
            total[name] = total.get(name, 0.0) + part
    return total


def cell(case: Case, lane: str, device: str, expected: dict[str, Tensor] | str) -> str:
    """ "works", or why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = in_lane(case, lane, device)
    except Exception as problem:  # the reason is what the table shows
        return f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    if isinstance(expected, str):
        return f"works, but PyTorch: {expected}"
    floats = [name for name, value in found.items() if value.is_floating_point()]
    gap = max(float((found[name] - expected[name]).abs().max()) for name in floats)
    return "works" if gap < 1e-9 else f"differs by {gap:.0e}"


def reference(case: Case, device: str) -> dict[str, Tensor] | str:
    """What every lane is compared with."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return in_lane(case, "serial", device) if case.draws else by_hand(case, device)
    except Exception as problem:
        return f"{type(problem).__name__}: {' '.join(str(problem).split())}"


def main() -> int:
    """Print the table, and store it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    wanted = [part.lower() for part in options.only.split(",") if part]
    chosen = [c for c in cases() if not wanted or any(part in c.name.lower() for part in wanted)]
    began, rows = time.perf_counter(), []
    for case in chosen:
        expected = reference(case, options.device)
        cells = {lane: cell(case, lane, options.device, expected) for lane in LANES}
        rows.append({"family": case.family, "layer": case.name, "draws": case.draws, **cells})
        print(f"{case.family:14} {case.name:52} " + " ".join(f"{c[:150]:10}" for c in cells.values()), flush=True)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine()
    record = {"device": options.device.split(":")[0], "machine": name, "torch": torch.__version__, "rows": rows}
    if options.store:
        options.store.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    bad = sum(row[lane] != "works" for row in rows for lane in LANES)
    print(f"{len(rows) * len(LANES) - bad} of {len(rows) * len(LANES)} cells work; {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
