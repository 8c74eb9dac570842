"""The site builds without a warning, holds every page, and asks nobody else for anything."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from documents import DOCS, ROOT

import consilience as cs
from consilience import algorithms

LOADED = {"script": "src", "link": "href", **dict.fromkeys(("img", "iframe", "source", "video", "audio"), "src")}
ELSEWHERE = re.compile(r"(?:[a-z]+:)?//", re.I)


class References(HTMLParser):
    """What a browser fetches to show a page, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get(LOADED.get(tag, "")):
            self.loaded.append(str(found[LOADED[tag]]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The built site; -W makes a broken link or a malformed docstring an error."""
    if any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")):
        pytest.skip("the site's tools are not installed: pip install 'consilience[docs]', or make site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(folder)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr
    yield folder


def references(page: Path) -> References:
    found = References()
    found.feed(page.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_every_page_is_there_and_can_be_reached(site: Path) -> None:
    pages = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")}
    linked = {link.partition("#")[0] for link in references(site / "index.html").links}
    assert not pages - {"index.html"} - linked, "not in the side bar"
    assert all((site / page).exists() for page in pages)


@pytest.mark.slow
def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """No script, style, font or picture of another host: the site works from a disk."""
    for page in site.rglob("*.html"):
        away = [target for target in references(page).loaded if ELSEWHERE.match(target)]
        assert not away, f"{page.name} loads {away}"
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        away = re.findall(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')]*)""", text)
        assert not away, f"{style.name} loads {away}"
    for page in (page for page in site.rglob("*.html") if page.name not in ("genindex.html", "search.html")):
        for link in references(page).links:
            path = link.partition("#")[0]
            if path and not re.match(r"[a-z]+:", path):
                assert (page.parent / path).exists(), f"{page.name} links to {path}"


@pytest.mark.slow
def test_search_needs_no_server(site: Path) -> None:
    """The index is a script, which a page opened from a disk may load."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert index.startswith("Search.setIndex(") and "simprox" in index and "checkpoint" in index


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    names = (site / "api" / "names.html").read_text(encoding="utf-8")
    recipes = (site / "api" / "recipes.html").read_text(encoding="utf-8")
    missing = [
        name for name in cs.__all__ if f'id="consilience.{name}"' not in names and name not in algorithms.names()
    ]
    assert not missing, missing
    missing = [name for name in algorithms.names() if f'id="consilience.algorithms.{name}.{name}"' not in recipes]
    assert not missing, missing


def test_public_names_say_what_they_are() -> None:
    """Every public name has a docstring of more than a name, and every argument of `train` is explained."""
    for name in cs.__all__:
        assert len((getattr(cs, name).__doc__ or "").split()) >= 5, name
    for name in ("rounds", "seed", "loss", "environment", "evaluate_every", "evaluate_local", "progress", "engine"):
        assert re.search(rf"^\s*{name}: ", cs.train.__doc__ or "", re.M), name
