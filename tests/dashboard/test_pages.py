"""The dashboard's pages as text: whole by themselves, with the names of folders, clients and settings as text."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from html_pages import EVIL, EVIL_IN_A_DRAWING, alone, tags
from sample_runs import written

from consilience.dashboard.api import Api, encoded
from consilience.dashboard.pages import Pages
from consilience.dashboard.watch import Watch

pytest.importorskip("matplotlib", reason='needs pip install "consilience[dashboard]"')

FOLDER = "<b onclick=alert(1)>&amp;"


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """A folder with hostile names that holds two runs, one of them with hostile clients, and a damaged one."""
    names = {"names": [EVIL, EVIL_IN_A_DRAWING, "c", "d"], "labels": [], "train_rows": [1, 2, 3, 4]}
    written(tmp_path / FOLDER, "a", federation=names, more=f'note = "{EVIL}"\n', reason=EVIL)
    written(tmp_path / FOLDER, "b", seed=1)
    bad = written(tmp_path, "bad").rename(tmp_path / f"bad{FOLDER}")  # no run is made under such a name
    (bad / "run.json").write_text(EVIL)
    return Watch(tmp_path)


@pytest.fixture
def pages(watch: Watch) -> Pages:
    return Pages(watch, refresh=7, with_similarity=False)


def live(text: str) -> None:
    """A live page: our own script and style files, no inline script or handler, every name as text."""
    found = tags(text)
    scripts = [attributes for tag, attributes in found if tag == "script"]
    assert [set(one) for one in scripts] == [{"type", "src"}]
    assert re.fullmatch(r"/static/[a-z]+\.js", str(scripts[0]["src"]))
    assert [a["href"] for tag, a in found if tag == "link"] == ["/static/dashboard.css"]
    assert not [name for _, attributes in found for name in attributes if name.startswith("on")]
    assert not {tag for tag, _ in found} & {"iframe", "object", "embed", "form", "img", "base"}
    policy = [a for _, a in found if a.get("http-equiv") == "Content-Security-Policy"]
    assert "script-src 'self';" in str(policy[0]["content"]) and "default-src 'none'" in str(policy[0]["content"])
    identifiers = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert EVIL not in text and "<b onclick" not in text


def test_live_pages(pages: Pages) -> None:
    live(pages.index())
    for text in (pages.run(f"{FOLDER}/a"), pages.run(FOLDER), pages.client(f"{FOLDER}/a", "1"), pages.run("")):
        assert text is not None
        live(text)
    assert 'data-refresh="7"' in pages.index()
    assert html.escape(FOLDER) in str(pages.run(f"{FOLDER}/a"))
    assert pages.run("nowhere") is None and pages.comparison(["nowhere", "../x"]) is None
    assert all(pages.client(f"{FOLDER}/a", client) is None for client in ("4", "-1", "x", "", "9" * 30))


def test_the_report_of_a_folder_of_runs(pages: Pages) -> None:
    for text in (pages.report(FOLDER), pages.report("", [f"{FOLDER}/a", "nowhere"])):
        assert text is not None and "<svg" in text and 'href="/"' in text and "--similarity" in text
        alone(text, links=True)
    assert pages.report("nowhere") is None and pages.report("", ["nowhere"]) is None


def test_a_run_that_cannot_be_read_and_an_empty_folder(pages: Pages, watch: Watch, tmp_path: Path) -> None:
    text = pages.report(f"bad{FOLDER}")
    assert text is not None and "Nothing to show" in text and "damaged" in text
    alone(text, links=True)
    found = {run["name"]: run for run in watch.overview()["runs"]}
    assert found[f"bad{FOLDER}"]["status"] == "damaged" and "damaged" in found[f"bad{FOLDER}"]["problem"]
    assert found[f"{FOLDER}/a"]["value"] == 0.6
    status, content = Api(watch).answer("clients", lambda name: [f"bad{FOLDER}"])
    assert status == 409 and b"damaged" in encoded(content)[0]
    (tmp_path / "empty").mkdir()
    assert Watch(tmp_path / "empty").overview()["runs"] == []
