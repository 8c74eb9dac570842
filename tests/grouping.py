"""Which tests a worker of pytest-xdist runs together, because they share fixtures or cached runs."""

from __future__ import annotations

from consilience import algorithms

RECIPES = frozenset(algorithms.names())


def group_of(nodeid: str) -> str:
    """A test's file; contract tests go recipe by recipe, documents page by page."""
    file, _, rest = nodeid.partition("::")
    given = rest.partition("[")[2].removesuffix("]")
    if "/contract/" in file:
        return f"{file} {next((part for part in given.split('-') if part in RECIPES), '')}"
    if file.startswith("tests/test_docs"):
        return f"{file} {given.partition(':')[0] if '.md' in given else ''}"
    return file
