"""Which node is which client: Flower's node ids are random, server rules count clients from 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from consilience.core.refusal import Refusal, plain


class Seats:
    """A place for every node, for good once its first reply was let in: what the client says it is, or the next free.

    `places` is how many there are; None: as many as come (for rules to which a client's number is only a label).
    """

    def __init__(self, places: int | None, *, key: str, must_say: bool) -> None:
        self.places, self.key, self.must_say = places, key, must_say
        self._taken: dict[int, int] = {}  # node -> place
        self._present: frozenset[int] = frozenset()
        self._said: set[int] = set()  # nodes that said their number in the last round

    def arrange(self, nodes: Iterable[int]) -> dict[int, int]:
        """node -> place of those connected now; a node that has never answered gets a free one for the time being."""
        self._present = frozenset(nodes)
        seated = {node: self._taken[node] for node in sorted(self._present) if node in self._taken}
        free = iter(self._free(len(self._present)))
        for node in sorted(self._present - set(seated)):
            place = next(free, None)
            if place is not None:
                seated[node] = place
        return seated

    def settle(
        self, claims: Iterable[tuple[int, Any]], sent: dict[int, int]
    ) -> tuple[dict[int, int], dict[int, Refusal]]:
        """(node -> place, node -> why not) of nodes that answered; `claims` are (node, what it says it is or None)."""
        said = dict(claims)
        wanted = Counter(place for place in said.values() if type(place) is int)
        places: dict[int, int] = {}
        refusals: dict[int, Refusal] = {}
        # those who say who they are come first; the others keep what they were sent, unless somebody else is that
        for node, place in sorted(said.items(), key=lambda claim: (claim[1] is None, claim[0])):
            problem = self._problem(node, place, wanted)
            seat = place if place is not None else self._beside(sent[node], set(places.values()))
            if not problem and seat is None:
                problem = f"another node is client {sent[node]}: let every client report {self.key!r}, or none"
            if problem or seat is None:
                refusals[node] = Refusal(client=f"node {node}", reason="identity", detail=problem)
            else:
                places[node] = int(seat)
        self._said = {node for node in places if said[node] is not None}
        return places, refusals

    def keep(self, places: dict[int, int]) -> None:
        """These nodes have these places from now on; who sat there before and has gone makes room.

        Where a number is only a label, those who never said theirs are numbered anew in every round.
        """
        kept = {node: place for node, place in places.items() if self.places is not None or node in self._said}
        taken = set(kept.values())
        self._taken = {node: place for node, place in self._taken.items() if place not in taken} | kept

    def named(self, refusal: Refusal, nodes: dict[int, int]) -> Refusal:
        """The refusal with its node, and with its number only if it said one; `nodes` is place -> node."""
        if not isinstance(refusal.client, int):
            return refusal
        node = nodes[refusal.client]
        return replace(refusal, client=f"{refusal.client} (node {node})" if node in self._said else f"node {node}")

    def _beside(self, place: int, taken: set[int]) -> int | None:
        """The place, or, if it is taken and a number is only a label, the next one behind all others."""
        if place not in taken:
            return place
        return max(taken) + 1 if self.places is None else None

    def _free(self, count: int) -> list[int]:
        """Places that nobody has had, then those of nodes that have gone: a restarted node may be one of these."""
        taken = set(self._taken.values())
        most = len(taken) + count if self.places is None else self.places
        left = [place for node, place in sorted(self._taken.items()) if node not in self._present]
        return [*(place for place in range(most) if place not in taken), *left]

    def _problem(self, node: int, place: Any, wanted: Counter[int]) -> str:
        if place is None:
            return f"its metrics must say {self.key!r}, its number among the clients" if self.must_say else ""
        if type(place) is not int or place < 0 or (self.places is not None and place >= self.places):
            limit = "a whole number >= 0" if self.places is None else f"one of 0..{self.places - 1}"
            return f"{self.key} = {plain(repr(place), most=64)} is not {limit}"
        if wanted[place] > 1:
            return f"{wanted[place]} nodes say they are client {place}"
        if self._taken.get(node, place) != place:
            return f"it was client {self._taken[node]} before, and now says it is {place}"
        holder = next((one for one, its in self._taken.items() if its == place and one != node), None)
        if holder is not None and holder in self._present:
            return f"client {place} is node {holder}, which is still connected"
        return ""
