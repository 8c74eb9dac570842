"""Private secure sums: clients clip and add the noise, the server sees one noisy sum, and rounds are charged first."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from consilience.core.rounds import Diverged
from consilience.core.settings import Invalid
from consilience.flower.deploy import template
from consilience.flower.deploy.settings import from_given, load
from consilience.flower.deploy.sources import source_of
from consilience.privacy import Spending
from consilience.runs.folder import RunFolder

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")

from flower_loopback import Loopback

from consilience.flower import client_app
from consilience.flower.deploy.serving import CONNECTION, serve
from consilience.privacy import noise_shares

pytestmark = pytest.mark.usefixtures("untraced")
CLIENTS, BOUND, NOISE = 5, 0.2, 1.5
FEDERATION = """
import torch
from torch import nn


def model():
    return nn.Linear(6, 3)


def data(client, node):
    draw = torch.Generator().manual_seed(client)
    y = torch.randint(0, 3, (14 + 5 * client,), generator=draw)
    x = torch.randn(len(y), 6, generator=draw, dtype=torch.float64) + y[:, None]
    return x * node.get("factor", 1.0), y


def test():
    return data(99, {})
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CONNECTION, "loopback")
    folder = tmp_path / "app"
    template.init(folder, clients=CLIENTS)
    (folder / "config.toml").write_text(
        f"""
name = "there"
rounds = 1
threads = 1
algorithm = {{ name = "dp_fedavg", lr = 0.1, epochs = 1, batch_size = 4, bound = {BOUND}, noise = {NOISE} }}
engine = {{ dtype = "float64", device = "cpu" }}

[deploy]
clients = {CLIENTS}
classes = 3
deadline = 5
wait = 0.3
retries = 1
pause = 0
min_available = 3
secure_aggregation = true
"""
    )
    (folder / "federation.py").write_text(FEDERATION)
    return folder


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise: what the sum alone does."""
    monkeypatch.setattr(noise_shares, "sample", lambda key, purpose, count, deviation: np.zeros(count, dtype=np.int64))


def served(app: Path, runs: Path, settings: str = "", nodes: Any = None, **disturbed: Any) -> Path:
    given = {"runs": str(runs), "settings": settings}
    told = [{"clients": str(k), **(nodes or {}).get(k, {})} for k in range(CLIENTS)]
    grid = Loopback([client_app(app)] * CLIENTS, told, given)
    for name, value in disturbed.items():
        setattr(grid, name, value(grid))
    return serve(grid, app, given)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def params(folder: Path) -> torch.Tensor:
    values = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    return torch.cat([values[name].flatten() for name in sorted(values)])


def start_of(app: Path) -> torch.Tensor:
    values = source_of(app, load(app)).task.start()["params"]
    return torch.cat([values[name].double().flatten() for name in sorted(values)])


def unheard(*places: int, stage: str = "masked_params") -> Any:
    """Nodes, by their places, whose answer to one stage cannot be used."""

    def made(grid: Loopback) -> Any:
        bad = {sorted(grid.apps)[place] for place in places}

        def tamper(node: int, reply: Any) -> Any:
            configs = reply.content.config_records.get("secaggplus_configs", {})
            if node in bad and stage in configs:
                del configs[stage]
            return reply

        return tamper

    return made


@pytest.mark.usefixtures("quiet")
def test_the_mean_is_that_of_updates_that_the_server_clips(app: Path, tmp_path: Path) -> None:
    """Without noise, to the rounding of the levels; the server of the other run adds its noise, here none."""
    from consilience.server.rules import private_averaging

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_averaging, "normals", lambda key, purpose, count: np.zeros(count))
        clear = served(app, tmp_path / "clear", "deploy.secure_aggregation=false")
    summed = served(app, tmp_path / "summed")
    step = 2 * 8.0 / (1 << 22)
    assert float((params(summed) - params(clear)).abs().max()) <= step
    assert float((params(clear) - start_of(app)).norm()) > 0.1
    (row,) = lines(summed / "metrics.jsonl")
    assert row["train_loss"] is None and row["bound"] == BOUND and row["cohort"] == list(range(CLIENTS))


def test_the_noise_of_a_sum_is_that_of_its_members(app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 nodes 3 must stay: each adds noise x bound / sqrt(3), so the sum of five has sqrt(5 / 3) times as much."""
    drawn: list[np.ndarray] = []
    deviations, draw = set(), noise_shares.sample

    def kept(key: bytes, purpose: str, count: int, deviation: float) -> np.ndarray:
        deviations.add(deviation)
        drawn.append(draw(key, purpose, count, deviation))
        return drawn[-1]

    monkeypatch.setattr(noise_shares, "sample", kept)
    noisy = served(app, tmp_path / "noisy")
    monkeypatch.setattr(noise_shares, "sample", lambda key, purpose, count, deviation: np.zeros(count, dtype=np.int64))
    silent = served(app, tmp_path / "silent")
    step, moved = 2 * 8.0 / (1 << 22), params(noisy) - params(silent)
    assert len(drawn) == CLIENTS and moved.numel() == 21
    expected = torch.from_numpy(sum(drawn) * step / CLIENTS)
    torch.testing.assert_close(moved.sort().values, expected.sort().values, rtol=0, atol=step)
    assert deviations == {NOISE * (BOUND / step + math.sqrt(21)) / math.sqrt(3)}


def test_two_runs_of_one_seed_have_other_noise_and_no_key_is_kept(app: Path, tmp_path: Path) -> None:
    one, other = served(app, tmp_path / "one", "rounds=2"), served(app, tmp_path / "other", "rounds=2")
    assert not torch.equal(params(one), params(other))
    assert not list(one.glob("keys/*"))
    rows, ledger = lines(one / "metrics.jsonl"), lines(one / "privacy.jsonl")
    spending = Spending(noise=NOISE, discrete=True)
    assert [row["epsilon"] for row in rows] == [spending.epsilon(1), spending.epsilon(2)]
    assert [row["round"] for row in ledger] == [1, 2] and all(row["discrete"] for row in ledger)
    assert rows[-1]["private"] is True


def test_a_round_that_a_crash_cut_off_after_its_sum_is_paid_for_twice(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from consilience.server.rules.private_sum import PrivateSum

    def dies(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PrivateSum, "update", dies)  # the sum is known, and nothing of it is on disk
        served(app, tmp_path / "runs")
    folder = tmp_path / "runs" / "there"
    assert len(lines(folder / "privacy.jsonl")) == 1 and not (folder / "model.safetensors").exists()
    served(app, tmp_path / "runs")
    (row,), ledger = lines(folder / "metrics.jsonl"), lines(folder / "privacy.jsonl")
    assert len({line["release"] for line in ledger}) == len({line["key"] for line in ledger}) == 2
    assert row["epsilon"] == Spending(noise=NOISE, discrete=True).epsilon(2)


def test_the_budget_is_held_before_anyone_is_asked(app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Spending(noise=NOISE, discrete=True).epsilon(2)
    with pytest.raises(Invalid, match="2 rounds fit"):
        served(app, tmp_path / "runs", f"algorithm.epsilon={budget} rounds=3")
    folder = served(app, tmp_path / "runs", f"algorithm.epsilon={budget} rounds=2")
    assert len(lines(folder / "privacy.jsonl")) == 2
    assert RunFolder.open(folder).facts()["privacy"]["epsilon"] <= budget


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("stage", ["pk1", "ciphertexts", "masked_params", "shares"])
def test_nodes_that_fall_silent_are_left_out_and_the_others_keep_their_mean(
    app: Path, tmp_path: Path, stage: str
) -> None:
    names = {"pk1": "pk1", "ciphertexts": "ctxts", "masked_params": "masked_params", "shares": "shares"}
    folder = served(app, tmp_path / "runs", tamper=unheard(1, 4, stage=names[stage]))
    (row,) = lines(folder / "metrics.jsonl")
    assert row["cohort"] == ([0, 1, 2, 3, 4] if stage == "shares" else [0, 2, 3])
    assert float((params(folder) - start_of(app)).norm()) <= BOUND


def test_a_sum_that_fails_changes_nothing_and_is_paid_for(app: Path, tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="secure_sum"):
        served(app, tmp_path / "runs", "rounds=3", tamper=unheard(0, 1, 2))
    folder = tmp_path / "runs" / "there"
    assert len(lines(folder / "privacy.jsonl")) == 3
    assert torch.equal(
        torch.cat([leaf.flatten() for _, leaf in sorted(checkpoint_model(folder).items())]), start_of(app)
    )


def checkpoint_model(folder: Path) -> dict[str, torch.Tensor]:
    from consilience.runs.verification import newest_checkpoint

    saved = newest_checkpoint(RunFolder.open(folder))
    assert saved is not None
    return saved.trees["server"]["model"]["params"]


@pytest.mark.usefixtures("quiet")
def test_a_client_whose_update_is_not_finite_takes_part_with_zeros(app: Path, tmp_path: Path) -> None:
    """Were it silent, its silence would tell something about its rows that no noise covers."""
    folder = served(app, tmp_path / "runs", "engine.dtype=float32", nodes={2: {"factor": 1e37}})
    (row,) = lines(folder / "metrics.jsonl")
    assert row["cohort"] == list(range(CLIENTS)) and not row["rejected"]
    others = served(app, tmp_path / "others", "engine.dtype=float32", tamper=unheard(2))
    begin = start_of(app)
    torch.testing.assert_close(
        (params(folder) - begin) * 5, (params(others) - begin) * 4, rtol=0, atol=5 * 2 * 8.0 / (1 << 22)
    )


def test_a_member_that_does_not_clip_is_found_by_the_length_of_the_sum(app: Path, tmp_path: Path) -> None:
    def hostile(grid: Loopback) -> Any:
        from flwr.common import bytes_to_ndarray, ndarray_to_bytes

        bad = max(grid.apps)

        def tamper(node: int, reply: Any) -> Any:
            configs = reply.content.config_records.get("secaggplus_configs", {})
            if node == bad and "masked_params" in configs:
                weight, vector = configs["masked_params"]
                configs["masked_params"] = [
                    weight,
                    ndarray_to_bytes((bytes_to_ndarray(vector) + (1 << 22)) % (1 << 32)),
                ]
            return reply

        return tamper

    with pytest.raises(Diverged, match="secure_sum"):
        served(app, tmp_path / "runs", "rounds=3", tamper=hostile)
    assert "has not clipped its own" in (tmp_path / "runs" / "there" / "deploy.log").read_text()


@pytest.mark.usefixtures("quiet")
def test_the_bound_follows_the_quantile(app: Path, tmp_path: Path) -> None:
    settings = "rounds=4 algorithm.quantile=0.5 algorithm.count_noise=2.0"
    folder = served(app, tmp_path / "runs", f"{settings} algorithm.bound=0.001")
    bounds = [row["bound"] for row in lines(folder / "metrics.jsonl")]
    assert bounds == pytest.approx([0.001 * math.exp(0.1 * k) for k in range(4)], rel=1e-3)  # all were longer
    folder = served(app, tmp_path / "others", f"{settings} algorithm.bound=1.5 deploy.secure_clip=32.0")
    bounds = [row["bound"] for row in lines(folder / "metrics.jsonl")]
    assert bounds == pytest.approx([1.5 * math.exp(-0.1 * k) for k in range(4)], rel=1e-3)  # all were within


@pytest.mark.parametrize(
    ("options", "deploy", "reason"),
    [
        ({"rate": 0.5}, {}, "sampling hides nobody from it"),
        ({"noise_seed": 3}, {}, "clients draw it"),
        ({"bound": 100.0}, {}, r"raise deploy\.secure_clip"),
        ({}, {"secure_colluding": 3}, "may all be among them"),
        ({}, {"secure_neighbours": 4}, "leave neighbours out"),
        ({}, {"clients": 2}, "at least 3 clients"),
    ],
)
def test_what_has_no_proof_is_refused_before_anything_starts(
    options: dict[str, Any], deploy: dict[str, Any], reason: str
) -> None:
    given = {"name": "dp_fedavg", "noise": NOISE, "bound": BOUND}
    table = {"data": "digits", "deploy": {"clients": CLIENTS, "secure_aggregation": True}}
    assert from_given({**table, "algorithm": given}, own=False).build_terms() is not None
    with pytest.raises(Invalid, match=reason):
        from_given({**table, "algorithm": given | options, "deploy": table["deploy"] | deploy}, own=False)


def with_test_rows(app: Path) -> None:
    """Each client has ten test rows, and the server none."""
    text = FEDERATION.partition("def test()")[0].replace("return x * node", "return tests(x * node")
    text = text.replace('node.get("factor", 1.0), y', 'node.get("factor", 1.0), y)')
    more = "\n\ndef tests(x, y):\n    return x, y, x[:10], y[:10]\n"
    (app / "federation.py").write_text(text + more)


def test_clients_report_no_test_results_unless_all_have_agreed(app: Path, tmp_path: Path, caplog: Any) -> None:
    with_test_rows(app)
    grids: list[Loopback] = []

    def kept(grid: Loopback) -> None:
        grids.append(grid)

    folder = served(app, tmp_path / "runs", nothing=kept)
    (row,) = lines(folder / "metrics.jsonl")
    assert row["loss"] is None and row["accuracy"] is None and "evaluate" not in grids[0].kinds
    assert "deploy.clear_tests = true" in (folder / "deploy.log").read_text()
    agreed = served(app, tmp_path / "more", settings="deploy.clear_tests=true")
    assert lines(agreed / "metrics.jsonl")[0]["accuracy"] is not None


def test_a_server_that_asks_for_test_results_all_the_same_gets_none(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from consilience.flower.engine.engine import FlowerEngine

    with_test_rows(app)
    monkeypatch.setattr(FlowerEngine, "test_sizes", property(lambda self: self._registry.sizes["test"]))
    folder = served(app, tmp_path / "runs")
    assert lines(folder / "metrics.jsonl")[0]["accuracy"] is None
    assert "reports no test results in clear" in (folder / "deploy.log").read_text()


def test_settings_that_need_test_results_are_refused() -> None:
    given = {"name": "dp_fedavg", "noise": NOISE, "bound": BOUND}
    table = {"data": "digits", "deploy": {"clients": CLIENTS, "secure_aggregation": True}, "algorithm": "fedavg"}
    assert from_given(table, own=False).build_terms().clear_tests  # type: ignore[union-attr]
    closed = {**table, "deploy": {**table["deploy"], "clear_tests": False}}  # type: ignore[dict-item]
    assert not from_given(closed, own=False).build_terms().clear_tests  # type: ignore[union-attr]
    assert not from_given({**table, "algorithm": given}, own=False).build_terms().clear_tests  # type: ignore[union-attr]
    with pytest.raises(Invalid, match=r"deploy\.clear_tests = false"):
        from_given({**closed, "validation": {"share": 0.2}}, own=False)
    with pytest.raises(Invalid, match=r"no effect without deploy\.secure_aggregation"):
        from_given({**table, "deploy": {"clients": CLIENTS, "clear_tests": True}}, own=False)
