"""JSON answers for the pages' scripts: bounded in size, and not sent again while nothing has changed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from consilience.core.settings import Invalid
from consilience.dashboard.clients import ClientHistory, ClientTotals
from consilience.dashboard.details import details, log_tail
from consilience.dashboard.growing_log import Budget
from consilience.dashboard.watch import Watch
from consilience.dashboard.watched_run import WatchedRun
from consilience.runs import control
from consilience.runs.failures import explained
from consilience.runs.names import plain

_KEPT = 12  # runs and clients whose partly read histories are cached
_POINTS = 400
_BYTES = 1 << 23  # for a request that reads the clients' lists
Kept = TypeVar("Kept", ClientTotals, ClientHistory)
Answer = tuple[int, Any]  # status, content


class Api:
    """One method for each address; `query` gives the values of a query parameter."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._totals: OrderedDict[str, ClientTotals] = OrderedDict()
        self._histories: OrderedDict[str, ClientHistory] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, what: str, query: Callable[[str], list[str]]) -> Answer:
        """The answer to GET /api/`what`."""
        if what == "runs":
            since = query("since")
            return 200, self.watch.overview(
                int(since[0]) if since and since[0].isdecimal() and len(since[0]) < 16 else 0
            )
        if what == "curves":
            return 200, self.watch.curves(query("run"), _POINTS)
        run = self.watch.one(query("run")[0]) if query("run") else None
        if run is None:
            return 404, {"error": "no such run"}
        try:
            return self._about(run, what, query)
        except Exception as problem:  # a damaged record is reported, and affects no other answer
            return 409, {"error": plain(explained(problem)[0], most=400)}

    def _about(self, run: WatchedRun, what: str, query: Callable[[str], list[str]]) -> Answer:
        if what == "run":
            return 200, details(run, controlled=self.watch.controlled)
        if what == "clients":
            with self._lock:
                totals = _kept(self._totals, f"{run.path}", lambda: ClientTotals(run))
                totals.read(Budget(_BYTES))
                return 200, totals.table()
        if what == "client":
            number = (query("client") or [""])[0]
            if not number.isdecimal() or len(number) > 9:
                return 404, {"error": "no such client"}
            with self._lock:
                place = f"{run.path}\0{int(number)}"
                history = _kept(self._histories, place, lambda: ClientHistory(run, int(number)))
                history.read(Budget(_BYTES))
                return 200, history.facts()
        if what == "log":
            return 200, {"lines": log_tail(run, (query("file") or [""])[0])}
        return 404, {"error": "nothing is here"}

    def act(self, what: str, body: bytes) -> Answer:
        """The answer to POST /control/`what`; the guard has checked who asks."""
        try:
            name = json.loads(body)["run"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return 400, {"error": 'send {"run": NAME}'}
        run = self.watch.one(name) if isinstance(name, str) else None
        if run is None or what not in ("stop", "resume"):
            return 404, {"error": "no such run"}
        try:
            process = control.stop(run.path) if what == "stop" else control.resume(run.path)
        except Exception as problem:
            return (409 if isinstance(problem, Invalid) else 500), {"error": plain(explained(problem)[0], most=400)}
        self.watch.looked_at()
        return 202, {"run": name, "asked": what, "process": process}


def encoded(content: Any) -> tuple[bytes, str]:
    """(JSON, its entity tag)."""
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return data, f'"{hashlib.sha256(data).hexdigest()[:24]}"'


def _kept(kept: OrderedDict[str, Kept], place: str, make: Callable[[], Kept]) -> Kept:
    found = kept.pop(place, None) or make()
    kept[place] = found
    while len(kept) > _KEPT:
        kept.popitem(last=False)
    return found
