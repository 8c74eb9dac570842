"""Make the notebooks of the tutorial from its pages, and execute them: python docs/make_notebooks.py [PAGE ...]

The pages are the source. Prose becomes text cells, Python that is run becomes code cells, and the output that a page
shows is replaced by the real one. A block that the page marks `<!-- not run: ...; the notebook runs it -->` is run
here alone, shell commands by `%%bash`. Notebooks are executed in an empty folder with links to recipes and examples.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("[2-9]_*.md"))
SECONDS = 600  # for one cell

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```\n", re.MULTILINE | re.DOTALL
)


class Cell(NamedTuple):
    """A cell of a notebook before it is run."""

    kind: str  # "markdown" or "code"
    source: str


def cells(page: str, name: str) -> list[Cell]:
    """The cells of a page, in order."""
    found, prose, at, ran = [], "", 0, -1
    for block in _BLOCK.finditer(page):
        prose += page[at : block.start()]
        at = block.end()
        kind, text, mark = block["kind"], block["text"], block["mark"] or ""
        here_only = mark.endswith("the notebook runs it")
        if kind == "text" and block.start() == ran:
            ran = -1
            continue  # what the cell above prints
        if kind == "python" and (here_only or not mark.startswith("not run")):
            source = text
        elif kind == "bash" and here_only:
            source = f"%%bash -e\n{text}"
        else:
            prose += f"```{kind}\n{text}```\n"
            continue
        found += [Cell("markdown", prose.strip()), Cell("code", source.strip())]
        prose, ran = "", block.end()
    found.append(Cell("markdown", (prose + page[at:]).strip()))
    made = f"*Made from [{name}]({name}) by `docs/make_notebooks.py`, and executed.*"
    first = found[0].source.split("\n", 1)
    found[0] = Cell("markdown", "\n\n".join([first[0], made, *(part.strip() for part in first[1:])]))
    return [cell for cell in found if cell.source]


def notebook(page: Path) -> dict[str, Any]:
    """The notebook of a page, not yet executed."""
    made = []
    for number, cell in enumerate(cells(page.read_text(encoding="utf-8"), page.name)):
        entry: dict[str, Any] = {
            "cell_type": cell.kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": cell.source.splitlines(keepends=True),
        }
        made.append({**entry, "execution_count": None, "outputs": []} if cell.kind == "code" else entry)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def executed(plain: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells; an exception in one is raised."""
    import nbformat
    from nbclient import NotebookClient

    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    os.environ["PYTHONPATH"] = str(ROOT)
    found = nbformat.reads(json.dumps(plain), as_version=4)
    with tempfile.TemporaryDirectory() as place:
        for name in ("recipes", "examples"):
            (Path(place) / name).symlink_to(ROOT / name)
        client = NotebookClient(
            found, timeout=SECONDS, resources={"metadata": {"path": place}}, record_timing=False, coalesce_streams=True
        )
        client.execute()
    text = re.sub(re.escape(place) + r"/?", "", nbformat.writes(found))
    text = re.sub(r"\\u001b\[[0-9;]*m", "", text)  # colours of a terminal
    return json.loads(text)


def main(pages: list[Path]) -> int:
    """Write the notebook of each page beside it."""
    for page in pages:
        target = page.with_suffix(".ipynb")
        made = executed(notebook(page))
        target.write_text(json.dumps(made, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
        print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main([Path(name).resolve() for name in sys.argv[1:]] or PAGES))
