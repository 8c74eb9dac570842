"""What every page must be: whole by itself, without anything that runs but our own script, with all names as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

from consilience.reporting import interactive

EVIL = "<script>alert(1)</script>"
EVIL_IN_A_DRAWING = "--></svg><img src=x onerror=alert(2)>"

Attributes = dict[str, str | None]


class Tags(HTMLParser):
    """Every tag with its attributes; whether they are closed in order."""

    EMPTY = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Attributes]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags(text: str) -> list[tuple[str, Attributes]]:
    """The tags of a page, which must all be closed."""
    parser = Tags()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser.found


def figure_data(text: str) -> dict[str, Any]:
    """What the page's figures show, by name."""
    packed = re.search(r'<script type="text/plain" id="figure-data">([^<]*)</script>', text)
    return {} if packed is None else json.loads(interactive.unpacked(packed[1]))


def without_scripts(text: str) -> str:
    """The page without the scripts and data that make its figures answer, which must be exactly ours."""
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert scripts in ([], [interactive.source()])
    return re.sub(r'<script(?: type="text/plain" id="[a-z-]+")?>.*?</script>', "", text, flags=re.DOTALL)


def alone(text: str, *, links: bool = False) -> None:
    """The page loads nothing and runs nothing but our script; `links` to pages of the same server on request."""
    answers = "<script>" in text
    text = without_scripts(text)
    found = tags(text)
    assert not {tag for tag, _ in found} & {"link", "iframe", "object", "embed", "form", "img", "base"}
    assert all(
        attributes == {"type": "application/json", "id": "diagnosis"} for tag, attributes in found if tag == "script"
    )
    assert not [name for _, attributes in found for name in attributes if name.startswith("on")]
    for tag, attributes in found:
        for name in ("href", "src", "xlink:href"):
            target = attributes.get(name)
            inside = ("#", "data:image/png;base64,", *(("/",) if links and tag == "a" else ()))
            assert target is None or (target.startswith(inside) and not target.startswith("//")), (tag, target)
    assert not re.search(r"url\((?!#)|@import", text)
    policy = [a for tag, a in found if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policy) == 1 and "default-src 'none'" in str(policy[0]["content"])
    allowed = re.findall(r"script-src ([^;]*)", str(policy[0]["content"]))
    known = [interactive.source().encode(), *([interactive.plotly()] if answers else [])]
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'" for script in known]
    assert allowed == ([" ".join(hashes)] if answers else [])
    identifiers = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert EVIL not in text and "<img" not in text and "onerror=alert(2)>" not in text
