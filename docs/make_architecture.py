"""Writes the table of packages in architecture.md: what each holds and imports, and how large it is, read off the code.

`python docs/make_architecture.py` writes it; `tests/test_architecture_table.py` fails where it is out of date.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "consilience"
PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- packages: written by docs/make_architecture.py -->", "<!-- end of packages -->"
SPLIT = ("engines", "flower", "server")  # shown with the packages inside them


def table() -> str:
    """One row for every package and top-level module."""
    rows = ["| Package | Holds | Files | Lines | Imports |", "|---|---|---|---|---|"]
    for place in places():
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        if place.is_dir() and place.name in SPLIT and place.parent == ROOT:
            files = sorted(place.glob("*.py"))
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        name = place.relative_to(ROOT).as_posix()
        rows.append(f"| `{name}` | {purpose(place)} | {len(files)} | {lines:,} | {imports(place, files)} |")
    everything = sorted(ROOT.rglob("*.py"))
    total = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in everything)
    return "\n".join([*rows, f"| all | | {len(everything)} | {total:,} | |"])


def places() -> list[Path]:
    """The packages, in the order of their names, and the top-level modules last."""
    found: list[Path] = []
    for package in sorted(file.parent for file in ROOT.glob("*/__init__.py")):
        found.append(package)
        if package.name in SPLIT:
            found += sorted(file.parent for file in package.glob("*/__init__.py"))
    return [*found, *sorted(file for file in ROOT.glob("*.py") if not file.name.startswith("_"))]


def purpose(place: Path) -> str:
    """The first sentence of the docstring."""
    file = place / "__init__.py" if place.is_dir() else place
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).removesuffix(".").replace("|", "\\|")


def imports(place: Path, files: list[Path]) -> str:
    """The other top-level packages that the files import."""
    own, found = place.relative_to(ROOT).parts[0].removesuffix(".py"), set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module == "consilience":
                names = [f"consilience.{alias.name}" for alias in node.names]
            found |= {name.split(".")[1] for name in names if name.startswith("consilience.")}
    return ", ".join(f"`{name}`" for name in sorted(found - {own})) or "nothing of ours"


def written(page: str) -> str:
    """The page with the present table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
