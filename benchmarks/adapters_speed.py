"""Transformers in a round of federated training: rows a second and peak memory, by hand and with consilience.

    python benchmarks/adapters_speed.py                       # on a GPU: two to four minutes, most of it compiling
    python benchmarks/adapters_speed.py --small --device cpu  # a check of the script itself

Two workloads, each 20 clients x 10 steps x 16 rows of 128 tokens: BERT base with LoRA (rank 8 on queries and values,
and the head), and a whole encoder of 4 layers, 256 wide. "By hand" trains the clients one after another with
`torch.optim.SGD`, autocast for bf16, as one would write it; both sides start from the same weights and take the same
number of steps. No dropout, so that both compute the same. The peak is what PyTorch reserved from the first round on,
with tracing, capturing and warming up. The last lines are a table.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import consilience as cs
from consilience.core.rounds import run

CLIENTS, STEPS, ROWS, TOKENS, CLASSES, RATE = 20, 10, 16, 128, 77, 0.01
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WORKLOADS: dict[str, dict[str, Any]] = {
    "BERT base, LoRA rank 8": {
        "config": {"model_type": "bert", "vocab_size": 30522, **NO_DROPOUT},
        "train": "lora",
        "rank": 8,
    },
    "encoder, 4 layers of 256": {
        "config": {
            **{"model_type": "bert", "vocab_size": 8000, "hidden_size": 256, "num_hidden_layers": 4},
            **{"num_attention_heads": 4, "intermediate_size": 1024, **NO_DROPOUT},
        },
        "train": "all",
    },
}


def federation(vocabulary: int, rows: int) -> cs.Federation:
    """Random token numbers: what they are does not change the time."""
    draw = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(CLIENTS):
        x = torch.randint(5, vocabulary, (rows, TOKENS), generator=draw)
        mask = torch.ones(rows, TOKENS, dtype=torch.int64)
        mask[::2, TOKENS * 3 // 4 :] = 0  # half of the texts are shorter
        y = torch.randint(0, CLASSES, (rows,), generator=draw)
        clients.append(({"input_ids": x, "attention_mask": mask}, y))
    return cs.Federation.from_clients(clients, classes=CLASSES)


def by_hand(model: torch.nn.Module, data: cs.Federation, device: str, bf16: bool) -> Callable[[], None]:
    """One round: every client trains from the global values, which are then averaged."""
    here = copy.deepcopy(model).to(device).train()
    train = data.train.to(device)
    names = [name for name, p in here.named_parameters() if p.requires_grad]

    def a_round() -> None:
        values = dict(here.named_parameters())
        start = {name: values[name].detach().clone() for name in names}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for client in range(CLIENTS):
            with torch.no_grad():
                for name in names:
                    values[name].copy_(start[name])
            solver = torch.optim.SGD([values[name] for name in names], lr=RATE)
            x, y = train.of(client)
            for step in range(STEPS):
                part = slice(step * ROWS, (step + 1) * ROWS)
                with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=bf16):
                    output = here({key: value[part] for key, value in x.items()})
                    loss = torch.nn.functional.cross_entropy(output.float(), y[part])
                solver.zero_grad(set_to_none=True)
                loss.backward()
                solver.step()
            with torch.no_grad():
                for name in names:
                    total[name] += values[name] / CLIENTS
        with torch.no_grad():
            for name in names:
                values[name].copy_(total[name])

    return a_round


def ours(model: torch.nn.Module, data: cs.Federation, device: str, bf16: bool, compile: bool) -> Callable[[], None]:
    """One round of the same work by the engine, all clients at once."""
    precision: Any = "bf16" if bf16 else "full"
    engine = cs.Vectorised(
        cs.Task(model),
        data,
        device=device,
        precision=precision,
        lane="batched",
        clients_at_once=CLIENTS,
        compile=compile,
    )
    rounds = run(cs.fedavg(lr=RATE, epochs=1, batch_size=ROWS), engine, rounds=10**6, seed=0)
    return lambda: next(rounds) and None  # type: ignore[func-returns-value]


def measured(a_round: Callable[[], None], device: str, warm: int, times: int) -> tuple[float, float]:
    """(rows a second, peak GiB from the first round on), after some rounds to warm up."""
    cuda = device.startswith("cuda")
    for _ in range(warm):
        a_round()
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        a_round()
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / times
    peak = torch.cuda.max_memory_reserved() / 2**30 if cuda else float("nan")
    return CLIENTS * STEPS * ROWS / seconds, peak


def main() -> None:
    """Measure and print."""
    global CLIENTS, STEPS, ROWS, TOKENS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precisions", default="bf16,fp32")
    parser.add_argument("--compiled", default="bf16", help="in which precisions to measure compiled steps as well")
    parser.add_argument("--workloads", default="", help="a part of their names")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows of the table")
    given = parser.parse_args()
    if given.small:
        CLIENTS, STEPS, ROWS, TOKENS = 2, 2, 2, 16
    rows = []
    for name, options in WORKLOADS.items():
        if given.workloads not in name:
            continue
        options = {**options, "config": dict(options["config"])}
        if given.small:
            options["config"].update(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        shape = {"input_ids": (TOKENS,), "attention_mask": (TOKENS,)}
        model = cs.build_model("hugging_face", shape, CLASSES, seed=0, length=TOKENS, **options)
        data = federation(options["config"]["vocab_size"], STEPS * ROWS)
        for precision in given.precisions.split(","):
            bf16 = precision == "bf16"
            ways: dict[str, Callable[[], Callable[[], None]]] = {
                "by hand": functools.partial(by_hand, model, data, given.device, bf16),
                "consilience": functools.partial(ours, model, data, given.device, bf16, False),
            }
            if precision in given.compiled.split(",") and given.device.startswith("cuda"):
                ways["consilience, compiled"] = functools.partial(ours, model, data, given.device, bf16, True)
            for label, make in ways.items():
                gc.collect()
                if given.device.startswith("cuda"):
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                speed, peak = measured(make(), given.device, warm=1 if label == "by hand" else 2, times=2)
                rows.append({"workload": name, "precision": precision, "how": label, "rows_per_s": speed, "gib": peak})
                print(json.dumps(rows[-1]), flush=True)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n| Workload | Precision | How | Rows/s | Peak GiB |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['workload']} | {row['precision']} | {row['how']} | {row['rows_per_s']:,.0f} | {row['gib']:.1f} |"
        )


if __name__ == "__main__":
    main()
