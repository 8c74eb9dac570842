"""The screenshots of the documentation: small, shown by a page, and described for readers who do not see them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from documents import DOCS

spec = importlib.util.spec_from_file_location("make_screenshots", DOCS / "make_screenshots.py")
assert spec is not None and spec.loader is not None
maker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(maker)

NAMES = re.findall(r'keep\(page, "(\w+)"', Path(maker.__file__ or "").read_text(encoding="utf-8"))


def test_there_are_pictures_of_four_pages() -> None:
    assert NAMES == ["report", "client_map", "comparison", "dashboard"]


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_small_and_on_a_page(name: str) -> None:
    file = maker.TARGET / f"{name}.png"
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size < maker.MOST_BYTES
    pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))]
    (described,) = re.findall(rf"!\[([^\]]*)\]\(_static/{name}\.png\)", "\n".join(pages))
    assert len(described.split()) > 6
