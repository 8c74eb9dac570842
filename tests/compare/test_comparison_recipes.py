"""Every comparison among the recipes can be planned; those on embedded data run, the others refuse without files."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from consilience.compare.cells import run_cell
from consilience.compare.plan import plan
from consilience.core.settings import Invalid
from consilience.experiments.assembly import read_data

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes").glob("compare_*.toml"))
EMBEDDED = ("digits", "synthetic")
QUICK = [file for file in FILES if file.stem.endswith("_quick")]
FROM_FILES = [file for file in FILES if tomllib.loads(file.read_text(encoding="utf-8"))["data"]["name"] not in EMBEDDED]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_comparison_can_be_planned(file: Path) -> None:
    found = plan(file)
    assert len(found.methods) > 1 and found.baseline in [method.label for method in found.methods]


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("file", QUICK, ids=lambda file: file.stem)
def test_quick_comparisons_run(file: Path, tmp_path: Path) -> None:
    """Every method, once, for a round of a tenth of the work."""
    found = plan(file, ["rounds=1", "algorithm.epochs=0.1"], seeds=[0])
    data = read_data(found.base)
    for cell in found.cells:
        ended = run_cell(tmp_path / cell.name, cell.method, cell.config, data=data, threads=1, notify=lambda *_: None)
        assert ended.status == "finished", f"{cell.method}: {ended.text}"


@pytest.mark.parametrize("file", FROM_FILES, ids=lambda file: file.stem)
def test_without_files_the_refusal_names_them(file: Path, tmp_path: Path) -> None:
    found = plan(file, [f"data_dir={tmp_path}"])
    with pytest.raises((Invalid, FileNotFoundError)) as refusal:
        read_data(found.base)
    assert str(tmp_path) in str(refusal.value)
