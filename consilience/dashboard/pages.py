"""The pages: a list of the runs, and the report of one run or of a folder of runs as it stands now."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from consilience.reporting import page, style, tables
from consilience.reporting.figure_set import compiled
from consilience.reporting.groups import grouped
from consilience.reporting.runs import RunData, find, folders, read
from consilience.runs.folder import RecordError
from consilience.runs.names import plain

_KEPT = 16  # pages that need not be drawn again while their records stay as they are
_RECORDS = ("run.json", "config.toml", "metrics.jsonl", "timing.jsonl", "clients.jsonl", "federation.json")


class Pages:
    """HTML by the runs' places below a folder; nothing outside it, and nothing that is not a run, has a page."""

    def __init__(self, root: Path, *, refresh: int, with_similarity: bool) -> None:
        self._root, self._refresh, self._with_similarity = Path(root), refresh, with_similarity
        self._drawn: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._drawing = threading.Lock()  # matplotlib is for one thread at a time

    def index(self) -> str:
        """The runs, and the folders that hold several."""
        known = self._known()
        runs, problems = _readable(known)
        table, links, together = None, [_link(name) for name in runs], []
        if len(runs) > 1:
            together = [("all", "/runs/"), *((name, _link(name)) for name in _shelves(known) if name)]
        if runs:
            found = tables.each_run(list(runs.values()))
            table = replace(found, lines=tuple((name, *line[1:]) for name, line in zip(runs, found.lines)))
        return page.render(
            "dashboard_runs.html",
            title="consilience: runs",
            heading="Runs",
            refresh=self._refresh,
            cards=_facts(list(runs.values())),
            warnings=problems,
            together=together,
            runs=table,
            links=links,
        )

    def run(self, name: str) -> str | None:
        """The page of a run, or of all runs in a folder ("" is the whole); None if there is no such thing."""
        known = self._known()  # names are looked up among what is there: no path is made of what a visitor sends
        chosen = {known[name]: None} if name in known else {p: None for key, p in known.items() if _inside(key, name)}
        if not chosen:
            return None
        paths = list(chosen)
        signature = (name, *(_signature(path) for path in paths))
        with self._drawing:
            if signature not in self._drawn:
                self._drawn[signature] = self._draw(paths)
                while len(self._drawn) > _KEPT:
                    self._drawn.popitem(last=False)
            self._drawn.move_to_end(signature)
            return self._drawn[signature]

    def _draw(self, paths: list[Path]) -> str:
        runs, problems = find(paths, tolerant=True)
        if not runs:
            values = {"heading": "Nothing to show", "refresh": self._refresh, "warnings": problems}
            return page.render("dashboard_nothing.html", title="consilience", **values)
        groups = grouped(runs)
        going = any(run.status.startswith(("running", "created")) for run in runs)
        with style.drawing():
            return page.report(
                groups,
                compiled(groups, with_similarity=self._with_similarity),
                problems,
                template="dashboard_report.html",
                refresh=self._refresh if going else 0,
                hides_similarity=not self._with_similarity,
            )

    def _known(self) -> dict[str, Path]:
        """Every run below the root, by its place there."""
        if not self._root.is_dir():
            return {}
        return {path.relative_to(self._root).as_posix(): path for path in folders(self._root) if path != self._root}


def _readable(known: dict[str, Path]) -> tuple[dict[str, RunData], list[str]]:
    runs: dict[str, RunData] = {}
    problems = []
    for name, path in known.items():
        try:
            runs[name] = read(path)
        except (RecordError, OSError, ValueError) as problem:
            problems.append(plain(f"{name}: {problem}", most=400))
    return runs, problems


def _signature(path: Path) -> str:
    """Changes whenever a record of the run does."""
    found = []
    for name in _RECORDS:
        try:
            status = (path / name).stat()
        except OSError:
            continue
        found.append(f"{name} {status.st_mtime_ns} {status.st_size}")
    return f"{path}: {'; '.join(found)}"


def _shelves(known: dict[str, Path]) -> list[str]:
    """Folders that hold more than one run."""
    parents = [name.rpartition("/")[0] for name in known]
    return sorted({parent for parent in parents if parents.count(parent) > 1})


def _inside(name: str, folder: str) -> bool:
    return not folder or name.startswith(f"{folder}/")


def _link(name: str) -> str:
    return f"/runs/{quote(name)}"


def _facts(runs: list[RunData]) -> list[page.Fact]:
    if not runs:
        return []
    going = sum(run.status.startswith("running") for run in runs)
    ended = sum(run.status == "finished" for run in runs)
    return [
        page.Fact("runs", str(len(runs))),
        page.Fact("running", str(going)),
        page.Fact("finished", str(ended), "the others were stopped, failed or have only begun"),
    ]
