"""Interactive figures in the browser: Plotly, our scripts and the data, all inside the page.

Plotly's bundle comes with its Python package (MIT licence), compressed here, since 4.8 MB of text would leave no room
for data. Nothing is loaded: the page's content security policy allows two scripts by their hashes, and no others.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import importlib.resources
import importlib.util
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from consilience.reporting.charts import Figure

if TYPE_CHECKING:
    from markupsafe import Markup

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
"""The content security policy beside the scripts; blobs are needed to save figures as PNG."""

MISSING = 'These figures are pictures: pip install "consilience[report]" makes them answer to the mouse and keyboard.'
_GZIP = 64  # bytes of gzip's own, and the end of the stream
SCRIPTS = ("theme.js", "kinds.js", "maps.js", "table.js", "page.js", "controls.js")  # in this order, as one


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What a page needs for interactive figures."""

    policy: str
    plotly: str  # compressed, in base64
    data: str  # the same
    script: Markup
    left_out: int = 0  # figures that stay static, since the page would be too large


def is_possible() -> bool:
    """Whether Plotly is installed."""
    return _plotly_file() is not None


def bundle(figures: Sequence[Figure], *, room: int) -> Bundle | None:
    """Scripts and data for these figures within `room` bytes; None without figures or without Plotly."""
    from markupsafe import Markup

    if not figures or not is_possible():
        return None
    script = source()
    data, kept = _within(figures, room - len(script) - len(_packed_plotly()))
    if not kept:
        return None
    left_out = len(figures) - kept
    return Bundle(policy=policy(), plotly=_packed_plotly(), data=data, script=Markup(script), left_out=left_out)


@functools.cache
def policy() -> str:
    """The content security policy of a page with interactive figures."""
    return f"{POLICY}; script-src {_hash(source().encode())} {_hash(plotly())}"


def data(figures: Sequence[Figure]) -> str:
    """{name: what it shows} as JSON, the same text for the same figures."""
    found = {figure.name: {"title": figure.title, **figure.chart.data()} for figure in figures}
    return json.dumps(found, separators=(",", ":"), allow_nan=False)


@functools.cache
def source() -> str:
    """Our scripts as one, whose only global is `consilience`."""
    folder = importlib.resources.files("consilience.reporting") / "scripts"
    parts = [(folder / name).read_text(encoding="utf-8") for name in SCRIPTS]
    text = '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();\n"
    if "</script" in text.lower():
        raise ValueError("a script that ends its own element")
    return text


@functools.cache
def plotly() -> bytes:
    """The text of Plotly's bundle."""
    file = _plotly_file()
    if file is None:
        raise ImportError('figures that answer need plotly: pip install "consilience[report]"')
    return file.read_bytes()


def unpacked(text: str) -> bytes:
    """What `packed` packed."""
    return gzip.decompress(base64.b64decode(text))


def packed(content: bytes) -> str:
    """Compressed, as text without HTML markup; the same for the same content."""
    return base64.b64encode(gzip.compress(content, compresslevel=9, mtime=0)).decode()


@functools.cache
def _packed_plotly() -> str:
    return packed(plotly())


def _plotly_file() -> Path | None:
    """Found without importing the package, which takes longer than drawing a page."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        return None
    file = Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    return file if file.is_file() else None


def _within(figures: Sequence[Figure], room: int) -> tuple[str, int]:
    """The data of as many figures as there is room for, and how many that are: in the order of the page."""
    text = packed(data(figures).encode())
    if len(text) <= room:
        return text, len(figures)
    left, kept = 3 * room // 4 - _GZIP, []  # base64 writes four characters for three bytes
    packer = zlib.compressobj(9)
    for figure in figures:
        before = packer.copy()
        size = len(packer.compress(data([figure]).encode()) + packer.flush(zlib.Z_SYNC_FLUSH))
        if size > left:  # too large, but smaller ones may follow
            packer = before
            continue
        left -= size
        kept.append(figure)
    return packed(data(kept).encode()), len(kept)


def _hash(script: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
