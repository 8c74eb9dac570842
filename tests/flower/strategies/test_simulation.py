"""Real Flower simulations: the example with one import changed, and a ready ClientApp beside the vectorised engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.engines.vectorised.engine import Vectorised
from consilience.task.task import Task
from consilience.wire import arrays

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'consilience[flower]'")
pytest.importorskip("ray", reason="Flower's simulation needs Ray: pip install 'flwr[simulation]'")

ROOT = Path(__file__).parents[3]
LIMIT = 280  # seconds for one simulation
pytestmark = pytest.mark.slow


def simulate(app: Path, home: Path, *, nodes: int, config: str = "") -> str:
    """What `flwr run` prints; everything that it leaves running is stopped."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    }
    resources = f"num-supernodes={nodes} client-resources-num-cpus=1"
    command = ["flwr", "run", ".", "--stream", "--federation-config", resources]
    command += ["--run-config", config] if config else []
    log = home.with_suffix(".log")
    try:
        with log.open("w") as out:
            done = subprocess.run(command, cwd=app, env=environment, stdout=out, stderr=out, timeout=LIMIT)
    finally:
        stop(home)
    printed = log.read_text()
    assert done.returncode == 0, printed[-4000:]
    return printed


def stop(home: Path) -> None:
    """End, by their ids, the processes that carry our private FLWR_HOME."""
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


def test_an_ordinary_app_with_one_import_changed(tmp_path: Path) -> None:
    app = shutil.copytree(ROOT / "examples" / "flower_one_import", tmp_path / "app")
    server = (app / "one_import" / "server_app.py").read_text()
    assert server.count("consilience") == 1  # the import, and nothing else
    assert "consilience" not in (app / "one_import" / "client_app.py").read_text().split('"""', 2)[2]
    printed = simulate(app, tmp_path / "flwr", nodes=4, config="num-server-rounds=3")
    assert "Starting SimProx strategy" in printed
    assert printed.count("aggregate_train: Received 4 results and 0 failures") == 3
    accuracies = [float(text) for text in re.findall(r"'accuracy': (0\.\d+)}", printed)]
    assert len(accuracies) == 3 and accuracies[-1] > accuracies[0] and accuracies[-1] > 0.5


PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "scaffold-app"
version = "1.0.0"
description = "a test"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "consilience"
[tool.flwr.app.components]
serverapp = "scaffold_app.sides:server"
clientapp = "scaffold_app.sides:client"
[tool.flwr.app.config]
result = ""
"""

SIDES = """
import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from torch import nn

from consilience.wire import arrays
from consilience.flower import Scaffold, client_app
from consilience.flower.strategies.records import to_tensors


def model():
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


def rows(context):
    k = int(context.node_config["partition-id"])
    draw = torch.Generator().manual_seed(k)
    x = torch.randn(8 + 3 * k, 5, generator=draw, dtype=torch.float64)
    return (x, torch.randint(0, 3, (len(x),), generator=draw)), None


client = client_app(model, rows, "scaffold", lr=0.1, batch_size=4)
server = ServerApp()


@server.main()
def main(grid, context):
    strategy = Scaffold(fraction_evaluate=0.0, min_available_nodes=4, seed=3)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model().state_dict()), num_rounds=3)
    found = {"digest": arrays.digest(to_tensors(result.arrays)), "refusals": [str(r) for _, r in strategy.refusals]}
    Path(context.run_config["result"]).write_text(json.dumps(found))
"""


def test_a_ready_client_app_gives_the_vectorised_engines_model(tmp_path: Path) -> None:
    """Memory in Context.state, control variates in records of their own, four processes' replies in any order."""
    from consilience.algorithms.scaffold import scaffold

    app = tmp_path / "app"
    (app / "scaffold_app").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    (app / "scaffold_app" / "__init__.py").write_text("")
    (app / "scaffold_app" / "sides.py").write_text(SIDES)
    result = tmp_path / "result.json"
    simulate(app, tmp_path / "flwr", nodes=4, config=f"result={json.dumps(str(result))}")
    found = json.loads(result.read_text())

    def rows(k: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(k)
        x = torch.randn(8 + 3 * k, 5, generator=draw, dtype=torch.float64)
        return x, torch.randint(0, 3, (len(x),), generator=draw)

    torch.manual_seed(0)
    task = Task(nn.Linear(5, 3).double())
    federation = Federation.from_clients([rows(k) for k in range(4)], classes=3)
    engine = Vectorised(task, federation, device="cpu", dtype="float64", lane="serial")
    *_, last = run(scaffold(lr=0.1, batch_size=4), engine, rounds=3, seed=3)
    assert found["refusals"] == []
    assert found["digest"] == arrays.digest(last.model["params"])  # to the last bit
