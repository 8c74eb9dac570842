"""The pages: live pages that fetch their numbers, and the current report of one or several runs."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from consilience.dashboard.guard import PAGE_POLICY
from consilience.dashboard.watch import MOST_COMPARED, Watch
from consilience.reporting import page, style
from consilience.reporting.figure_set import compiled
from consilience.reporting.groups import grouped
from consilience.reporting.runs import find

_KEPT = 8  # cached reports; valid while their records are unchanged
_RECORDS = ("run.json", "config.toml", "metrics.jsonl", "timing.jsonl", "clients.jsonl", "federation.json")


class Pages:
    """HTML pages of the runs below a folder, by their relative paths; nothing else has a page."""

    def __init__(self, watch: Watch, *, refresh: int, with_similarity: bool | None, secret: str = "") -> None:
        self._watch, self._refresh, self._with_similarity = watch, refresh, with_similarity
        self._secret = secret
        self._drawn: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._drawing = threading.Lock()  # matplotlib is for one thread at a time

    def index(self) -> str:
        """All runs."""
        return self._live("dashboard_overview.html", "Runs", title="consilience: runs")

    def run(self, name: str) -> str | None:
        """The page of a run, or of a folder's runs compared ("" is the root); None if it does not exist."""
        known = self._watch.known()  # names are looked up among the known runs: no path is built from a request
        if name in known:
            if self._watch.one(name) is None:  # it began after the last search: the page's own requests must find it
                self._watch.looked_at()
            return self._live("dashboard_run.html", name, run=name, report=f"/report/{quote(name)}")
        inside = [key for key in known if _inside(key, name)]
        return self.comparison(inside[:MOST_COMPARED], heading=name or "All runs") if inside else None

    def comparison(self, names: Sequence[str], heading: str = "") -> str | None:
        """Some runs side by side; None if none of these names is a run."""
        known = self._watch.known()
        chosen = [name for name in dict.fromkeys(names) if name in known][:MOST_COMPARED]
        if not chosen:
            return None
        heading = heading or (f"Comparison of {len(chosen)} runs" if len(chosen) > 1 else chosen[0])
        report = f"/report/?{urlencode([('run', name) for name in chosen])}"
        return self._live("dashboard_compare.html", heading, runs_json=json.dumps(chosen), report=report)

    def client(self, name: str, client: str) -> str | None:
        """One client of a run."""
        run = self._watch.one(name)
        if run is None or not client.isdecimal() or len(client) > 9:
            return None
        number, count = int(client), run.facts.get("clients")
        last = count - 1 if type(count) is int else 10**9
        if number > last:
            return None

        def link(k: int) -> str:
            return f"/client?{urlencode({'run': name, 'client': k})}"

        beside = [("previous client", link(number - 1))] if number else []
        beside += [("next client", link(number + 1))] if number < last else []
        values = {"run": name, "client": number, "run_link": f"/runs/{quote(name)}", "beside": beside}
        return self._live("dashboard_client.html", f"Client {number}", title=f"client {number} of {name}", **values)

    def report(self, name: str, names: Sequence[str] = ()) -> str | None:
        """The report of a run, of a folder of runs, or of the named runs; None if it does not exist."""
        known = self._watch.known()
        wanted = [key for key in dict.fromkeys(names) if key in known] if names else [name] if name in known else []
        chosen = wanted or ([] if names else [key for key in known if _inside(key, name)])
        if not chosen:
            return None
        paths = [known[key] for key in chosen]
        signature = ("\n".join(chosen), *(_signature(path) for path in paths))
        with self._drawing:
            if signature not in self._drawn:
                self._drawn[signature] = self._draw(paths)
                while len(self._drawn) > _KEPT:
                    self._drawn.popitem(last=False)
            self._drawn.move_to_end(signature)
            return self._drawn[signature]

    def _live(self, template: str, heading: str, *, title: str = "", **values: Any) -> str:
        common: dict[str, Any] = {"every": self._refresh, "secret": self._secret, "policy": PAGE_POLICY}
        return page.render(template, title=title or heading, heading=heading, **common, **values)

    def _draw(self, paths: list[Path]) -> str:
        runs, problems = find(paths, tolerant=True)
        if not runs:
            return page.render(
                "dashboard_nothing.html", title="consilience", heading="Nothing to show", warnings=problems
            )
        groups = grouped(runs)
        with style.drawing():
            return page.report(
                groups,
                compiled(groups, with_similarity=self._with_similarity),
                problems,
                template="dashboard_report.html",
                hides_similarity=not (
                    self._with_similarity or (self._with_similarity is None and all(run.is_simulated for run in runs))
                ),
            )


def _signature(path: Path) -> str:
    """A value that changes whenever a record of the run does."""
    found = []
    for name in _RECORDS:
        try:
            status = (path / name).stat()
        except OSError:
            continue
        found.append(f"{name} {status.st_mtime_ns} {status.st_size}")
    return f"{path}: {'; '.join(found)}"


def _inside(name: str, folder: str) -> bool:
    return not folder or name.startswith(f"{folder}/")
