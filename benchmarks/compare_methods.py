"""All methods on the same federation with the same local work: mean and spread over seeds.

    python benchmarks/compare_methods.py --data-dir data --out compare      # MNIST, Dirichlet 0.1, 20 clients, 3 seeds
    python benchmarks/compare_methods.py --data digits --rounds 2 --methods fedavg,fedbuff --out /tmp/compare

Every finished run is a line in OUT/runs.jsonl; started again, the script goes on with what is missing. OUT/table.md is
written at the end of each run. Everybody takes part in every round; a round is one local epoch of every client, and
asynchronous methods get the same number of replies. Settings of single methods are in OWN, all others in COMMON.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import consilience as cs
from consilience import algorithms
from consilience.core.checks import options_of
from consilience.models.siamese import siamese_heads

COMMON: dict[str, Any] = {"lr": 0.05, "epochs": 1, "batch_size": 64, "selection": cs.Everyone()}
OWN: dict[str, dict[str, Any]] = {
    "afl": {"lambda_lr": 0.1},
    "clustered_fl": {"warm_up": 5, "eps_1": 0.8, "eps_2": 1.0, "most": 4},
    "ditto": {"lam": 0.1},
    "fedadagrad": {"server_lr": 0.03},
    "fedadam": {"server_lr": 0.01},
    "fedasync": {"alpha": 0.6, "mu": 0.005},
    "fedavgm": {"server_lr": 1.0, "beta": 0.7},
    "fedbuff": {"buffer": 10},
    "feddc": {"alpha": 0.05},
    "feddyn": {"alpha": 0.05},
    "fedprox": {"mu": 0.01},
    "fedprox_fedsplit": {"step": 1.0, "relaxation": 0.5},
    "fedsplit": {"step": 1.0, "relaxation": 0.5},
    "fedyogi": {"server_lr": 0.01},
    "hierarchical": {"edges": 4, "cloud_every": 2},
    "ifca": {"clusters": 2},
    "moon": {"mu": 1.0, "temperature": 0.5},
    "simprox_buffered": {"buffer": 10},
}
LEFT_OUT = {
    "duw_fedavg": "its schedule must be learned first (docs/methods)",
    "duw_fednova": "its schedule must be learned first (docs/methods)",
}
HEADS = ("moon", "fedsiam_da")  # methods that compare representations: the same network with a projection head
REPLIES = {"fedasync": 1, "fedbuff": 10, "simprox_buffered": 10}  # to a round; the others: all clients
CLOCK = cs.Environment(rows_per_second=1000.0, speed_spread=0.7, latency=0.05, download=2e6, upload=1e6)
COLUMNS = {
    "accuracy": "accuracy",
    "best_accuracy": "best accuracy",
    "client_accuracy_worst_tenth": "worst tenth of clients",
    "personal_accuracy_mean": "own models",
    "simulated_seconds": "simulated seconds",
    "megabytes_up": "MB up",
}
SHARES = ("accuracy", "best_accuracy", "client_accuracy_worst_tenth", "personal_accuracy_mean")


def build(name: str, shape: tuple[int, ...]) -> cs.Algorithm:
    """The recipe with the common settings it has, and its own."""
    recipe, given = algorithms.recipe(name), {**COMMON, **OWN.get(name, {})}
    if name == "centralised":
        del given["selection"]
    if name == "feddm":
        given["shape"] = shape
    return recipe(**{key: value for key, value in given.items() if key in options_of(recipe)})


def one_run(name: str, seed: int, data: cs.Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """Train once, and sum it up."""
    federation, _ = cs.federate(
        data, cs.partition("dirichlet", clients=options.clients, alpha=options.alpha, min_size=2), seed=seed
    )
    shape = tuple(data.x.shape[1:])
    model = cs.build_model(options.model, shape, data.classes, seed=seed)
    if name in HEADS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = siamese_heads(model, projection=64)
    rounds = options.rounds * options.clients // REPLIES.get(name, options.clients)
    began = time.perf_counter()
    found = cs.train(
        model,
        federation,
        build(name, shape),
        rounds=rounds,
        seed=seed,
        environment=None if name == "centralised" else CLOCK,
        evaluate_every=max(1, rounds // options.rounds),
        progress=False,
        device=options.device,
        lane=options.lane,
    )
    tested = [row for row in found.history if row["accuracy"] is not None]
    last = tested[-1]
    return {
        **{key: last.get(key) for key in COLUMNS},
        "best_accuracy": max(row["accuracy"] for row in tested),
        "megabytes_up": last["bytes_up_total"] / 1e6,
        "curve": [round(row["accuracy"], 4) for row in tested],
        "personal_curve": [row.get("personal_accuracy_mean") for row in tested],
        "seconds": time.perf_counter() - began,
    }


def read(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs that are there, by method and seed; a line that a crash cut short is left out."""
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            run = json.loads(line)
        except json.JSONDecodeError:
            continue
        runs[run["method"], run["seed"]] = run
    return runs


def table(runs: Iterable[dict[str, Any]], settings: str) -> str:
    """Mean and spread (standard deviation over seeds) of every method, best accuracy first."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_method.setdefault(run["method"], []).append(run)
    lines = []
    for name, found in by_method.items():
        good = [run for run in found if "failed" not in run]
        cells = [_cell(key, [run[key] for run in good if run.get(key) is not None]) for key in COLUMNS]
        why = f" ({found[0]['failed']})" if not good else ""
        order = np.mean([run["accuracy"] for run in good]) if good else -1.0
        lines.append((-order, f"| `{name}`{why} | {len(good)} | {' | '.join(cells)} |"))
    head = f"| method | seeds | {' | '.join(COLUMNS.values())} |\n|{'---|' * (len(COLUMNS) + 2)}"
    left_out = "".join(f"\n- `{name}` is left out: {why}." for name, why in LEFT_OUT.items())
    return f"{settings}\n\n{head}\n" + "\n".join(line for _, line in sorted(lines)) + f"\n{left_out}\n"


def _cell(key: str, values: list[float]) -> str:
    if not values:
        return "—"
    scale, digits = (100, 1) if key in SHARES else (1, 0)
    numbers = scale * np.array(values)
    return f"{numbers.mean():.{digits}f} ± {numbers.std(ddof=1) if len(numbers) > 1 else 0:.{digits}f}"


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-dir")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--methods", default="", help="names with commas between; all if left out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many minutes")
    parser.add_argument("--retry", action="store_true", help="run those that failed once more")
    parser.add_argument("--out", type=Path, default=Path("compare"))
    options = parser.parse_args()
    names = [name for name in options.methods.split(",") if name] or [
        n for n in algorithms.names() if n not in LEFT_OUT
    ]
    settings = (
        f"{options.data}, {options.clients} clients, Dirichlet {options.alpha:g}, {options.rounds} rounds of an epoch, "
        f"batches of {COMMON['batch_size']}, lr {COMMON['lr']:g}, {options.model}; mean ± deviation over the seeds."
    )
    options.out.mkdir(parents=True, exist_ok=True)
    file, began = options.out / "runs.jsonl", time.monotonic()
    where = {} if options.data_dir is None else {"data_dir": options.data_dir}
    data = cs.load_data(options.data, **where)
    for seed in range(options.seeds):
        for name in names:
            known = read(file).get((name, seed))
            if (known and not (options.retry and "failed" in known)) or time.monotonic() - began > 60 * options.minutes:
                continue
            try:
                run = one_run(name, seed, data, options)
            except Exception as problem:  # the others are still worth having
                traceback.print_exc()
                run = {"failed": f"{type(problem).__name__}: {problem}"[:200].replace("\n", " ")}
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"method": name, "seed": seed, **run}) + "\n")
            (options.out / "table.md").write_text(table(read(file).values(), settings), encoding="utf-8")
            said = run.get("failed") or f"{run['accuracy']:.4f} in {run['seconds']:.1f} s"
            print(f"{name}, seed {seed}: {said}", flush=True)
    print(table(read(file).values(), settings))


if __name__ == "__main__":
    main()
