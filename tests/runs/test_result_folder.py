"""Results: drawn, framed, saved and loaded; an interrupted training gives back what it has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.notebook import LINE
from consilience.core.settings import Invalid
from consilience.runs.row_log import RecordError


def federation() -> cs.Federation:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=draw)
    y = (x.sum(1) > 0).long()
    pairs = [(x[:25], y[:25]), (x[25:], y[25:])]
    return cs.Federation.from_clients(pairs, test=(x, y), label_names=["no", "yes"])


def trained(module: nn.Module | None = None, **options: object) -> cs.Result:
    module = module or cs.build_model("mlp", (4,), 2, seed=1, hidden=(5,))
    return cs.train(module, federation(), cs.fedavg(lr=0.1), rounds=2, progress=False, lane="serial", **options)  # type: ignore[arg-type]


def test_a_saved_result_is_the_same(tmp_path: Path) -> None:
    found = trained()
    assert found.save(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    found.save(tmp_path / "a" / "b")  # again, over itself
    again = cs.load(tmp_path / "a" / "b")
    x = federation().train.x
    assert torch.equal(again.model(x), found.model(x)) and again.predict(x) == found.predict(x)
    assert again.history == found.history and again.table() == found.table() and repr(again) == repr(found)
    with pytest.raises(Invalid, match="holds other files"):
        found.save(tmp_path)


def test_a_module_of_ones_own_is_given_again(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    found = trained(module)
    found.save(tmp_path / "r")
    x = federation().train.x
    with pytest.raises(Invalid, match=r"values of a Sequential, and no code.*model=Sequential\(\.\.\.\)"):
        cs.load(tmp_path / "r")
    again = cs.load(tmp_path / "r", model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    assert torch.equal(again.model(x), found.model(x))
    with pytest.raises(Invalid, match=r"params/0\.weight is \(3, 4\), the model's \(2, 4\)"):
        cs.load(tmp_path / "r", model=nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)))
    (tmp_path / "r" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(RecordError, match="damaged"):
        cs.load(tmp_path / "r", model=module)
    with pytest.raises(Invalid, match="neither a run nor a saved result"):
        cs.load(tmp_path)


def test_a_run_folder_is_loaded_with_its_model(tmp_path: Path) -> None:
    from consilience.experiments import runner
    from consilience.experiments.config import config

    small = ["rounds=1", "model=logistic", "partition.clients=4", "engine.lane=serial"]
    ran = runner.execute(config.load(None, small), folder=tmp_path / "run")
    found = cs.load(tmp_path / "run")
    assert all(torch.equal(v, ran.values["params"][k]) for k, v in found.values["params"].items())
    with pytest.raises(Invalid, match="knows its model"):
        cs.load(tmp_path / "run", model=nn.Linear(2, 2))


def test_curves_and_frames() -> None:
    found = trained()
    figure = found.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    drawn = {axes.get_ylabel(): axes.lines[0].get_ydata().tolist() for axes in figure.axes}
    assert drawn == {title: [row[title] for row in found.history] for title in ("accuracy", "loss")}
    assert figure.axes[-1].get_xlabel() == "round"
    assert [axes.get_ylabel() for axes in found.plot("train_loss").axes] == ["train loss"]
    assert len(found.plot(["loss", "train_loss"]).axes) == 2
    with pytest.raises(Invalid, match="did you mean 'accuracy'"):
        found.plot("acuracy")
    pytest.importorskip("pandas")
    frame = found.frame()
    assert frame.index.tolist() == [1, 2] and frame["loss"].tolist() == [row["loss"] for row in found.history]


def test_reprs_fit_a_line() -> None:
    found = trained()
    assert repr(found).startswith("Result(2 rounds, accuracy 0.") and len(repr(found)) <= LINE
    assert repr(found).endswith(" parameters)")
    assert "<table" in found._repr_html_() and "<table" in found.task._repr_html_()  # type: ignore[attr-defined]
    algorithm = cs.fedavg(weighting="simprox", selection=0.5, optimiser="rmsprop")
    assert repr(algorithm).startswith("Algorithm(Uniform(fraction=0.5), LocalTraining(solver=RMSprop), Averaging(")
    assert "SimProxWeights" in algorithm._repr_html_()


class Interrupting(nn.Linear):
    """Sends this process SIGINT after so many passes."""

    left = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Interrupting.left -= 1
        if Interrupting.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(x)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here; a process that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible", "untraced")  # untraced: every pass goes through the module
def test_an_interrupted_training_returns_the_finished_rounds() -> None:
    options = {"rounds": 1000, "progress": False, "lane": "serial"}
    whole = cs.train(nn.Linear(4, 2), federation(), cs.fedavg(lr=0.1), **{**options, "rounds": 3})  # type: ignore[arg-type]
    module = Interrupting(4, 2)
    with torch.no_grad():
        for mine, theirs in zip(module.parameters(), whole.task.module.parameters()):
            mine.copy_(theirs)
    Interrupting.left = 60
    with pytest.warns(UserWarning, match="interrupted: the result has"):
        found = cs.train(module, federation(), cs.fedavg(lr=0.1), **options)  # type: ignore[arg-type]
    assert found.stopped == signal.SIGINT and 3 <= len(found.history) < 1000 and "interrupted" in repr(found)
    assert found.history[:3] == whole.history
    Interrupting.left = 1
    with pytest.raises(KeyboardInterrupt):
        cs.train(module, federation(), cs.fedavg(lr=0.1), **options)  # type: ignore[arg-type]
