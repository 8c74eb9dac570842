"""The command as a user gives it: what is found in federations that differ in one known way, and the page."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_pages import EVIL, EVIL_IN_A_DRAWING, alone, without_scripts

from consilience.core.settings import Invalid
from consilience.diagnose.advice import Advice, advise, is_heterogeneous, is_label_skewed, is_shifted
from consilience.diagnose.diagnosis import Diagnosis, diagnose
from consilience.diagnose.evidence import nearest
from consilience.diagnose.page import figures, page
from consilience.diagnose.text import lines
from consilience.experiments import runner
from consilience.experiments.config import config
from consilience.reporting import style

SMALL = ["model.hidden=[16]", "algorithm.epochs=1", "engine.lane=serial", "engine.device=cpu", "threads=1"]
SMALL += ["data=digits", "rounds=2"]
ROTATED = ["partition=feature_shift", "partition.kind=rotation", 'partition.inner={name="iid", clients=6}']

pytestmark = pytest.mark.usefixtures("untraced")


def found(*overrides: str, rounds: int = 2) -> Diagnosis:
    return diagnose(None, [*SMALL, *overrides], rounds=rounds, say=lambda text: None)


def kinds(of: Diagnosis, kind: str) -> str:
    return "; ".join(item.what for item in advise(of) if item.kind == kind)


@pytest.fixture(scope="module")
def alike() -> Diagnosis:
    return found("partition=iid", "partition.clients=6")


@pytest.fixture(scope="module")
def skewed() -> Diagnosis:
    clock = ["environment.rows_per_second=[100, 100, 100, 100, 100, 10]", "environment.upload=1e5"]
    return found("partition=dirichlet", "partition.clients=6", "partition.alpha=0.1", "partition.min_size=2", *clock)


def test_clients_that_are_alike_are_called_so(alike: Diagnosis) -> None:
    assert not is_label_skewed(alike) and not is_shifted(alike)
    assert alike.labels.mean == pytest.approx(alike.labels.chance_mean, abs=0.03)
    assert alike.start.b == pytest.approx(alike.start.chance, rel=0.1)
    assert alike.quantity.gini < 0.01 and alike.effort.epochs_ratio == 1.0
    assert nearest(alike)[0].task == "alike" and nearest(alike)[1] < 0.1
    assert kinds(alike, "try first").endswith("fedavg as the yardstick, then fedavgm, feddyn")
    assert "fedbn" in kinds(alike, "cannot help") and "personal" in kinds(alike, "beware")


def test_label_skew_is_not_called_feature_shift(skewed: Diagnosis) -> None:
    assert is_label_skewed(skewed) and not is_shifted(skewed)
    assert skewed.start.b > 1.5 * skewed.start.chance and skewed.later.opposed > 0.2
    assert skewed.effort.waiting > 0.4 and skewed.later_by == "fedavg" and skewed.later_round == 2
    assert nearest(skewed)[0].task == "digits_skew"
    assert "fedbuff" in kinds(skewed, "try") and "fednova" not in kinds(skewed, "cannot help")


def test_feature_shift_is_not_called_label_skew() -> None:
    rotated = found(*ROTATED)
    assert is_shifted(rotated) and not is_label_skewed(rotated) and is_heterogeneous(rotated)


def test_unequal_work_and_sizes_are_seen() -> None:
    sizes = ["partition=quantity", "partition.clients=4", "partition.exponent=2"]
    unequal = found(*sizes, "environment.epochs=[0.5, 1, 1, 4]", rounds=1)
    assert unequal.effort.epochs_ratio == pytest.approx(8, rel=0.2) and unequal.quantity.gini > 0.3
    assert nearest(unequal)[0].task == "work" and "fednova" in kinds(unequal, "beware")


def test_inputs_can_be_compared_in_the_models_own_features() -> None:
    few = ["data=breast_cancer", "partition=iid", "partition.clients=4", *SMALL[:-2]]
    of = diagnose(None, few, rounds=1, encoder="model", say=lambda text: None)
    assert "label skew" in repr(of) and "quantity skew" in repr(of) and len(repr(of)) <= 100
    assert of.features is not None and of.features.encoder == "the model at its start" and not of.features.is_shown
    with pytest.raises(Invalid, match="encoder = 'mine' is not one of random, model"):
        diagnose(None, SMALL, encoder="mine", say=lambda text: None)


def test_a_run_folder_is_diagnosed_with_its_trained_model(tmp_path: Path) -> None:
    overrides = ["algorithm=fedprox", "partition=iid", "partition.clients=4", "algorithm.lr=0.1", *SMALL]
    result = runner.execute(config.load(None, overrides), folder=tmp_path / "run")
    of = diagnose(tmp_path / "run", [], say=lambda text: None)
    assert (of.later_round, of.later_by) == (2, "fedprox")
    assert of.later.loss < of.start.loss and result.folder is not None


def test_the_page_stands_alone_and_holds_the_numbers(skewed: Diagnosis) -> None:
    pytest.importorskip("matplotlib")
    text = page(skewed, [Advice("try", "<b>this</b>", "a & b")])
    alone(text)
    assert "&lt;b&gt;this" in text and text.count("<svg") == 9 == text.count("<figcaption>")
    assert embedded(text)["start"]["b"] == skewed.start.b
    assert embedded(text)["labels"]["counts"] == skewed.labels.counts.tolist()


def embedded(text: str) -> dict[str, Any]:
    inside = re.search(r'<script type="application/json" id="diagnosis">(.*?)</script>', text)
    assert inside is not None
    found: dict[str, Any] = json.loads(inside[1])
    return found


def test_names_are_text_on_the_page(skewed: Diagnosis) -> None:
    pytest.importorskip("matplotlib")
    names = (EVIL, EVIL_IN_A_DRAWING, "</script>", "$x_{", "e", "f")
    hostile = dataclasses.replace(skewed, title=f"</title>{EVIL}", names=names, later_by=EVIL_IN_A_DRAWING)
    text = page(hostile, [Advice(EVIL, EVIL, EVIL)])
    alone(text)
    text = without_scripts(text)
    assert text.count("</script>") == 1 == text.count("</title>") and text.count("&lt;script&gt;alert(1)") >= 4
    assert embedded(text)["names"] == list(names) and "$x_{" in text


def test_without_matplotlib_the_page_has_tables_and_advice(skewed: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilience.diagnose.page.is_possible", lambda: False)
    text = page(skewed, advise(skewed))
    alone(text)
    assert "<svg" not in text and "consilience[report]" in text and f"{skewed.start.b:.2f}" in text


def test_every_figure_has_axes_a_scale_and_a_caption(skewed: Diagnosis) -> None:
    pytest.importorskip("matplotlib")
    with style.drawing():
        found = {figure.name: figure for figure in figures(skewed)}
        axes = {name: figure.figure.axes for name, figure in found.items()}
    assert all(len(re.findall(r"\.(?: |$)", figure.caption)) >= 2 for figure in found.values())
    assert all(own[0].get_xlabel() and own[0].get_ylabel() for own in axes.values())
    scales = {name: own[1].get_ylabel() for name, own in axes.items() if own[0].images}
    cosine = "cosine (-1 to 1)"
    assert scales == {
        "labels": "share of the client's rows",
        "gradients_start": cosine,
        "gradients_later": cosine,
        "similarity": "linear CKA (at most 1)",
    }
    image = axes["gradients_start"][0].images[0]
    assert image.get_clim() == (-1, 1) and np.array_equal(image.get_array(), skewed.start.cosines)
    heights = [bar.get_height() for bar in axes["label_distances"][0].patches]
    assert heights == skewed.labels.total_variation.tolist()
    assert axes["label_distances"][0].lines[0].get_ydata()[0] == skewed.labels.chance_mean


def test_every_line_has_a_number_and_a_meaning(alike: Diagnosis, skewed: Diagnosis) -> None:
    for of in (alike, skewed):
        assert all(line.what and line.found and line.means for line in lines(of))
        assert all(item.because and len(item.because) < 400 for item in advise(of))
