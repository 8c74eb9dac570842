"""The ServerApp and ClientApps of a deployed app, in one process: run folder, resume, tests by clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments.evaluation import evaluate
from consilience.flower.deploy import template
from consilience.flower.deploy.settings import load
from consilience.flower.deploy.sources import source_of
from consilience.runs.folder import RunFolder
from consilience.wire import arrays

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower_loopback import Loopback

from consilience.core.rounds import TooFewClients
from consilience.flower import client_app
from consilience.flower.deploy.serving import CONNECTION, serve

CLIENTS = 3
FEDERATION = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def data(client, node):
    draw = torch.Generator().manual_seed(client)
    y = torch.randint(0, 3, (14 + 5 * client,), generator=draw)
    x = torch.randn(len(y), 6, generator=draw, dtype=torch.float64) + y[:, None]
    return x[6:], y[6:], x[:6], y[:6]
"""
TEST_ROWS = """

def test():
    return data(99, {})[:2]
"""


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher says of a deployment that never leaves its machine."""
    monkeypatch.setenv(CONNECTION, "loopback")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return an_app(tmp_path / "app", "scaffold")


def an_app(folder: Path, algorithm: str, more: str = "") -> Path:
    template.init(folder, clients=CLIENTS)
    (folder / "config.toml").write_text(
        f"""
name = "there"
rounds = 3
threads = 1
algorithm = {{ name = "{algorithm}", lr = 0.1, epochs = 1, batch_size = 4, selection = "everyone" }}
engine = {{ dtype = "float64", device = "cpu" }}
deploy = {{ clients = {CLIENTS}, classes = 3, deadline = 5, wait = 0.3, retries = 0, min_available = 1 }}
"""
    )
    (folder / "federation.py").write_text(FEDERATION + more)
    return folder


def grid_for(app: Path, memory: Path | None = None, **run_config: Any) -> Loopback:
    told = [{"clients": str(k), **({"memory": str(memory)} if memory else {})} for k in range(CLIENTS)]
    return Loopback([client_app(app)] * CLIENTS, told, run_config)


def served(app: Path, runs: Path, memory: Path | None = None, **run_config: Any) -> Path:
    given = {"runs": str(runs), **run_config}
    return serve(grid_for(app, memory, **given), app, given)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def in_process(app: Path) -> Any:
    config = load(app)
    source = source_of(app, config)
    engine = Vectorised(source.task, source.held(np.arange(CLIENTS), {}), dtype="float64", lane="serial", device="cpu")
    *_, last = run(config.build_algorithm(), engine, rounds=config.rounds, seed=config.seed)
    return engine, last.model


def digest(folder: Path) -> str:
    return arrays.digest(safetensors.torch.load((folder / "model.safetensors").read_bytes()))


def test_a_deployed_run_is_an_ordinary_run_folder_with_the_same_bits(app: Path, tmp_path: Path) -> None:
    folder = served(app, tmp_path / "runs")
    engine, model = in_process(app)
    assert digest(folder) == arrays.digest({**model["params"], **model["buffers"]})
    facts = RunFolder.open(folder).facts()
    assert (facts["status"], facts["clients"], facts["deployed"]) == ("finished", CLIENTS, True)
    scores = evaluate(engine.task, model, engine.test_rows)
    last = rows(folder)[-1]
    assert last["loss"] == pytest.approx(scores["loss"], rel=1e-12)
    assert last["accuracy"] == pytest.approx(scores["accuracy"], rel=1e-12)
    assert last["client_accuracy_mean"] == pytest.approx(np.nanmean(scores.clients.values), rel=1e-12)
    assert "round 3/3" in (folder / "deploy.log").read_text()
    nodes = json.loads((folder / "nodes.json").read_text())["nodes"]
    assert sorted(client for node in nodes for client in node["clients"]) == list(range(CLIENTS))
    assert all(node["online"] and node["answered"] >= 3 and not node["refused"] for node in nodes)
    held = {client: count for node in nodes for client, count in zip(node["clients"], node["train_rows"], strict=True)}
    assert [held[client] for client in range(CLIENTS)] == engine.sizes.tolist()


def test_more_rounds_and_a_crash_give_the_same_bits(app: Path, tmp_path: Path) -> None:
    runs, memory = tmp_path / "runs", tmp_path / "memory"
    served(app, runs, memory, settings="rounds=1")
    grid = grid_for(app, memory)

    def crash(node: int, reply: Any) -> Any:
        if grid.kinds.count("train") > CLIENTS:  # in the second of the remaining rounds
            raise KeyboardInterrupt
        return reply

    grid.tamper = crash
    with pytest.raises(KeyboardInterrupt):
        serve(grid, app, {"runs": str(runs)})
    folder = served(app, runs, memory)
    assert digest(folder) == digest(served(app, tmp_path / "undisturbed"))
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "undisturbed/there/metrics.jsonl").read_bytes()


def test_without_a_memory_folder_a_resume_begins_memories_anew_and_counts_them(app: Path, tmp_path: Path) -> None:
    served(app, tmp_path / "runs", settings="rounds=2")
    folder = served(app, tmp_path / "runs")
    assert [row["memory_lost"] for row in rows(folder)] == [0, 0, CLIENTS]


def test_a_run_cannot_go_on_as_another_but_patience_may_change(app: Path, tmp_path: Path) -> None:
    served(app, tmp_path / "runs", settings="rounds=1")
    with pytest.raises(Invalid, match=r"algorithm.lr: 0.1 -> 0.2"):
        served(app, tmp_path / "runs", settings="rounds=2 algorithm.lr=0.2")
    served(app, tmp_path / "runs", settings="rounds=2 deploy.deadline=9")


def test_personal_models_are_tested_at_home_even_if_a_client_is_gone(tmp_path: Path) -> None:
    app = an_app(tmp_path / "app", "fedbn")
    given = {"runs": str(tmp_path / "runs"), "settings": "deploy.deadline=0.4"}
    grid = grid_for(app, **given)

    def leave(node: int, reply: Any) -> Any:
        if grid.kinds.count("train") == CLIENTS and "answer" in reply.content:
            grid.deaf = {node}
        return reply

    grid.tamper = leave
    found = rows(serve(grid, app, given))
    assert all(0 <= row["personal_accuracy_mean"] <= 1 for row in found)
    assert found[-1]["silent"] == 1 and len(found[-1]["cohort"]) == CLIENTS - 1


def test_the_server_tests_on_its_own_rows_if_it_has_any(tmp_path: Path) -> None:
    app = an_app(tmp_path / "app", "fedavg", TEST_ROWS)
    grid = grid_for(app)
    folder = serve(grid, app, {"runs": str(tmp_path / "runs")})
    assert grid.kinds.count("evaluate") == 0
    config = load(app)
    source = source_of(app, config)
    test = source.test()
    assert test is not None
    values = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    start = source.task.start()
    model = {kind: {name: values[name] for name in start[kind]} for kind in start}
    task = source.task.to(torch.device("cpu"), torch.float64)
    scores = evaluate(task, model, test.to("cpu", torch.float64))
    assert rows(folder)[-1]["f1"] == scores["f1"]


def test_too_few_clients_are_written_down(app: Path, tmp_path: Path) -> None:
    given = {"runs": str(tmp_path / "runs"), "settings": "deploy.min_available=3"}
    grid = grid_for(app, **given)
    grid.online.pop()
    with pytest.raises(TooFewClients):
        serve(grid, app, given)
    facts = RunFolder.open(tmp_path / "runs" / "there").facts()
    assert facts["status"] == "too few clients" and "2 of the 3 clients" in facts["reason"]
    assert "2 of the 3 clients" in (tmp_path / "runs" / "there" / "deploy.log").read_text()


# --- secure sums -----------------------------------------------------------------------------------------------------

SECRET = "deploy.secure_aggregation=true deploy.min_available=3"


def test_a_run_of_secure_sums_is_an_ordinary_run_that_repeats_and_resumes_to_the_bit(tmp_path: Path) -> None:
    app = an_app(tmp_path / "app", "fedprox")
    folder = served(app, tmp_path / "runs", settings=SECRET)
    _, model = in_process(app)
    found = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    for name, value in {**model["params"], **model["buffers"]}.items():
        assert float((found[name].double() - value.double()).abs().max()) <= 3 * CLIENTS * 3.6e-6  # three rounds
    assert digest(folder) != arrays.digest({**model["params"], **model["buffers"]})  # rounded to 2^22 levels
    said = (folder / "deploy.log").read_text()
    assert said.count("EXPERIMENTAL: secure sums") == 1 and "follows the protocol" in said
    served(app, tmp_path / "again", settings=f"{SECRET} rounds=1")
    resumed = served(app, tmp_path / "again", settings=SECRET)
    assert digest(resumed) == digest(folder)
    assert (resumed / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(Invalid, match=r"deploy.secure_aggregation: True -> False"):
        served(app, tmp_path / "again", settings="rounds=4 deploy.min_available=3")


def test_a_sum_that_fails_is_counted_in_the_row_and_the_run_goes_on(tmp_path: Path) -> None:
    app = an_app(tmp_path / "app", "fedavg", TEST_ROWS)
    given = {"runs": str(tmp_path / "runs"), "settings": f"{SECRET} deploy.deadline=0.3"}
    grid = grid_for(app, **given)
    look, stages = grid.get_node_ids, 4

    def falter(node: int, reply: Any) -> Any:
        if grid.kinds.count("train") == stages * CLIENTS:  # the first round is over
            grid.deaf = set(sorted(grid.apps)[:2])
        return reply

    def back() -> list[int]:
        if grid.kinds.count("train") > stages * CLIENTS:  # and so is the second
            grid.deaf = set()
        return look()

    grid.tamper, grid.get_node_ids = falter, back  # type: ignore[method-assign]
    found = rows(serve(grid, app, given))
    assert [row["rejected"].get("secure_sum", 0) for row in found] == [0, 1, 0]
    assert found[1]["cohort"] == [] and found[1]["silent"] == 2 and found[1]["loss"] == found[0]["loss"]
    assert "1 of 3 nodes answered stage 1 of 4, and 2 are needed" in found[1]["refused"][0]
