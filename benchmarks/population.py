"""Cost of a round and a checkpoint as the population grows: 10^2 to 10^6 clients, 50 of them in every round.

    python benchmarks/population.py                                  # this machine's GPU, or its processor
    python benchmarks/population.py --memory host --populations 1000,1000000       # memories in host memory
    python benchmarks/population.py --only fedavg --populations 1000000 --limit-gb 4     # under a memory limit
    python benchmarks/population.py --peer pfl --peer-python .venv-pfl/bin/python  # FedAvg elsewhere (or flower)
    python benchmarks/population.py --device cpu --json docs/results/population.json   # then docs/make_population.py

A client has 20 rows, batches of 10 and 2 epochs, of an MLP with 118,282 parameters. Clients' rows overlap in one set of
20,000, so that the data do not grow with the population. Each line: the median round, the peak of GPU memory and of the
process's memory, the median time and the bytes of a checkpoint after a round, what clients' memories take, and whether
a run that is resumed from a checkpoint on disk ends in the same bits. Every case is a process of its own, forked from
one that has imported everything: nothing is left over from the case before, and nothing is imported twice.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

COHORT, ROWS, BATCH, EPOCHS, STORED = 50, 20, 10, 2, 20_000
SAVES = 8  # of the last rounds
POPULATIONS = (100, 1_000, 10_000, 100_000, 1_000_000)
ALGORITHMS = ("fedavg", "scaffold", "feddyn", "ditto", "simfedswap", "fedper")


def main() -> None:
    """Measure all cases and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="auto")
    options.add_argument("--rounds", type=int, default=24)
    options.add_argument("--only", default=",".join(ALGORITHMS))
    options.add_argument("--populations", default=",".join(map(str, POPULATIONS)))
    options.add_argument("--memory", default="auto", choices=("auto", "device", "host", "file"))
    options.add_argument("--limit-gb", type=float, help="limit of the address space of each process")
    options.add_argument("--seconds", type=float, default=600, help="for all cases: later ones are left out")
    options.add_argument("--peer", choices=("pfl", "flower"))
    options.add_argument("--peer-python", default=sys.executable, help="the interpreter that has the peer")
    options.add_argument("--json", type=Path, help="add the results to those in this file")
    given = options.parse_args()
    began, rows = time.perf_counter(), list[dict[str, Any]]()
    names = [given.peer] if given.peer else given.only.split(",")
    print(HEAD, flush=True)
    for name in names:
        for clients in map(int, given.populations.split(",")):
            left = given.seconds - (time.perf_counter() - began)
            if left <= 0:
                found = {"name": name, "clients": clients, "left_out": "no time"}
            else:
                found = (of_peer if given.peer else forked)(name, clients, given, left)
            rows.append(found)
            print(line(found), flush=True)
            if given.json:
                store(given.json, found)
    ratios(rows)


def forked(name: str, clients: int, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """One case in a process of its own, in which CUDA starts anew."""
    import consilience
    from consilience.runs import checkpoint  # noqa: F401

    for used in ("Federation", "Task", "Uniform", "Vectorised", "run", name):
        getattr(consilience, used)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            if given.limit_gb:
                resource.setrlimit(resource.RLIMIT_AS, (int(given.limit_gb * 2**30),) * 2)
            with os.fdopen(writing, "w") as out:
                out.write(json.dumps(ours(name, clients, given)))
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as found:
        text = found.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"name": name, "clients": clients, "left_out": f"ended with {status}"}


def of_peer(name: str, clients: int, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """One case in another library."""
    script = Path(__file__).with_name("population_peers.py")
    command = [given.peer_python, str(script), name, str(clients), str(given.rounds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"name": name, "clients": clients, "left_out": f"not finished after {seconds:.0f} s"}
    found = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode or not found:
        said = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        return {"name": name, "clients": clients, "left_out": said[:200]}
    return json.loads(found[-1])


def network() -> nn.Module:
    """An MLP with 118,282 parameters."""
    torch.manual_seed(0)
    parts = (nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(*parts)


@functools.cache
def rows_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that all clients share."""
    made = torch.Generator().manual_seed(1)
    return torch.randn(STORED, 784, generator=made), torch.randint(0, 10, (STORED,), generator=made)


def starts_of(clients: int) -> torch.Tensor:
    """Where each client's rows begin."""
    return torch.arange(clients) * ROWS % (STORED - ROWS)


def ours(name: str, clients: int, given: argparse.Namespace) -> dict[str, Any]:
    """One algorithm with so many clients."""
    import consilience as cs
    from consilience.core.federation import Rows
    from consilience.runs import checkpoint
    from consilience.runs.client_log import ClientLog

    device = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    x, y = rows_and_labels()
    sizes = torch.full((clients,), ROWS)
    federation = cs.Federation(train=Rows(x=x, y=y, starts=starts_of(clients), sizes=sizes), classes=10)
    made = time.perf_counter() - began
    settings = {"device": device, "lane": "batched", "compile": False, "memory": given.memory}
    selection = cs.Uniform(count=min(COHORT, clients))
    algorithm = getattr(cs, name)(lr=0.05, epochs=EPOCHS, batch_size=BATCH, selection=selection)

    def engine() -> Any:
        return cs.Vectorised(cs.Task(network()), federation, **settings)

    reset_peaks(device)
    seconds, saving, written = [], [], []
    middle, last = max(1, given.rounds // 2), None
    with tempfile.TemporaryDirectory() as folder:
        root, log, half, half_log = Path(folder) / "a", ClientLog(), Path(folder) / "b", ClientLog()
        running = engine()
        rounds = cs.run(algorithm, running, rounds=given.rounds, seed=3)
        for number in range(1, given.rounds + 1):
            synchronise(device)
            began = time.perf_counter()
            last = next(rounds)
            synchronise(device)
            seconds.append(time.perf_counter() - began)
            if number in (middle - 1, middle):  # the second adds to the first
                checkpoint.save(half, number, saved(last.snapshot), {}, keep=1, clients=half_log)
            if number < given.rounds - SAVES:
                continue
            before = bytes_in(root)
            began = time.perf_counter()
            path = checkpoint.save(root, number, saved(last.snapshot), {}, keep=1, clients=log)
            saving.append(time.perf_counter() - began)
            grown = bytes_in(root) - before
            written.append(max(0, grown) + sum(file.stat().st_size for file in path.iterdir()))
        peaks = peaks_of(device)
        kept = dict(running.memory_bytes)
        ended = digest(last.snapshot)
        del rounds, last, running
        resumed = resume(algorithm, engine(), checkpoint.load_latest(half), given.rounds)
    warm = max(1, min(given.rounds // 3, given.rounds - SAVES))
    return {
        "name": name,
        "clients": clients,
        "device": device,
        "memory": given.memory,
        "made": made,
        "round": statistics.median(seconds[warm:]),
        "first": seconds[0],
        "save": statistics.median(saving[1:] or saving),  # the first begins the log with all that were met
        "save_bytes": statistics.median(written[1:] or written),
        "memories": sum(kept.values()),
        "where": "+".join(kept) or "none",
        "exact": resumed == ended,
        **peaks,
    }


def saved(snapshot: Any) -> dict[str, Any]:
    """What a run's checkpoint holds."""
    losses = {"last": snapshot.losses.leaf()}
    return {"server": snapshot.server, "memory": snapshot.memory, "losses": losses, "pending": snapshot.pending}


def resume(algorithm: Any, engine: Any, found: Any, rounds: int) -> str:
    """The digest of a run that is resumed from a checkpoint."""
    import consilience as cs
    from consilience.core.rounds import Snapshot

    trees = found.trees
    start = Snapshot(
        round=found.round,
        server=engine.place(trees["server"]),
        memory=trees["memory"],
        losses=trees["losses"]["last"],
        pending=engine.place(trees["pending"]),
    )
    *_, last = cs.run(algorithm, engine, rounds=rounds, seed=3, resume=start)
    return digest(last.snapshot)


def digest(snapshot: Any) -> str:
    """Of the server's state, of all losses, and of the memory of every client that has one."""
    from consilience.core import tree
    from consilience.stores.client_rows import ClientRows

    found = hashlib.sha256(snapshot.losses.tobytes())
    for leaf in tree.leaves(snapshot.server):
        found.update(leaf.detach().cpu().contiguous().numpy().tobytes())
    table = ClientRows.of(snapshot.memory)
    for begin in range(0, 0 if table is None else len(table.written()), 50):
        ids = table.written()[begin : begin + 50]
        found.update(ids.tobytes())
        for leaf in tree.leaves(table.read(ids)):
            found.update(leaf.cpu().numpy().tobytes())
    return found.hexdigest()


def synchronise(device: str) -> None:
    """Wait for the GPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def reset_peaks(device: str) -> None:
    """Count peaks from here on."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("peaks of the process's memory are those since it began", file=sys.stderr)


def peaks_of(device: str) -> dict[str, float]:
    """GiB, at most, since the reset."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    high = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
    high = high or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gpu = torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else 0.0
    return {"gpu_gib": gpu, "host_gib": high / 2**30}


def bytes_in(root: Path) -> int:
    """Bytes of the logs of clients' rows in a folder of checkpoints."""
    return sum(file.stat().st_size for file in root.glob("clients-*.log")) if root.exists() else 0


HEAD = (
    f"{'':10}{'clients':>10}{'make s':>9}{'round ms':>10}{'GPU GiB':>9}{'host GiB':>10}"
    f"{'save ms':>9}{'save MB':>9}{'memories GiB':>14}  where, resume"
)


def line(row: dict[str, Any]) -> str:
    """One case."""
    if "left_out" in row:
        return f"{row['name']:10}{row['clients']:>10,}  left out: {row['left_out']}"
    saving = f"{1e3 * row['save']:9.1f}{row['save_bytes'] / 1e6:9.1f}" if "save" in row else " " * 18
    kept = f"{row['memories'] / 2**30:14.2f}  {row['where']}" if "memories" in row else ""
    exact = {True: ", exact", False: ", NOT EXACT"}.get(row.get("exact"), "")  # type: ignore[arg-type]
    together = f"  all processes {row['all_gib']:.2f} GiB" if "all_gib" in row else ""
    return (
        f"{row['name']:10}{row['clients']:>10,}{row['made']:9.2f}{1e3 * row['round']:10.1f}{row['gpu_gib']:9.2f}"
        f"{row['host_gib']:10.2f}{saving}{kept}{exact}{together}"
    )


def ratios(rows: list[dict[str, Any]]) -> None:
    """Print how the largest population compares with 1,000 clients."""
    print("\nlargest population against 1,000 clients: round, GPU memory, host memory, checkpoint time, its bytes")
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = {row["clients"]: row for row in rows if row["name"] == name and "round" in row}
        if 1_000 in mine and max(mine) > 1_000:
            few, many = mine[1_000], mine[max(mine)]
            keys = ("round", "gpu_gib", "host_gib", "save", "save_bytes")
            found = [many[key] / few[key] if few.get(key) else float("nan") for key in keys]
            print(f"{name:10}{max(mine):>10,}" + "".join(f"{ratio:8.2f}" for ratio in found))


def store(path: Path, row: dict[str, Any]) -> None:
    """Put a case into a file, in place of an earlier one of the same case."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def case(one: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(one.get(key) for key in ("name", "clients", "device", "memory"))

    kept = [one for one in known if case(one) != case(row)]
    path.write_text(json.dumps([*kept, row], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
