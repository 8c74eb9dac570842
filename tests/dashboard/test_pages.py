"""The dashboard's pages as text: whole by themselves, with the names of folders, clients and settings as text."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from html_pages import EVIL, EVIL_IN_A_DRAWING, alone
from sample_runs import written

from consilience.dashboard.pages import Pages

pytest.importorskip("matplotlib", reason='needs pip install "consilience[dashboard]"')

FOLDER = "<b onclick=alert(1)>&amp;"


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    """A folder with hostile names that holds two runs, one of them with hostile clients, and a damaged one."""
    names = {"names": [EVIL, EVIL_IN_A_DRAWING, "c", "d"], "labels": [], "train_rows": [1, 2, 3, 4]}
    written(tmp_path / FOLDER, "a", federation=names, more=f'note = "{EVIL}"\n', reason=EVIL)
    written(tmp_path / FOLDER, "b", seed=1)
    bad = written(tmp_path, "bad").rename(tmp_path / f"bad{FOLDER}")  # no run is made under such a name
    (bad / "run.json").write_text(EVIL)
    return Pages(tmp_path, refresh=7, with_similarity=False)


def test_the_list_of_runs(pages: Pages) -> None:
    text = pages.index()
    alone(text, links=True)
    assert "<b onclick" not in text and html.escape(FOLDER) in text
    assert 'href="/runs/%3Cb%20onclick%3Dalert%281%29%3E%26amp%3B/a"' in text
    assert '<meta http-equiv="refresh" content="7">' in text and "damaged" in text and 'href="/runs/"' in text


def test_the_page_of_a_folder_of_runs(pages: Pages) -> None:
    text = pages.run(FOLDER)
    assert text is not None and "<svg" in text and "<script" not in text and 'href="/"' in text
    alone(text, links=True)
    assert "not running" in text and 'http-equiv="refresh"' not in text and "--similarity" in text
    assert pages.run("nowhere") is None


def test_a_run_that_cannot_be_read_and_an_empty_folder(pages: Pages, tmp_path: Path) -> None:
    text = pages.run(f"bad{FOLDER}")
    assert text is not None and "Nothing to show" in text and "damaged" in text
    alone(text, links=True)
    (tmp_path / "empty").mkdir()
    text = Pages(tmp_path / "empty", refresh=7, with_similarity=False).index()
    alone(text)
    assert "No run yet" in text
