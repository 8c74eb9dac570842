"""FedDF: against torch's own Adam, closed forms for linear models, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.feddf import feddf
from consilience.client.personal_layers import Head
from consilience.core import rng, tree
from consilience.core.exchange import Cohort
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments import runner
from consilience.experiments.config import config
from consilience.server import Averaging, UniformWeights
from consilience.server.rules.ensemble_distillation import EnsembleDistillation, teacher
from consilience.server.rules.public_rows import FileRows, GivenRows, NoiseRows
from consilience.task.task import Task

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def linear() -> nn.Module:
    return nn.Linear(5, 3).double()


def cohort_of(task: Task, build: Any, seeds: tuple[int, ...], heard: list[bool] | None = None) -> Cohort:
    models = [Task(tiny.seeded(build, seed)).start() for seed in seeds]
    m = len(models)
    return Cohort(
        reply={"model": tree.stack(models)},
        ids=np.arange(m),
        examples=torch.ones(m, dtype=torch.float64),
        steps=np.ones(m, np.int64),
        round=2,
        seed=5,
        heard=None if heard is None else np.array(heard),
    )


def distilled(build: Any, cohort: Cohort, **options: Any) -> tuple[tree.Tree, tree.Tree]:
    """(the average, what it is after learning)."""
    task = Task(tiny.seeded(build))
    server = EnsembleDistillation(averaging=Averaging(weighting=UniformWeights()), public=GivenRows(x=X), **options)
    state, _ = server.update(server.init(task.start(), len(cohort)), cohort)
    return server.model(state), server.model(server.train(task, state, cohort))


def test_the_teacher_is_the_softmax_of_the_mean_logits() -> None:
    task = Task(tiny.seeded(network))
    cohort = cohort_of(task, network, (1, 2, 3), heard=[True, False, True])
    modules = [tiny.seeded(network, seed) for seed in (1, 3)]  # who was not heard teaches nothing
    expected = torch.softmax(torch.stack([module(X) for module in modules]).mean(0), 1).detach()
    torch.testing.assert_close(teacher(task, cohort, X), expected, rtol=0, atol=1e-15)


def test_steps_equal_torchs_adam_with_cosine_annealing() -> None:
    cohort = cohort_of(Task(tiny.seeded(network)), network, (1, 2, 3))
    average, found = distilled(network, cohort, steps=7, batch_size=16, lr=0.01)
    student = tiny.seeded(network)
    student.load_state_dict(average["params"])
    wanted = torch.softmax(torch.stack([tiny.seeded(network, seed)(X) for seed in (1, 2, 3)]).mean(0), 1).detach()
    adam = torch.optim.Adam(student.parameters(), lr=0.01)
    annealed = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=7)
    for step in range(7):
        rows = torch.from_numpy(rng.host(5, "distillation", 2, step).permutation(40)[:16])
        adam.zero_grad()
        nn.functional.kl_div(torch.log_softmax(student(X[rows]), 1), wanted[rows], reduction="batchmean").backward()
        adam.step()
        annealed.step()
    for name, value in student.named_parameters():
        torch.testing.assert_close(found["params"][name], value.detach(), rtol=0, atol=1e-9)
    assert tiny.gap(found, average) > 1e-3


def test_for_linear_models_the_average_is_the_ensemble_already() -> None:
    """Mean logits are those of the mean model: there is nothing to learn, and nothing changes."""
    average, found = distilled(linear, cohort_of(Task(linear()), linear, (1, 2, 3, 4)))
    assert tiny.same(average, found)


def test_one_client_teaches_nothing_new_and_several_come_nearer_to_the_ensemble() -> None:
    average, found = distilled(network, cohort_of(Task(network()), network, (1,)))
    assert tiny.same(average, found)
    task, cohort = Task(tiny.seeded(network)), cohort_of(Task(network()), network, (1, 2, 3))
    average, found = distilled(network, cohort, steps=300, lr=0.02)
    wanted = teacher(task, cohort, X)

    def apart(model: tree.Tree) -> float:
        return float(
            (wanted * (wanted.log() - torch.log_softmax(task.apply(model, X, train=False)[0], 1))).sum(1).mean()
        )

    assert apart(found) < 0.05 * apart(average)


def test_distillation_follows_the_weights_and_differs_from_fedavg_in_a_run() -> None:
    local: Any = {"lr": 0.1, "epochs": 2, "batch_size": 4}
    public = NoiseRows(count=32, shape=(1, 6, 6))
    ours = list(run(feddf(public=public, server_steps=20, **local), tiny.engine(tiny.convnet), rounds=2, seed=1))
    theirs = list(run(fedavg(**local), tiny.engine(tiny.convnet), rounds=2, seed=1))
    assert tiny.same(tree.rows(ours[0].cohort.reply, 0), tree.rows(theirs[0].cohort.reply, 0))
    assert tiny.gap(ours[0].model, theirs[0].model) > 1e-4
    assert tiny.same(ours[0].model["buffers"], theirs[0].model["buffers"])  # statistics stay the clients'


def test_rows_from_a_file_equal_rows_from_python(tmp_path: Path) -> None:
    np.save(tmp_path / "public.npy", torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(1)).numpy())
    rows = torch.from_numpy(np.load(tmp_path / "public.npy"))
    found = [
        list(run(feddf(public=public, server_steps=5, lr=0.1, batch_size=4), tiny.engine(), rounds=1))[-1].model  # type: ignore[arg-type]
        for public in (GivenRows(x=rows), FileRows(path=str(tmp_path / "public.npy")))
    ]
    assert tiny.same(*found)


def test_a_config_names_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "public.npy", np.random.default_rng(0).normal(size=(30, 64)).astype(np.float32))
    path = f"algorithm.public={{name='file_rows', path='{tmp_path / 'public.npy'}'}}"
    settings = ["rounds=1", "threads=1", "engine.lane=serial", "partition.clients=4", f"runs={tmp_path}"]
    history = runner.execute(
        config.load(None, [*settings, "algorithm=feddf", path, "algorithm.server_steps=3"])
    ).history
    assert history[-1]["round"] == 1


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="public is missing"):
        feddf()  # type: ignore[call-arg]
    with pytest.raises(Invalid, match=r"is not an .npy file that exists"):
        FileRows(path=str(tmp_path / "nothing.npy"))
    (tmp_path / "pickled.npy").write_bytes(b"\x80\x04N.")
    with pytest.raises(Invalid, match=r"is not a plain .npy array"):
        FileRows(path=str(tmp_path / "pickled.npy")).public_rows(Task(network()).start()["params"], 0)
    with pytest.raises(Invalid, match="NaN or infinite"):
        GivenRows(x=torch.full((2, 5), float("nan"))).public_rows(Task(network()).start()["params"], 0)
    with pytest.raises(Invalid, match="shape is missing"):
        list(run(feddf(public=NoiseRows()), tiny.engine(tiny.convnet), rounds=1))
    with pytest.raises(Invalid, match=r"cannot read public rows of shape \[7\]"):
        list(run(feddf(public=NoiseRows(shape=(7,))), tiny.engine(), rounds=1))
    with pytest.raises(Invalid, match="personal_layers is incompatible with feddf"):
        feddf(public=NoiseRows(), personal_layers=Head())
    data = Federation.from_clients([(torch.randn(6, 5), torch.randn(6))] * 2)
    task = Task(nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), loss="squared_error")
    with pytest.raises(Invalid, match="ensemble distillation needs class numbers"):
        list(run(feddf(public=NoiseRows()), Vectorised(task, data, device="cpu"), rounds=1))
