"""Several runs' clients in one group: what engines of the same task are asked for at the same time is done at once.

Every run keeps its own engine, data, memories, seeds and server; only the steps of the clients' local work are shared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import plans, rng, tree
from consilience.core.exchange import Broadcast
from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.protocols import Channel, ClientRule
from consilience.core.tree import Tree
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.orders import Orders
from consilience.engines.vectorised.program import Context


class Request(NamedTuple):
    """What one run asks of its clients."""

    seat: int  # which engine
    client: ClientRule
    channel: Channel
    broadcast: Broadcast
    orders: Orders
    round: int
    seed: int

    def alike(self, memory: Tree) -> Hashable:
        """Requests for which this is equal can be done together."""
        whole = {"shared": self.broadcast.shared, "memory": memory}
        layout = [(path, tuple(leaf.shape), leaf.dtype) for path, leaf in tree.flatten(whole).items()]
        personal = tree.flatten(self.broadcast.personal)
        own = [(path, tuple(leaf.shape[1:]), leaf.dtype) for path, leaf in personal.items()]
        return self.client, self.channel, tuple(layout), tuple(own)


class Joint:
    """Engines side by side on one device.

    same: which hold the same rows, so that these are stored once. kinds: which run the same module in the same way;
    only those work together, and only if their constants (frozen parameters) are equal, too.
    """

    def __init__(self, engines: Sequence[Vectorised], same: Sequence[Hashable], kinds: Sequence[Hashable]) -> None:
        self.engines, self._same = list(engines), list(same)
        self._kinds = [(kind, _constants(engine)) for kind, engine in zip(kinds, engines)]
        self._stores: dict[str, tuple[Rows, list[int]]] = {}

    def fulfil(self, requests: Sequence[Request]) -> list[Tree]:
        """The replies to each request, in their order."""
        groups: dict[Hashable, list[int]] = {}
        for number, request in enumerate(requests):
            memory = tree.rows(self._memory(request), slice(0, 1))
            alike = (self._kinds[request.seat], request.alike(memory)) if len(request.orders.ids) else number
            groups.setdefault(alike, []).append(number)
        replies: list[Tree] = [{} for _ in requests]
        for numbers in groups.values():
            mine = [requests[number] for number in numbers]
            found = self._together(mine) if len(mine) > 1 else [self._alone(mine[0])]
            for number, reply in zip(numbers, found):
                replies[number] = reply
        return replies

    def _alone(self, request: Request) -> Tree:
        _, client, channel, broadcast, orders, round, seed = request
        return self.engines[request.seat].fulfil(client, channel, broadcast, orders, round=round, seed=seed)

    def _memory(self, request: Request) -> Tree:
        return self.engines[request.seat]._memory_of(request.client, request.channel)

    def _store(self, which: str) -> tuple[Rows, list[int]]:
        """All engines' rows one after the other, and where each engine's begin."""
        if which not in self._stores:
            stores = [engine.store(which) for engine in self.engines]  # type: ignore[arg-type]
            first = {same: seat for seat, same in reversed(list(enumerate(self._same)))}
            kept = [seat for seat, same in enumerate(self._same) if first[same] == seat]
            lengths = np.cumsum([0, *(len(stores[seat].y) for seat in kept)])
            begins = {self._same[seat]: int(begin) for seat, begin in zip(kept, lengths)}
            nobody = torch.zeros(0, dtype=torch.int64)
            rows = Rows(
                x=tree.concatenate([stores[seat].x for seat in kept]),
                y=torch.cat([stores[seat].y for seat in kept]),
                starts=nobody,
                sizes=nobody,
            )
            self._stores[which] = rows, [begins[same] for same in self._same]
        return self._stores[which]

    @torch.no_grad()
    def _together(self, requests: Sequence[Request]) -> list[Tree]:
        lead, (_, client, channel, *_) = self.engines[requests[0].seat], requests[0]
        program, (store, _) = lead._program(client, channel), self._store(client.work.rows)
        counts = [len(request.orders.ids) for request in requests]
        owner = np.repeat(np.arange(len(requests)), counts)  # [m] which request
        index = np.concatenate([np.arange(count) for count in counts])  # [m] place in it
        steps = np.concatenate([request.orders.steps for request in requests])
        personal = tree.concatenate([self._personal(request, lead.device) for request in requests])
        memory = tree.concatenate([self._kept(request) for request in requests])
        keys = torch.cat([_channel_keys(request, lead.device) for request in requests])
        order = np.lexsort((index, owner, -steps))  # longest first, then by run, then by id

        def prepare(group: np.ndarray, most: int | None = None) -> tuple[Tree, Context, Plan]:
            who = torch.from_numpy(group).to(lead.device)
            context = Context({}, tree.rows(personal, who), tree.rows(memory, who))
            plan = self._plan(requests, owner[group], index[group], most)
            return program.begin(keys[who], context), context, plan

        with lead._arithmetic:
            if client.work.trains:
                lead._tuner.settle(program, store, order, prepare)
            done = []
            for group in lead._tuner.groups(order):
                carry, context, plan = prepare(group)
                carry = lead._tuner.fold(program, carry, context, plan, store)
                done.append(program.end(carry, keys[torch.from_numpy(group).to(lead.device)], context))
        back = torch.from_numpy(np.argsort(order)).to(lead.device)
        reply, kept = (tree.rows(tree.concatenate([pair[i] for pair in done]), back) for i in (0, 1))
        return self._shared_out(requests, counts, reply, kept, lead)

    def _shared_out(
        self, requests: Sequence[Request], counts: Sequence[int], reply: Tree, kept: Tree, lead: Vectorised
    ) -> list[Tree]:
        """Each run's replies; each run's engine remembers what its clients keep, and the lane that was measured."""
        found, begin = [], 0
        for request, count in zip(requests, counts):
            mine = slice(begin, begin + count)
            begin += count
            engine, own = self.engines[request.seat], tree.map_leaves(lambda leaf: leaf[mine].clone(), reply)  # noqa: B023
            if request.client.work.trains:
                where, memory = engine._where(request.orders.ids), self._memory(request)
                engine._remember(memory, where, tree.rows(kept, mine), own, request.orders.heard)
                engine.adopt(lead.choice)
            found.append(own)
        return found

    def _personal(self, request: Request, device: torch.device) -> Tree:
        """What each of a run's clients is sent: what it shares with the others of its run is its own among all runs."""
        place = torch.from_numpy(request.orders.place).to(device)
        count = len(place)
        shared = {**request.broadcast.shared, "round": torch.full((), request.round, device=device)}
        spread = tree.map_leaves(lambda leaf: leaf.expand(count, *leaf.shape), shared)
        return {**spread, **tree.rows(request.broadcast.personal, place)}

    def _kept(self, request: Request) -> Tree:
        engine, memory = self.engines[request.seat], self._memory(request)
        return tree.rows(memory, torch.from_numpy(engine._where(request.orders.ids)).to(engine.device))

    def _plan(self, requests: Sequence[Request], owner: np.ndarray, index: np.ndarray, most: int | None) -> Plan:
        """The plans of clients of several runs in one, in the order given (longest first)."""
        pieces, columns = [], []
        for number, request in enumerate(requests):
            here = np.flatnonzero(owner == number)
            if not len(here):
                continue
            engine, orders, who = self.engines[request.seat], request.orders, index[owner == number]
            steps = orders.steps[who] if most is None else np.minimum(orders.steps[who], most)
            work, ids = request.client.work, orders.ids[who]
            own = engine.store(work.rows)
            where = engine._where(ids)
            plan = plans.draw(work, own, ids, steps, seed=request.seed, round=request.round, where=where)
            pieces.append((plan, self._store(work.rows)[1][request.seat]))
            columns.append(here)
        return merged(pieces, np.argsort(np.concatenate(columns)))


def merged(pieces: Sequence[tuple[Plan, int]], order: np.ndarray) -> Plan:
    """Plans side by side, as long and as wide as the largest; each with the number its rows are shifted by."""
    length = max(plan.rows.shape[0] for plan, _ in pieces)
    width = max(plan.width for plan, _ in pieces)
    device = pieces[0][0].rows.device
    columns = torch.from_numpy(order).to(device)

    def padded(values: Tensor, *shape: int) -> Tensor:
        room = values.new_zeros(shape)
        room[tuple(slice(0, n) for n in values.shape)] = values
        return room

    rows = [padded(plan.rows + begin, length, plan.rows.shape[1], width) for plan, begin in pieces]
    keys = [padded(plan.keys, length, plan.keys.shape[1]) for plan, _ in pieces]
    first = [padded(plan.first, length, plan.first.shape[1]) for plan, _ in pieces]
    live = [np.pad(plan.live, ((0, length - len(plan.live)), (0, 0))) for plan, _ in pieces]
    return Plan(
        rows=torch.cat(rows, 1)[:, columns],
        live=np.concatenate(live, 1)[:, order],
        steps=np.concatenate([plan.steps for plan, _ in pieces])[order],
        keys=torch.cat(keys, 1)[:, columns],
        first=torch.cat(first, 1)[:, columns],
    )


def _constants(engine: Vectorised) -> str:
    """A digest of what the module holds and nobody trains or sends."""
    digest = hashlib.sha256()
    for name, value in engine.task.module.named_parameters():
        if not value.requires_grad:
            digest.update(
                name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


def _channel_keys(request: Request, device: torch.device) -> Tensor:
    ids = torch.from_numpy(request.orders.ids).to(device)
    return rng.fold(rng.key(request.seed, "channel", request.round), ids)
