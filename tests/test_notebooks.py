"""The notebooks of the tutorial: made from its pages as they are now, executed without an error, and repeatable."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from documents import DOCS

spec = importlib.util.spec_from_file_location("make_notebooks", DOCS / "make_notebooks.py")
assert spec is not None and spec.loader is not None
maker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(maker)

NAMES = ["own_model_and_data", "heterogeneous_clients", "own_recipe", "transformer", "to_deployment"]
NEEDS = {"transformer": ["transformers", "peft"], "to_deployment": ["flwr"]}


def stored(page: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))
    return found


def test_five_pages_have_notebooks() -> None:
    assert [page.stem.partition("_")[2] for page in maker.PAGES] == NAMES


@pytest.mark.parametrize("page", maker.PAGES, ids=lambda page: page.stem)
def test_a_stored_notebook_is_that_of_its_page_and_was_executed(page: Path) -> None:
    found, plain = stored(page), maker.notebook(page)
    for cell, made in zip(found["cells"], plain["cells"], strict=True):
        again = "run `python docs/make_notebooks.py`"
        assert (cell["cell_type"], "".join(cell["source"])) == (made["cell_type"], "".join(made["source"])), again
    ran = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1))
    kinds = {out["output_type"] for cell in ran for out in cell["outputs"]}
    assert "error" not in kinds and kinds & {"stream", "execute_result"}
    text = page.with_suffix(".ipynb").read_text(encoding="utf-8")
    places = ('"/home/', " /home/", " /tmp/", " /root/", "site-packages")  # of the machine that ran it
    assert len(text) < 500_000 and not any(place in text for place in places)


def test_what_a_page_shows_becomes_what_its_cell_prints() -> None:
    page = "# T\n\na\n\n```python\nprint(1)\n```\n```text\n1\n```\n\n<!-- not run: slow; the notebook runs it -->\n"
    page += "```bash\nls x\n```\n\n<!-- not run: never -->\n```python\n2\n```\n\n```toml\nx = 1\n```\nend\n"
    found = maker.cells(page, "t.md")
    assert [cell.source for cell in found if cell.kind == "code"] == ["print(1)", "%%bash -e\nls x"]
    prose = [cell.source for cell in found if cell.kind == "markdown"]
    assert prose[0].startswith("# T") and prose[-1] == "```python\n2\n```\n\n```toml\nx = 1\n```\nend"


@pytest.mark.slow
@pytest.mark.parametrize("page", maker.PAGES, ids=lambda page: page.stem)
def test_a_notebook_runs_from_the_first_cell_to_the_last(page: Path) -> None:
    """Once more, in a fresh kernel; an exception in a cell is raised here."""
    for package in ("nbclient", "nbformat", "ipykernel", *NEEDS.get(page.stem.partition("_")[2], [])):
        pytest.importorskip(package)
    again = maker.executed(maker.notebook(page))
    assert all(cell["execution_count"] for cell in again["cells"] if cell["cell_type"] == "code")
