"""FedAvg with many clients in other libraries, for `benchmarks/population.py`, which starts this in a process.

    python benchmarks/population_peers.py pfl 1000 12        # or flower: clients, rounds

Prints one line of JSON: the median round, the time until the first one, and the peak of this process's memory; of
Flower, also the peak of all of its processes together.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from population import BATCH, COHORT, EPOCHS, ROWS, network, peaks_of, reset_peaks, rows_and_labels, starts_of
from torch import nn


def main(peer: str, clients: int, rounds: int) -> None:
    """Measure one case."""
    torch.set_num_threads(1)
    found = {"pfl": of_pfl, "flower": of_flower}[peer](clients, rounds)
    print(json.dumps({"name": peer, "clients": clients, **found}), flush=True)


def of_pfl(clients: int, rounds: int) -> dict[str, Any]:
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
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=0.05, local_num_epochs=EPOCHS, local_batch_size=BATCH
        ),
        model_eval_params=None,
        callbacks=[stamps],
    )
    return {"made": made, "round": float(np.median(np.diff(stamps.seconds))), **peaks_of("cpu")}


def of_flower(clients: int, rounds: int) -> dict[str, Any]:
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
            num_rounds=rounds,
        )

    reset_peaks("cpu")
    watch = AllProcesses()
    began = time.perf_counter()
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=resources)
    took = {"made": stamps[0] - began, "round": float(np.median(np.diff(stamps)))}
    return {**took, **peaks_of("cpu"), "all_gib": watch.stop()}


class AllProcesses:
    """The largest sum of the memory of this process and all that it started, looked at four times a second."""

    def __init__(self) -> None:
        self._peak, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """GiB."""
        self._ended.set()
        self._thread.join()
        return self._peak / 2**30

    def _watch(self) -> None:
        while not self._ended.wait(0.25):
            self._peak = max(self._peak, sum(proportional(pid) for pid in descendants()))


def descendants() -> list[int]:
    """This process and those that it started, and so on."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, new = [], [os.getpid()]
    while new:
        found += new
        new = [child for pid in new for child in parents.get(pid, [])]
    return found


def proportional(pid: int) -> int:
    """Bytes of a process; what several share counts once."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
