"""What a round and a checkpoint cost as the population grows: 10^2 to 10^6 clients, 50 of them in every round.

    python benchmarks/population.py                                  # this machine's GPU, or its processor
    python benchmarks/population.py --device cpu --rounds 12 --plot population.png
    python benchmarks/population.py --only fedavg --populations 1000000 --limit-gb 4     # under a memory limit
    python benchmarks/population.py --peer pfl    (or flower)        # FedAvg in another library, as far as it goes

A client has 20 rows, batches of 10 and 2 epochs, of an MLP with 118,282 parameters. Clients' rows overlap in one set of
20,000, so that the data do not grow with the population. Each line: the median round, the peak of GPU memory and of the
process's memory, the median time and the bytes of a checkpoint (one after every round), what clients' memories take,
and whether a run that is resumed from a checkpoint on disk ends in the same bits. Every algorithm is a process.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

COHORT, ROWS, BATCH, EPOCHS, STORED = 50, 20, 10, 2, 20_000
POPULATIONS = (100, 1_000, 10_000, 100_000, 1_000_000)
ALGORITHMS = ("fedavg", "scaffold", "feddyn", "ditto", "simfedswap", "fedper")


def main() -> None:
    """Measure all cases and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--rounds", type=int, default=24)
    options.add_argument("--only", default=",".join(ALGORITHMS))
    options.add_argument("--populations", default=",".join(map(str, POPULATIONS)))
    options.add_argument("--memory", default="auto", choices=("auto", "device", "host", "file"))
    options.add_argument("--limit-gb", type=float, help="limit of the address space of each process")
    options.add_argument("--seconds", type=float, default=100, help="for each algorithm")
    options.add_argument("--peer", choices=("pfl", "flower"))
    options.add_argument("--peer-python", default=sys.executable, help="the interpreter that has the peer")
    options.add_argument("--json", type=Path)
    options.add_argument("--plot", type=Path)
    options.add_argument("--case", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.case:
        for found in measured(given):
            print(json.dumps(found), flush=True)
        return
    rows = []
    names = [given.peer] if given.peer else given.only.split(",")
    for name in names:
        rows += in_process(name, given)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if given.plot:
        plot(rows, given.plot)
    table(rows)


def in_process(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases of one algorithm, in a process of its own; what it found before it ended counts."""
    command = [given.peer_python if given.peer else sys.executable, __file__, "--case", name]
    for key in ("device", "rounds", "populations", "memory", "seconds"):
        command += [f"--{key}", str(getattr(given, key))]
    if given.peer:
        command += ["--peer", given.peer]
    limit = given.limit_gb

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (int(limit * 2**30),) * 2)

    done = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=limited if limit else None)
    assert done.stdout is not None
    rows = []
    for line in done.stdout:
        if line.startswith("{"):
            rows.append(json.loads(line))
            print(f"  {rows[-1]}", flush=True)
    if done.wait():
        print(f"  {name} ended with code {done.returncode}", flush=True)
    return rows


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each population, as many as there is time for."""
    began = time.perf_counter()
    took = 0.0
    for clients in map(int, given.populations.split(",")):
        if time.perf_counter() - began + took > given.seconds:
            yield {"name": given.case, "clients": clients, "left_out": "no time"}
            continue
        before = time.perf_counter()
        case = {"pfl": of_pfl, "flower": of_flower}.get(given.peer, ours)
        yield case(given.case, clients, given)
        took = 2 * (time.perf_counter() - before)


def network() -> nn.Module:
    """An MLP with 118,282 parameters."""
    torch.manual_seed(0)
    parts = (nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(*parts)


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

    began = time.perf_counter()
    x, y = rows_and_labels()
    sizes = torch.full((clients,), ROWS)
    federation = cs.Federation(train=Rows(x=x, y=y, starts=starts_of(clients), sizes=sizes), classes=10)
    made = time.perf_counter() - began
    settings = {"device": given.device, "lane": "batched", "compile": False, "memory": given.memory}
    selection = cs.Uniform(count=min(COHORT, clients))
    algorithm = getattr(cs, name)(lr=0.05, epochs=EPOCHS, batch_size=BATCH, selection=selection)

    def engine() -> Any:
        return cs.Vectorised(cs.Task(network()), federation, **settings)

    reset_peaks(given.device)
    seconds, saving, written, middle, last = [], [], [], max(1, given.rounds // 2), None
    with tempfile.TemporaryDirectory() as folder:
        root, log, half = Path(folder) / "a", ClientLog(), Path(folder) / "b"
        running = engine()
        rounds = cs.run(algorithm, running, rounds=given.rounds, seed=3)
        for number in range(1, given.rounds + 1):
            synchronise(given.device)
            began = time.perf_counter()
            last = next(rounds)
            synchronise(given.device)
            seconds.append(time.perf_counter() - began)
            before = bytes_in(root)
            began = time.perf_counter()
            path = checkpoint.save(root, number, saved(last.snapshot), {}, keep=1, clients=log)
            saving.append(time.perf_counter() - began)
            grown = bytes_in(root) - before
            written.append(max(0, grown) + sum(file.stat().st_size for file in path.iterdir()))
            if number == middle:
                checkpoint.save(half, number, saved(last.snapshot), {}, keep=1)
        peaks = peaks_of(given.device)
        kept = dict(running.memory_bytes)
        ended = digest(last.snapshot)
        del rounds, last, running
        resumed = resume(algorithm, engine(), checkpoint.load_latest(half), given.rounds)
    return {
        "name": name,
        "clients": clients,
        "made": made,
        "round": statistics.median(seconds[len(seconds) // 3 :]),
        "first": seconds[0],
        "save": statistics.median(saving[len(saving) // 3 :]),
        "save_bytes": statistics.median(written[len(written) // 3 :]),
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


def of_pfl(name: str, clients: int, given: argparse.Namespace) -> dict[str, Any]:
    """FedAvg in pfl-research."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def loss(self, x: Any, y: Any) -> Any:
            return nn.functional.cross_entropy(self.body(x), y)

        def metrics(self, x: Any, y: Any) -> dict[str, Any]:
            return {}

    class Stamps(TrainingProcessCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            self.seconds.append(time.perf_counter())
            return False, Metrics()

    x, y = rows_and_labels()
    starts = starts_of(clients).tolist()
    reset_peaks("cpu")
    began = time.perf_counter()
    sampler = get_user_sampler("random", list(range(clients)))
    data = FederatedDataset(
        lambda user: PyTorchTensorDataset(
            [part[starts[user] : starts[user] + ROWS] for part in (x, y)], user_id=str(user)
        ),
        sampler,
    )
    made = time.perf_counter() - began
    net = Net()
    model = PyTorchModel(net, lambda p, lr: torch.optim.SGD(p, lr), torch.optim.SGD(net.parameters(), 1.0))
    stamps = Stamps()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=given.rounds, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=0.05, local_num_epochs=EPOCHS, local_batch_size=BATCH
        ),
        model_eval_params=None,
        callbacks=[stamps],
    )
    rounds = np.diff(stamps.seconds)
    return {"name": name, "clients": clients, "made": made, "round": float(np.median(rounds)), **peaks_of("cpu")}


def of_flower(name: str, clients: int, given: argparse.Namespace) -> dict[str, Any]:
    """FedAvg in Flower's simulation, on two Ray actors; the memory is that of the process that has the server."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    stamps: list[float] = []
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        net = network()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = rows_and_labels()
        begin = int(starts_of(clients)[int(context.node_config["partition-id"])])
        solver = torch.optim.SGD(net.parameters(), 0.05)
        for _ in range(EPOCHS):
            for step in range(begin, begin + ROWS, BATCH):
                solver.zero_grad()
                nn.functional.cross_entropy(net(x[step : step + BATCH]), y[step : step + BATCH]).backward()
                solver.step()
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": ROWS})}
        return Message(content=RecordDict(content), reply_to=message)

    class Stamped(FedAvg):
        def configure_train(self, server_round: int, *rest: Any) -> Any:
            stamps.append(time.perf_counter())
            return super().configure_train(server_round, *rest)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Stamped(
            fraction_train=min(1.0, COHORT / clients), fraction_evaluate=0.0, min_available_nodes=clients
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(network().state_dict()),
            train_config=ConfigRecord(),
            num_rounds=given.rounds,
        )

    reset_peaks("cpu")
    began = time.perf_counter()
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=resources)
    first = stamps[0] - began
    return {
        "name": name,
        "clients": clients,
        "made": first,
        "round": float(np.median(np.diff(stamps))),
        **peaks_of("cpu"),
    }


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


def table(rows: list[dict[str, Any]]) -> None:
    """Print one line per case, and how the largest population compares with 1,000 clients."""
    print(
        f"\n{'':10}{'clients':>10}{'make s':>9}{'round ms':>10}{'GPU GiB':>9}{'host GiB':>10}"
        f"{'save ms':>9}{'save MB':>9}{'memories GiB':>14}  where, resume"
    )
    for row in rows:
        if "left_out" in row:
            print(f"{row['name']:10}{row['clients']:>10,}  left out: {row['left_out']}")
            continue
        saving = f"{1e3 * row['save']:9.1f}{row['save_bytes'] / 1e6:9.1f}" if "save" in row else " " * 18
        kept = f"{row['memories'] / 2**30:14.2f}  {row['where']}" if "memories" in row else ""
        exact = {True: ", exact", False: ", NOT EXACT"}.get(row.get("exact"), "")  # type: ignore[arg-type]
        print(
            f"{row['name']:10}{row['clients']:>10,}{row['made']:9.2f}{1e3 * row['round']:10.1f}{row['gpu_gib']:9.2f}"
            f"{row['host_gib']:10.2f}{saving}{kept}{exact}"
        )
    print("\nlargest population against 1,000 clients: round, GPU memory, checkpoint time")
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = {row["clients"]: row for row in rows if row["name"] == name and "round" in row}
        if 1_000 in mine and max(mine) > 1_000:
            few, many = mine[1_000], mine[max(mine)]
            ratios = [many[key] / few[key] if few.get(key) else float("nan") for key in ("round", "gpu_gib", "save")]
            print(f"{name:10}{max(mine):>10,}" + "".join(f"{ratio:8.2f}" for ratio in ratios))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Round time, memory and checkpoint time against the population."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    panels = (
        ("round", 1e3, "round [ms]"),
        ("host_gib", 1, "peak memory of the process [GiB]"),
        ("save", 1e3, "checkpoint [ms]"),
    )
    for axis, (key, scale, title) in zip(axes, panels):
        for name in dict.fromkeys(row["name"] for row in rows):
            points = [(row["clients"], scale * row[key]) for row in rows if row["name"] == name and key in row]
            if points:
                axis.plot(*zip(*points), marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel="clients in the federation, 50 a round", ylabel=title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
