"""Which lane is fastest on a GPU, with how many clients at once, and whether compiling it pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from consilience.engines.vectorised.lane_choice import LaneChoice, LaneName

WIDER = 1.05  # a group of twice as many clients must be faster by this factor to be chosen
GROUP = 64  # clients: trials of batching start with groups of 1 to 2 times this size
COMPILE_SECONDS = 120  # a run that would take longer than this uncompiled is worth a compilation


class Trials:
    """Measures one lane after another; memory of all but the best so far is freed at once.

    rate: rows per second, 0 for what cannot run. keep_only: free the graphs of all others. seconds: of the rounds
    ahead at a rate, 0 where their number is not known.
    """

    def __init__(
        self,
        asked: LaneChoice,
        rate: Callable[[LaneChoice], float],
        keep_only: Callable[[LaneChoice], None],
        seconds: Callable[[float], float],
    ) -> None:
        self._asked, self._rate, self._keep_only, self._seconds = asked, rate, keep_only, seconds
        self._tried: dict[LaneChoice, float] = {}

    def best(self, clients: int, *, products: bool, grows: bool) -> LaneChoice:
        """For so many clients; `products`: convolutions may become matrix products, `grows`: groups may be smaller."""
        names = self._candidates(clients, products)
        fits = self._asked.clients_at_once  # or later cohorts may be larger than this one
        smaller = group_sizes(min(fits or clients, clients))[:-1] if grows else []
        for name in names:
            widths = [*smaller, fits] if name.startswith("batched") else [fits]
            ways = [replace(self._asked, lane=name, clients_at_once=width, compile=False) for width in widths]
            if len(names) == len(ways) == 1:
                self._tried[ways[0]] = 0.0  # nothing to compare
            else:
                self._widen(ways)
        if not any(self._tried.values()) and len(names) > 1:
            self._try(replace(self._asked, lane="serial", clients_at_once=fits, compile=False))
        if self._asked.compile is None:
            self._try_compiling()
            return self._fastest
        found = replace(self._fastest, compile=self._asked.compile)
        self._keep_only(found)
        return found

    @property
    def _fastest(self) -> LaneChoice:
        return max(self._tried, key=lambda one: self._tried[one])

    def _candidates(self, clients: int, products: bool) -> list[LaneName]:
        if self._asked.lane != "auto":
            return [self._asked.lane]
        if clients == 1:
            return ["streams"]
        # serial is the same work as streams, launched kernel by kernel
        return ["batched", "streams", "batched-matmul"] if products else ["batched", "streams"]

    def _try(self, choice: LaneChoice) -> float:
        self._tried[choice] = self._rate(choice)
        self._keep_only(self._fastest)
        return self._tried[choice]

    def _widen(self, ways: list[LaneChoice]) -> None:
        """Larger and larger groups, until they are hardly faster: they only take more memory then."""
        before = 0.0
        for way in ways:
            rate = self._try(way)
            if not rate or rate < WIDER * before:
                if 0 < before < rate:
                    del self._tried[way]  # hardly faster
                    self._keep_only(self._fastest)
                return
            before = rate

    def _try_compiling(self) -> None:
        """The best way of each lane, compiled, the fastest first: their order may change by it."""
        best: dict[str, LaneChoice] = {}
        for way, rate in self._tried.items():
            if rate >= self._tried.get(best.get(way.lane, way), 0.0):
                best[way.lane] = way
        for candidate in sorted(best.values(), key=lambda one: -self._tried[one]):
            if not self._seconds(1.0):
                return
            if len(self._tried) == 1:  # it was not measured
                self._try(candidate)
            if self._tried[candidate] and self._seconds(self._tried[self._fastest]) >= COMPILE_SECONDS:
                self._try(replace(candidate, compile=True))


def group_sizes(most: int) -> list[int]:
    """Sizes of groups to try, the smallest first: `most`, and its halves down to less than 128."""
    found = [most]
    while found[0] >= 2 * GROUP:
        found.insert(0, -(-found[0] // 2))
    return found
