"""Private runs over Flower: the server clips and adds the noise, whoever does not answer, whatever is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from consilience.core import tree
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments import live_run
from consilience.flower.deploy import template
from consilience.flower.deploy.settings import from_given, load
from consilience.flower.deploy.sources import source_of
from consilience.privacy import Spending
from consilience.runs.folder import RunFolder
from consilience.server.rules import private_averaging
from consilience.wire import arrays
from consilience.wire.admission import Arrival

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")

from flower_loopback import Loopback

from consilience.flower import client_app
from consilience.flower.deploy.serving import CONNECTION, serve

pytestmark = pytest.mark.usefixtures("untraced")
CLIENTS = 3
FEDERATION = """
import torch
from torch import nn


def model():
    return nn.Linear(6, 3)


def data(client, node):
    draw = torch.Generator().manual_seed(client)
    y = torch.randint(0, 3, (14 + 5 * client,), generator=draw)
    x = torch.randn(len(y), 6, generator=draw, dtype=torch.float64) + y[:, None]
    return x, y


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
rounds = 3
threads = 1
algorithm = {{ name = "dp_fedavg", lr = 0.1, epochs = 1, batch_size = 4, bound = 0.2, noise = 1.5 }}
engine = {{ dtype = "float64", device = "cpu" }}
deploy = {{ clients = {CLIENTS}, classes = 3, deadline = 5, wait = 0.3, retries = 2, pause = 0, min_available = 1 }}
"""
    )
    (folder / "federation.py").write_text(FEDERATION)
    return folder


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise: what the sum alone does."""
    monkeypatch.setattr(private_averaging, "normals", lambda key, purpose, count: np.zeros(count))


def served(app: Path, runs: Path, settings: str = "", **disturbed: Any) -> tuple[Path, Loopback]:
    given = {"runs": str(runs), "settings": settings}
    grid = Loopback([client_app(app)] * CLIENTS, [{"clients": str(k)} for k in range(CLIENTS)], given)
    for name, value in disturbed.items():
        setattr(grid, name, value(grid))
    return serve(grid, app, given), grid


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def params(folder: Path) -> torch.Tensor:
    values = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    return torch.cat([values[name].flatten() for name in sorted(values)])


def start_of(app: Path) -> torch.Tensor:
    values = source_of(app, load(app)).task.start()["params"]
    return torch.cat([values[name].double().flatten() for name in sorted(values)])


def wordless(*places: int) -> Any:
    """Nodes, by their places, whose replies to training cannot be used."""

    def made(grid: Loopback) -> Any:
        bad = {sorted(grid.apps)[place] for place in places}

        def tamper(node: int, reply: Any) -> Any:
            if node in bad and "answer" in reply.content:
                del reply.content["answer"]
            return reply

        return tamper

    return made


@pytest.mark.parametrize("more", ["", "algorithm.quantile=0.5 algorithm.count_noise=2.0"])
def test_it_has_the_bits_of_the_simulation(app: Path, tmp_path: Path, more: str) -> None:
    settings = f"rounds=2 algorithm.noise_seed=4 algorithm.rate=0.7 {more}".strip()
    folder, _ = served(app, tmp_path / "runs", settings)
    config = load(app, overrides=settings.split())
    source = source_of(app, config)
    engine = Vectorised(source.task, source.held(np.arange(CLIENTS), {}), dtype="float64", lane="serial", device="cpu")
    *_, last = run(config.build_algorithm(), engine, rounds=2, seed=config.seed)
    stored = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    assert arrays.digest(stored) == arrays.digest(last.model["params"])
    assert lines(folder / "metrics.jsonl")[-1]["private"] is False


def test_what_is_spent_is_on_disk_and_no_key_is_left(app: Path, tmp_path: Path) -> None:
    folder, _ = served(app, tmp_path / "runs", "algorithm.rate=0.7")
    found, ledger = lines(folder / "metrics.jsonl"), lines(folder / "privacy.jsonl")
    assert [row["round"] for row in ledger] == [1, 2, 3] and len({row["key"] for row in ledger}) == 3
    spending = Spending(noise=1.5, rate=0.7)
    assert [row["epsilon"] for row in found] == [spending.epsilon(n) for n in (1, 2, 3)]
    assert RunFolder.open(folder).facts()["privacy"]["private"] is True and not list((folder / "keys").iterdir())
    other, _ = served(app, tmp_path / "others", "algorithm.rate=0.7")
    assert not torch.equal(params(folder), params(other)), "two runs of one seed have the same noise"


@pytest.mark.usefixtures("quiet")
def test_a_node_that_does_not_answer_leaves_the_denominator_as_it_is(app: Path, tmp_path: Path) -> None:
    whole, _ = served(app, tmp_path / "whole", "rounds=1")
    folder, _ = served(app, tmp_path / "runs", "rounds=1", tamper=wordless(2))
    alone, _ = served(app, tmp_path / "alone", "rounds=1", tamper=wordless(0, 1))
    # the sums of two clients and of the third are, each over three, what all move together
    begin = start_of(app)
    together = (params(folder) - begin) + (params(alone) - begin)
    torch.testing.assert_close(together, params(whole) - begin, rtol=0, atol=1e-12)
    assert float((params(whole) - begin).norm()) > 0.1


def test_a_round_without_answers_is_noise_and_is_not_asked_again(app: Path, tmp_path: Path) -> None:
    folder, grid = served(app, tmp_path / "runs", "rounds=2", tamper=wordless(0, 1, 2))
    assert grid.kinds.count("train") == 2 * CLIENTS  # with retries = 2 it would be asked six times
    found = lines(folder / "metrics.jsonl")
    assert [row["cohort"] for row in found] == [[], []] and len(lines(folder / "privacy.jsonl")) == 2
    assert not torch.equal(params(folder), start_of(app))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("factor", [1e3, -1e6, 1e150])
def test_hostile_members_that_do_not_clip_move_the_model_by_their_bound(
    app: Path, tmp_path: Path, factor: float
) -> None:
    """2 f bound / (rate K) for f of them: here f = 1, bound = 0.2, K = 3."""
    from consilience.flower.messages import wire

    def hostile(grid: Loopback) -> Any:
        bad = max(grid.apps)

        def tamper(node: int, reply: Any) -> Any:
            if node == bad and "answer" in reply.content:
                (said,) = wire.get_json(reply.content, "answer")
                name = wire.reply_name(said["client"])
                sent = {
                    path: arrays.from_bytes(one.data, one.shape, one.dtype) * (factor if "params" in path else 1.0)
                    for path, one in wire.packed(reply.content[name]).items()
                }
                reply.content[name] = wire.array_record({path: arrays.to_bytes(one) for path, one in sent.items()})
                facts = Arrival(**{key: said[key] for key in ("client", "run", "round", "examples", "steps")}).facts
                wire.put_json(
                    reply.content, "answer", [{**said, "digest": arrays.digest(tree.unflatten(sent), *facts)}]
                )
            return reply

        return tamper

    honest, _ = served(app, tmp_path / "honest", "rounds=1")
    folder, _ = served(app, tmp_path / "runs", "rounds=1", tamper=hostile)
    assert lines(folder / "metrics.jsonl")[0]["cohort"] == [0, 1, 2]
    gap = float((params(folder) - params(honest)).norm())
    assert 0.001 < gap <= 2 * 0.2 / CLIENTS + 1e-8


def test_after_a_crash_the_same_replies_are_the_same_release_and_others_are_charged(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies between the noise and the checkpoint: the ledger has the release, and the key is still there."""
    for name, then in (("same", {}), ("other", {"tamper": wordless(2)})):
        folder = tmp_path / name / "there"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(live_run.checkpoint, "save", stopped)
            served(app, tmp_path / name, "rounds=1")
        (before,) = lines(folder / "privacy.jsonl")
        assert len(list((folder / "keys").iterdir())) == 1
        served(app, tmp_path / name, "rounds=1", **then)
        after, (row,) = lines(folder / "privacy.jsonl"), lines(folder / "metrics.jsonl")
        assert after[0] == before and not list((folder / "keys").iterdir())
        if name == "same":
            assert after == [before] and row["epsilon"] == Spending(noise=1.5).epsilon(1)
        else:  # noise of its own
            assert after[1]["key"] == before["key"] and after[1]["release"] != before["release"]
            assert row["epsilon"] == Spending(noise=1.5).epsilon(2)


def stopped(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_the_budget_ends_a_run(app: Path, tmp_path: Path) -> None:
    budget = Spending(noise=1.5).epsilon(2)
    with pytest.raises(Invalid, match="2 rounds fit"):
        served(app, tmp_path / "runs", f"algorithm.epsilon={budget}")
    folder = tmp_path / "runs" / "there"
    facts = RunFolder.open(folder).facts()
    assert facts["status"] == "refused" and "2 rounds fit" in facts["reason"]
    served(app, tmp_path / "runs", f"algorithm.epsilon={budget} rounds=2")
    assert len(lines(folder / "privacy.jsonl")) == 2


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"defence": "auto", "untrusted": 1}, r"at most 2 f bound / \(rate x clients\)"),
        ({"limits": {"min_valid": 2}}, "drops all replies"),
        ({"limits": {"examples_ratio": 5.0}}, "compares the clients' rows"),
        ({"environment": {"stragglers": 0.5}}, "fixed share of those who take part"),
        ({"data": "breast_cancer"}, "scaled by statistics"),
    ],
)
def test_what_has_no_proof_is_refused_before_anything_starts(more: dict[str, Any], reason: str) -> None:
    given = {"algorithm": "dp_fedavg", "data": "digits", "deploy": {"clients": 4}}
    assert from_given(given, own=False).limits.examples_ratio is None
    with pytest.raises(Invalid, match=reason):
        from_given({**given, **more}, own=False)
