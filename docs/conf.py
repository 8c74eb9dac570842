"""How the site is built from these pages: `make site`, or `python -m sphinx -W -b html docs site`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

project = "consilience"
copyright = "the consilience authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "consilience"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
highlight_language = "none"
pygments_style = "default"
myst_heading_anchors = 3
default_role = "code"  # docstrings write `name` for code
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # ranges such as Positive are long types; defaults and texts say more
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
smartquotes = False

# What stands where in the side bar. A page that is not there yet is left out, one that is not named comes under "More".
NAVIGATION = {
    "Tutorial": [
        *("tutorial/1_first_run", "tutorial/2_own_model_and_data", "tutorial/3_heterogeneous_clients"),
        *("tutorial/4_own_recipe", "tutorial/5_transformer", "tutorial/6_to_deployment"),
    ],
    "How-to guides": [
        *(
            "experiments",
            "python",
            "data",
            "training",
            "environments",
            "asynchrony",
            "channels",
            "privacy",
            "robustness",
            "resume",
            "faults",
        ),
        *("performance", "gpu", "ray", "deploy", "security", "flower"),
        *(f"coming/{name}" for name in ("flower", "pfl_research", "pfllib", "fedlab")),
    ],
    "See it": ["compare", "tune", "diagnose", "report", "dashboard", "reproductions", "comparison"],
    "Methods": [
        "algorithms",
        *(f"methods/{name}" for name in ("simprox", "fedprox_fedsplit", "fedsiam_da", "simfedswap", "duw")),
        "methods/condensation",
    ],
    "Reference": ["api/names", "api/recipes", "api/protocols", "architecture", "numerics"],
}


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this: the side bar, the recipes' page, links out of docs/ and docstrings go through our hands."""
    app.connect("source-read", filled)
    app.connect("autodoc-process-docstring", as_restructured_text)
    return {"parallel_read_safe": True}


def filled(app: Any, name: str, source: list[str]) -> None:
    """The page as Sphinx reads it: lists made from what exists, links to files outside docs/ as plain text."""
    text = source[0]
    if name == "index":
        text = text.replace("<!-- navigation -->", navigation())
    if name == "api/recipes":
        text = text.replace("<!-- recipes -->", recipes())
    source[0] = re.sub(r"\[([^\]]+)\]\(((?:\.\./)+[\w./-]*)\)", lambda link: outside(name, link), text)


def navigation() -> str:
    """One side-bar section per group of pages that exist."""
    found = {str(page.relative_to(HERE).with_suffix("")) for page in HERE.rglob("*.md")} - {"index"}
    named = {page for pages in NAVIGATION.values() for page in pages}
    groups = {**NAVIGATION, "More": sorted(found - named)}
    parts = []
    for title, pages in groups.items():
        there = [page for page in pages if page in found]
        if there:
            parts += ["```{toctree}", f":caption: {title}", ":hidden:", *there, "```", ""]
    return "\n".join(parts)


def recipes() -> str:
    """Every recipe's docstring, found as the command line finds them."""
    from consilience import algorithms

    lines = [f".. autofunction:: consilience.algorithms.{name}.{name}" for name in algorithms.names()]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def outside(name: str, link: re.Match[str]) -> str:
    """A link to a file that is not part of the site becomes its text and its path in the repository."""
    target = (HERE / name).parent / link[2]
    if target.resolve().is_relative_to(HERE):
        return link[0]
    path = target.resolve().relative_to(HERE.parent)
    return link[1] if link[1].strip("`") == str(path) else f"{link[1]} (`{path}`)"


def as_restructured_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are plain text with `code`: escape the rest, and make lists of 'argument: what it is' lines."""
    shown: list[str] = []
    item = False
    for line in [*lines, *(fields_of(thing) if what == "class" else [])]:
        if line.startswith("    ") and not item:  # an example
            if shown and not shown[-1].startswith("    "):
                shown += ["", "::", ""] if any(shown[-1:]) else ["::", ""]
            shown.append(line)
            continue
        new_item = re.match(r"(`?\w+`?(?:, `?\w+`?)*): \S", line)
        if new_item:
            shown += [*([] if item or not shown or not shown[-1] else [""]), "* " + bold(escaped(line), new_item[1])]
            item = True
        elif not line.strip():
            shown.append("")
            item = False
        else:
            shown.append(("  " if item else "") + escaped(line.strip()))
    lines[:] = [*shown, ""]


def fields_of(kind: Any) -> list[str]:
    """'field: its comment' for the fields of a dataclass or named tuple that have a comment beside them."""
    if not (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return []
    body = inspect.getsource(kind).partition("\n    def ")[0]
    return ["", *(f"{name}: {text}" for name, text in re.findall(r"^    (\w+): .*?  # (.+)$", body, re.MULTILINE))]


def escaped(line: str) -> str:
    """Characters that reStructuredText would read as markup, outside backticks."""
    pieces = line.split("`")
    pieces[::2] = [re.sub(r"([\\*|_])", r"\\\1", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"``{piece}``" for piece in pieces[1::2]]
    return "".join(pieces)


def bold(line: str, label: str) -> str:
    """The label in front of the colon, set off."""
    return re.sub(r"^.*?: ", f"**{label.replace('`', '')}**: ", line, count=1)
