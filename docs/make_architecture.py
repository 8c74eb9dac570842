"""Writes the tables of packages and of core in architecture.md, and the count of algorithms, from the code.

`python docs/make_architecture.py` writes them; `tests/test_architecture_table.py` fails where they are out of date.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1] / "consilience"
PAGE = Path(__file__).with_name("architecture.md")
COUNTING = (Path(__file__).parents[1] / "README.md", Path(__file__).parent / "index.md")
BEGIN, END = "<!-- packages: written by docs/make_architecture.py -->", "<!-- end of packages -->"
CORE_BEGIN, CORE_END = "<!-- core: written by docs/make_architecture.py -->", "<!-- end of core -->"
CORE = {
    "the contract": (
        *("tree", "exchange", "protocols", "capabilities", "algorithm", "federation", "class_names", "plans", "rng"),
        *("settings", "renamed", "rate_schedules"),
    ),
    "the loop": ("rounds", "arrivals", "pending", "conclusion", "prefetch", "progress", "notebook"),
    "rows of clients as they are given and read, and numbers of clients in versions": (
        *("given_rows", "given_clients", "stored_rows", "versions", "client_flags"),
    ),
    "what a task promises, and how it is tested": ("task", "kind", "metrics", "evaluate"),
    "replies: refused, bounded, left where they are": ("screening", "clipping", "lengths", "refusal", "remote"),
}
SPLIT = ("engines", "flower", "server")  # shown with the packages inside them


def table() -> str:
    """One row for every package and top-level module."""
    rows = ["| Package | Holds | Files | Lines | Imports |", "|---|---|---|---|---|"]
    for place in places():
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        if place.is_dir() and place.name in SPLIT and place.parent == ROOT:
            files = sorted(place.glob("*.py"))
        lines = sum(map(lines_of, files))
        name = place.relative_to(ROOT).as_posix()
        rows.append(f"| `{name}` | {purpose(place)} | {len(files)} | {lines:,} | {imports(place, files)} |")
    everything = sorted(ROOT.rglob("*.py"))
    return "\n".join([*rows, f"| all | | {len(everything)} | {sum(map(lines_of, everything)):,} | |"])


def core_table() -> str:
    """The files of core by their subjects."""
    files = {file.stem: lines_of(file) for file in sorted((ROOT / "core").glob("*.py")) if file.stem != "__init__"}
    rest = sorted(set(files) - {name for names in CORE.values() for name in names})
    assert not rest, f"docs/make_architecture.py: which subject of core do these belong to? {', '.join(rest)}"
    rows = ["| In `core` | Files | Lines |", "|---|---|---|"]
    for subject, names in CORE.items():
        shown = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {subject}: {shown} | {len(names)} | {sum(files[name] for name in names):,} |")
    return "\n".join(rows)


def lines_of(file: Path) -> int:
    """How long a file is."""
    return len(file.read_text(encoding="utf-8").splitlines())


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
    """The page with the present tables."""
    for begin, end, text in ((BEGIN, END, table()), (CORE_BEGIN, CORE_END, core_table())):
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def counted(page: str) -> str:
    """The page with the present number of algorithms."""
    recipes = [file for file in (ROOT / "algorithms").glob("*.py") if not file.stem.startswith("_")]
    return re.sub(r"\b\d+ algorithms\b", f"{len(recipes)} algorithms", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for page in COUNTING:
        page.write_text(counted(page.read_text(encoding="utf-8")), encoding="utf-8")
