"""Maps Flower's random node ids to client numbers (slots), which server rules count from 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from consilience.core.refusal import Refusal, plain


class ClientSlots:
    """The client number (slot) of every node, fixed by its first accepted reply: the one it reports, or the next free.

    count: how many there are; None: no limit (for rules to which a client's number is only a label).
    """

    def __init__(self, count: int | None, *, key: str, must_say: bool) -> None:
        self.count, self.key, self.must_say = count, key, must_say
        self._taken: dict[int, int] = {}  # node -> slot
        self._present: frozenset[int] = frozenset()
        self._said: set[int] = set()  # nodes that reported their number in the last round

    def arrange(self, nodes: Iterable[int]) -> dict[int, int]:
        """node -> slot of those connected now; a node that has never answered gets a free one for this round."""
        self._present = frozenset(nodes)
        assigned = {node: self._taken[node] for node in sorted(self._present) if node in self._taken}
        free = iter(self._free(len(self._present)))
        for node in sorted(self._present - set(assigned)):
            slot = next(free, None)
            if slot is not None:
                assigned[node] = slot
        return assigned

    def assign(
        self, claims: Iterable[tuple[int, Any]], sent: dict[int, int]
    ) -> tuple[dict[int, int], dict[int, Refusal]]:
        """(node -> slot, node -> refusal) of nodes that answered; `claims`: (node, reported number or None)."""
        said = dict(claims)
        wanted = Counter(slot for slot in said.values() if type(slot) is int)
        slots: dict[int, int] = {}
        refusals: dict[int, Refusal] = {}
        # nodes that report a number come first; the others keep the one they were sent, unless it is taken
        for node, slot in sorted(said.items(), key=lambda claim: (claim[1] is None, claim[0])):
            problem = self._problem(node, slot, wanted)
            own = slot if slot is not None else self._beside(sent[node], set(slots.values()))
            if not problem and own is None:
                problem = f"another node is client {sent[node]}: let every client report {self.key!r}, or none"
            if problem or own is None:
                refusals[node] = Refusal(client=f"node {node}", reason="identity", detail=problem)
            else:
                slots[node] = int(own)
        self._said = {node for node in slots if said[node] is not None}
        return slots, refusals

    def keep(self, slots: dict[int, int]) -> None:
        """Fix these slots of these nodes from now on; disconnected nodes that had them lose them.

        Where a number is only a label, nodes that never reported theirs are numbered anew in every round.
        """
        kept = {node: slot for node, slot in slots.items() if self.count is not None or node in self._said}
        taken = set(kept.values())
        self._taken = {node: slot for node, slot in self._taken.items() if slot not in taken} | kept

    def named(self, refusal: Refusal, nodes: dict[int, int]) -> Refusal:
        """The refusal with its node, and with its number only if it reported one; `nodes` is slot -> node."""
        if not isinstance(refusal.client, int):
            return refusal
        node = nodes[refusal.client]
        return replace(refusal, client=f"{refusal.client} (node {node})" if node in self._said else f"node {node}")

    def _beside(self, slot: int, taken: set[int]) -> int | None:
        """The slot, or, if it is taken and a number is only a label, the next one behind all others."""
        if slot not in taken:
            return slot
        return max(taken) + 1 if self.count is None else None

    def _free(self, count: int) -> list[int]:
        """Slots that no node has had, then those of nodes that have gone: a restarted node may be one of these."""
        taken = set(self._taken.values())
        most = len(taken) + count if self.count is None else self.count
        left = [slot for node, slot in sorted(self._taken.items()) if node not in self._present]
        return [*(slot for slot in range(most) if slot not in taken), *left]

    def _problem(self, node: int, slot: Any, wanted: Counter[int]) -> str:
        if slot is None:
            return f"its metrics must say {self.key!r}, its number among the clients" if self.must_say else ""
        if type(slot) is not int or slot < 0 or (self.count is not None and slot >= self.count):
            limit = "a whole number >= 0" if self.count is None else f"one of 0..{self.count - 1}"
            return f"{self.key} = {plain(repr(slot), most=64)} is not {limit}"
        if wanted[slot] > 1:
            return f"{wanted[slot]} nodes say they are client {slot}"
        if self._taken.get(node, slot) != slot:
            return f"it was client {self._taken[node]} before, and now says it is {slot}"
        holder = next((one for one, its in self._taken.items() if its == slot and one != node), None)
        if holder is not None and holder in self._present:
            return f"client {slot} is node {holder}, which is still connected"
        return ""
