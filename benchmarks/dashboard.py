"""How fast the dashboard answers: a folder of many runs, and one long run, both written here.

    python benchmarks/dashboard.py [--runs 1000] [--rounds 10000] [--clients 1000]

Prints milliseconds of the first and of later answers (median of five), and how much a full read of the same records by
the report's reader takes, in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from consilience.dashboard.api import Api, encoded
from consilience.dashboard.watch import BYTES_A_REQUEST, Watch
from consilience.reporting.runs import read
from consilience.runs.folder import RunFolder

CONFIG = 'seed = {seed}\nrounds = {rounds}\n\n[data]\nname = "digits"\n\n[algorithm]\nname = "fedavg"\nlr = {lr}\n'


def many(root: Path, runs: int, rounds: int = 50) -> None:
    """Runs of ordinary length, ten clients a round."""
    for k in range(runs):
        text = CONFIG.format(seed=k % 10, rounds=rounds, lr=0.01 * (1 + k // 10))
        folder = RunFolder.create(root, f"run-{k:04}", text, {"status": "finished", "clients": 100})
        for number in range(1, rounds + 1):
            folder.metrics.append(row(number, np.arange(10)), sync=False)
            folder.timing.append({"round": number, "seconds": 0.1, "evaluation_seconds": 0.01}, sync=False)


def long(root: Path, rounds: int, clients: int) -> None:
    """One run in which every client takes part in every round."""
    text = CONFIG.format(seed=0, rounds=rounds, lr=0.1)
    folder = RunFolder.create(root, "long", text, {"status": "finished", "clients": clients})
    everyone = np.arange(clients)
    rng = np.random.default_rng(0)
    with folder.metrics.path.open("wb") as metrics, folder.clients.path.open("wb") as own:
        for number in range(1, rounds + 1):
            metrics.write(json.dumps(row(number, everyone), separators=(",", ":")).encode() + b"\n")
            scores = np.round(rng.random(clients), 4).tolist()
            own.write(json.dumps({"round": number, "accuracy": scores}, separators=(",", ":")).encode() + b"\n")


def row(number: int, cohort: np.ndarray) -> dict[str, Any]:
    """A row as runs write it."""
    weights = (np.ones(len(cohort)) / len(cohort) + 1e-9 * cohort).tolist()
    value = 1 - 1 / (1 + number)
    return {"round": number, "accuracy": value, "loss": 1 / number, "cohort": cohort.tolist(), "weights": weights}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(milliseconds, what it gave)."""
    began = time.perf_counter()
    found = work()
    return 1000 * (time.perf_counter() - began), found


def asked(api: Api, what: str, **query: str) -> tuple[float, int, bool]:
    """(milliseconds, bytes of the answer, whether there is more to read); looking again is not throttled here."""
    api.watch.looked_at()
    spent, (_, content) = timed(lambda: api.answer(what, lambda name: [query[name]] if name in query else []))
    return spent, len(encoded(content)[0]), bool(content.get("reading"))


def until_read(api: Api, what: str, **query: str) -> tuple[list[float], int]:
    """Milliseconds of every request until all is read, and the size of the last answer."""
    spent = []
    for _ in range(10_000):
        took, size, more = asked(api, what, **query)
        spent.append(took)
        if not more:
            return spent, size
    raise RuntimeError("it never ends")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("runs", 1000), ("rounds", 10_000), ("clients", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        lines = [*folder_of_runs(Path(place) / "many", wanted.runs)]
        lines += long_run(Path(place) / "one", wanted.rounds, wanted.clients)
    print(f"{'what':58} {'requests':>8} {'first ms':>9} {'worst ms':>9} {'later ms':>9} {'kB':>8}")
    for line in lines:
        print(line)


def folder_of_runs(root: Path, runs: int) -> list[str]:
    many(root, runs)
    api = Api(Watch(root))
    spent, size = until_read(api, "runs", since="0")
    again = statistics.median(asked(api, "runs", since="99999")[0] for _ in range(5))
    full, _ = timed(lambda: [read(path) for path in api.watch.known().values()])
    return [
        told(f"overview of {runs} runs", spent, again, size),
        f"{'   the same runs read whole, as the report does':58} {1:8} {full:9.0f}",
    ]


def long_run(root: Path, rounds: int, clients: int) -> list[str]:
    long(root, rounds, clients)
    api = Api(Watch(root))
    size = (root / "long" / "metrics.jsonl").stat().st_size + (root / "long" / "clients.jsonl").stat().st_size
    found = [
        f"one run, {rounds} rounds x {clients} clients: {size / 1e6:.0f} MB; a request reads {BYTES_A_REQUEST >> 20} MB"
    ]
    for what, query in (
        ("runs", {"since": "0"}),
        ("curves", {"run": "long"}),
        ("clients", {"run": "long"}),
        ("client", {"run": "long", "client": "7"}),
    ):
        spent, bytes_sent = until_read(api, what, **query)
        later = statistics.median(
            asked(api, what, **(query | ({"since": "99999"} if what == "runs" else {})))[0] for _ in range(5)
        )
        found.append(told(f"   {what}", spent, later, bytes_sent))
    return found


def told(name: str, spent: list[float], later: float, size: int) -> str:
    return f"{name:58} {len(spent):8} {spent[0]:9.0f} {max(spent):9.0f} {later:9.1f} {size / 1e3:8.1f}"


if __name__ == "__main__":
    main()
