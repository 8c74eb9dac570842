"""Rounds per second of Flower's simulation and of consilience, on one workload, in one run.

100 clients, 10 a round, 600 pictures of 28 x 28 each, one epoch of SGD in batches of 32 on a 784-200-10 MLP; MNIST
with --data, else synthetic data of its shape. Everything starts cold in processes of its own.

    python benchmarks/flower_simulation.py --rounds 10 --data DIRECTORY

"steady" leaves out the first round, in which both warm up; "from cold" is the whole command, imports and all. CPU
seconds are those of all processes of a contestant: beside other work on the same cores they say more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

APP = Path(__file__).resolve().parent / "flower_simulation_app"
ROOT = APP.parent.parent
sys.path.insert(0, str(APP))
LIMIT = 900  # seconds for any contestant


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--data", help="a folder that holds MNIST")
    arguments.add_argument("--only", nargs="*", help="some of the contestants")
    arguments.add_argument("--engine", help=argparse.SUPPRESS)  # a contestant of ours, in its own process
    arguments.add_argument("--folder", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.engine:
        ours(given.engine, given.rounds, Path(given.folder))
        return
    from flower_bench import workload

    names = ["consilience, vectorised"]
    names += ["consilience, ray, 2 workers"] if find_spec("ray") else []
    names += ["Flower, its FedAvg", "Flower, consilience's FedAvg"] if find_spec("flwr") else []
    with tempfile.TemporaryDirectory(prefix="flower-bench-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        kind = workload.write(folder, given.data)
        found = {name: contend(name, given.rounds, folder) for name in given.only or names}
    print(f"\n{given.rounds} rounds on {kind}, {os.cpu_count()} cores\n")
    table(found)


def contend(name: str, rounds: int, folder: Path) -> tuple[list[list[float]], float]:
    """(time and CPU seconds before the first and after every round, seconds of the whole command)."""
    print(f"{name} ...", flush=True)
    (folder / "stamps.jsonl").unlink(missing_ok=True)
    environment = {**os.environ, "FLOWER_BENCH": f"{os.getpid()}-{name}"}
    born = time.time()
    if name.startswith("Flower"):
        strategy = "consilience.flower" if "consilience" in name else "flwr.serverapp.strategy"
        flower(strategy, rounds, folder, environment)
    else:
        engine = "ray" if "ray" in name else "vectorised"
        command = [sys.executable, __file__, "--engine", engine, "--rounds", str(rounds), "--folder", str(folder)]
        subprocess.run(command, check=True, timeout=LIMIT, env={**environment, "PYTHONPATH": str(ROOT)})
    whole = time.time() - born
    return [json.loads(line) for line in (folder / "stamps.jsonl").read_text().splitlines()], whole


def ours(name: str, rounds: int, folder: Path) -> None:
    """The same federation on one of our engines."""
    from flower_bench import workload

    from consilience.algorithms.fedavg import fedavg
    from consilience.core.federation import Federation
    from consilience.core.rounds import run
    from consilience.selection import Uniform
    from consilience.task.task import Task

    federation = Federation.from_clients([workload.rows(folder, k) for k in range(workload.CLIENTS)])
    task = Task(workload.build())
    if name == "ray":
        from consilience.engines.ray.cluster import RayCluster

        engine = RayCluster(task, federation, device="cpu", rounds_ahead=rounds)
    else:
        from consilience.engines.vectorised.engine import Vectorised

        engine = Vectorised(task, federation, device="cpu", rounds_ahead=rounds)  # type: ignore[assignment]
    algorithm = fedavg(
        lr=workload.LR,
        epochs=workload.EPOCHS,
        batch_size=workload.BATCH,
        selection=Uniform(count=workload.COHORT),
    )
    workload.stamp(folder)
    for _ in run(algorithm, engine, rounds=rounds):
        workload.stamp(folder)


def flower(strategy: str, rounds: int, folder: Path, environment: dict[str, str]) -> None:
    """`flwr run` in simulation, one CPU a client; whatever it leaves running is stopped."""
    home = folder / "flwr"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **environment,
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONPATH": os.pathsep.join((str(APP), str(ROOT))),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    }
    config = {"rounds": rounds, "strategy": strategy, "folder": str(folder)}
    resources = "num-supernodes=100 client-resources-num-cpus=1"
    command = ["flwr", "run", str(APP), "--stream", "--federation-config", resources]
    command += ["--run-config", " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())]
    log = folder / "flower.log"
    try:
        with log.open("w") as out:
            subprocess.run(command, env=environment, stdout=out, stderr=out, cwd=APP, timeout=LIMIT, check=True)
    finally:
        stop(home)
    if not (folder / "stamps.jsonl").exists():
        sys.exit(f"flwr run failed:\n{log.read_text()[-4000:]}")


def stop(home: Path) -> None:
    """End the processes that carry our private FLWR_HOME: the SuperLink that `flwr run` starts stays otherwise."""
    marker = f"FLWR_HOME={home}".encode()

    def left() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if marker in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    for how in (signal.SIGTERM, signal.SIGKILL):
        for pid in left():
            try:
                os.kill(pid, how)
            except OSError:
                continue
        for _ in range(20):
            if not left():
                return
            time.sleep(0.25)


def table(found: dict[str, tuple[list[list[float]], float]]) -> None:
    """Rounds per second and CPU seconds per round, and how many times as much as of Flower's own FedAvg."""
    steady = {}
    for name, (stamps, _) in found.items():
        (first, spent), (last, all_spent), rounds = stamps[1], stamps[-1], len(stamps) - 2
        steady[name] = (rounds / (last - first), (all_spent - spent) / rounds)
    usual = steady.get("Flower, its FedAvg")
    print(
        f"{'':30} {'first round':>12} {'rounds/s':>9} {'ratio':>7} {'CPU s/round':>12} {'ratio':>7} {'from cold':>10}"
    )
    for name, (stamps, whole) in found.items():
        rate, cpu = steady[name]
        faster, cheaper = (f"{rate / usual[0]:6.1f}x", f"{usual[1] / cpu:6.1f}x") if usual else ("", "")
        first_round = stamps[1][0] - stamps[0][0]
        row = f"{name:30} {first_round:10.2f} s {rate:9.2f} {faster:>7} {cpu:12.2f} {cheaper:>7} {whole:8.1f} s"
        print(row)


if __name__ == "__main__":
    main()
