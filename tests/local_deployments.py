"""A small Flower app of two clients, and what tests of real processes do with it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from consilience.core.rounds import Round, run
from consilience.engines.vectorised.engine import Vectorised
from consilience.flower.deploy import template
from consilience.flower.deploy.processes import Process
from consilience.flower.deploy.settings import load
from consilience.flower.deploy.sources import source_of
from consilience.wire import arrays

CLIENTS, ROUNDS = 2, 3
CONFIG = f"""
name = "real"
rounds = {ROUNDS}
threads = 1
algorithm = {{ name = "scaffold", lr = 0.1, epochs = 1, batch_size = 8, selection = "everyone" }}
engine = {{ dtype = "float64", device = "cpu", lane = "serial" }}
deploy = {{ clients = {CLIENTS}, classes = 3, deadline = 120, wait = 120, retries = 1 }}
"""
FEDERATION = """
import time
from pathlib import Path

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def data(client, node):
    draw = torch.Generator().manual_seed(client)
    y = torch.randint(0, 3, (40 + 7 * client,), generator=draw)
    x = torch.randn(len(y), 12, generator=draw, dtype=torch.float64) + y[:, None]
    hold = Path(f"{node.get('hold', '/nowhere')}-{client}")
    for _ in range(600 if hold.exists() else 0):  # a test makes this client slow
        hold.with_suffix(".reached").touch()
        time.sleep(0.1)
        if not hold.exists():
            break
    return x[8:], y[8:], x[:8], y[:8]
"""


def write_app(folder: Path) -> Path:
    """A Flower app of two clients in a new folder."""
    template.init(folder, clients=CLIENTS)
    (folder / "config.toml").write_text(CONFIG)
    (folder / "federation.py").write_text(FEDERATION)
    return folder


def until(happened: Callable[[], Any], seconds: float, *, unless: Callable[[], str] = lambda: "") -> Any:
    """What `happened` gives once it gives something; a failure if that takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = happened()
        if found:
            return found
        problem = unless()
        assert not problem, problem
        time.sleep(0.1)
    raise AssertionError(f"nothing happened in {seconds} seconds; {unless()}")


def rows(folder: Path) -> list[dict[str, Any]]:
    """What was written down of each round."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def in_process(app: Path) -> list[Round]:
    """The same run, undisturbed, in this process."""
    config = load(app)
    source = source_of(app, config)
    federation = source.held(np.arange(CLIENTS), {})
    engine = Vectorised(source.task, federation, dtype="float64", lane="serial", device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the config says: the last bits depend on it
    try:
        return list(run(config.build_algorithm(), engine, rounds=ROUNDS, seed=config.seed))
    finally:
        torch.set_num_threads(threads)


def digest_of(folder: Path) -> str:
    """The SHA-256 of a run's final model."""
    return arrays.digest(safetensors.torch.load((folder / "model.safetensors").read_bytes()))


def end(process: subprocess.Popen[str]) -> None:
    """Ask the launcher to stop what it started; make it, if it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def digest_here(app: Path) -> str:
    """The SHA-256 that an undisturbed run's final model has."""
    model = in_process(app)[-1].model
    return arrays.digest({**model["params"], **model["buffers"]})


def ended(process: Process) -> str:
    """The end of a process's log, once it has ended."""
    return "" if process.code is None else process.tail(40)
