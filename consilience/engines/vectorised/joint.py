"""Clients of several runs in one group: simultaneous requests to engines of the same task run together.

Every run keeps its own engine, data, memories, seeds and server; only the steps of the clients' local work are shared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast
from consilience.core.federation import Rows
from consilience.core.plans import Plan, Split
from consilience.core.protocols import Channel, ClientRule
from consilience.core.stored_rows import concatenated
from consilience.core.tree import Tree
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.local_work import LocalWork, channel_keys, on_device
from consilience.engines.vectorised.program import Context
from consilience.engines.workload import Workload


class Request(NamedTuple):
    """The work that one run requests of its clients."""

    run: int  # which of the engines
    client: ClientRule
    channel: Channel
    broadcast: Broadcast
    workload: Workload
    round: int
    seed: int

    def alike(self, memory: Tree) -> Hashable:
        """A key that is equal for requests that can run together; `memory` is one client's."""
        whole = {"shared": self.broadcast.shared, "memory": memory}
        shapes = [(path, tuple(leaf.shape), leaf.dtype) for path, leaf in tree.flatten(whole).items()]
        personal = tree.flatten(self.broadcast.personal)
        own = [(path, tuple(leaf.shape[1:]), leaf.dtype) for path, leaf in personal.items()]
        return self.client, self.channel, tuple(shapes), tuple(own)


class Joint:
    """Engines of several runs on one device.

    same: which hold the same rows, so that these are stored once. kinds: which run the same module in the same way;
    only those work together, and only if their constants (frozen parameters) are equal, too.
    """

    def __init__(self, engines: Sequence[Vectorised], same: Sequence[Hashable], kinds: Sequence[Hashable]) -> None:
        self.engines, self._same = list(engines), list(same)
        self._kinds = [(kind, _constants(engine), _preparations(engine)) for kind, engine in zip(kinds, engines)]
        self._stores: dict[str, tuple[Rows, list[int]]] = {}

    def run_clients(self, requests: Sequence[Request]) -> list[Tree]:
        """The replies to each request, in their order."""
        groups: dict[Hashable, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(self._group_of(number, request), []).append(number)
        replies: list[Tree] = [{} for _ in requests]
        for numbers in groups.values():
            mine = [requests[number] for number in numbers]
            found = self._together(mine) if len(mine) > 1 else [self._alone(mine[0])]
            for number, reply in zip(numbers, found):
                replies[number] = reply
        return replies

    def _group_of(self, number: int, request: Request) -> Hashable:
        """Equal for requests that can be done together."""
        if not len(request.workload.ids):
            return number
        one = self._memories(request, request.workload.ids[:1])
        return self._kinds[request.run], request.alike(one)

    def _alone(self, request: Request) -> Tree:
        run, client, channel, broadcast, workload, round, seed = request
        return self.engines[run].run_clients(client, channel, broadcast, workload, round=round, seed=seed)

    def _memories(self, request: Request, ids: np.ndarray) -> Tree:
        return self.engines[request.run].memories.read(request.client, request.channel, ids)

    def _store(self, which: Split) -> tuple[Rows, list[int]]:
        """All engines' rows one after the other, and where each engine's begin."""
        if which not in self._stores:
            stores = [engine.store(which) for engine in self.engines]
            first = {same: run for run, same in reversed(list(enumerate(self._same)))}
            kept = [run for run, same in enumerate(self._same) if first[same] == run]
            lengths = np.cumsum([0, *(len(stores[run].y) for run in kept)])
            begins = {self._same[run]: int(begin) for run, begin in zip(kept, lengths)}
            none = torch.zeros(0, dtype=torch.int64)
            rows = Rows(
                x=concatenated([stores[run].x for run in kept]),
                y=torch.cat([stores[run].y for run in kept]),
                starts=none,
                sizes=none,
                weight=_joined([stores[run] for run in kept]),
            )
            self._stores[which] = rows, [begins[same] for same in self._same]
        return self._stores[which]

    @torch.no_grad()
    def _together(self, requests: Sequence[Request]) -> list[Tree]:
        """The work of clients of several runs, done by the first run's engine; each engine keeps its own memories."""
        lead = self.engines[requests[0].run]
        reply, kept = lead.run_groups(self._local_work(requests, lead))
        found, begin = [], 0
        for request in requests:
            mine = slice(begin, begin := begin + len(request.workload.ids))
            own = tree.map_leaves(lambda leaf: leaf[mine].clone(), reply)  # noqa: B023
            if request.client.work.trains:
                engine = self.engines[request.run]
                engine.memories.remember(request.client, request.channel, request.workload, tree.rows(kept, mine), own)
                engine.use_lane(lead.choice)
            found.append(own)
        return found

    def _local_work(self, requests: Sequence[Request], lead: Vectorised) -> LocalWork:
        client, device = requests[0].client, lead.device
        counts = [len(request.workload.ids) for request in requests]
        owner = np.repeat(np.arange(len(requests)), counts)  # [m] which request
        index = np.concatenate([np.arange(count) for count in counts])  # [m] place in it
        steps = np.concatenate([request.workload.steps for request in requests])
        personal = tree.concatenate([_personal(request, device) for request in requests])
        memory = tree.concatenate([self._memories(request, request.workload.ids) for request in requests])
        keys = [channel_keys(one.workload.ids, device, round=one.round, seed=one.seed) for one in requests]

        def context(group: np.ndarray) -> Context:
            who = on_device(group, device)
            return Context({}, tree.rows(personal, who), tree.rows(memory, who))

        return LocalWork(
            program=lead.program(client, requests[0].channel),
            store=replace(self._store(client.work.rows)[0], preparation=lead.store(client.work.rows).preparation),
            order=np.lexsort((index, owner, -steps)),  # longest first, then by run, then by id
            sizes=np.concatenate([request.workload.sizes for request in requests]),
            keys=torch.cat(keys),
            context=context,
            draw=lambda group, most: self._plan(requests, owner[group], index[group], most),
            drawn={},
        )

    def _plan(self, requests: Sequence[Request], owner: np.ndarray, index: np.ndarray, most: int | None) -> Plan:
        """The plans of clients of several runs in one, in the order given (longest first)."""
        pieces, columns = [], []
        for number, request in enumerate(requests):
            here = np.flatnonzero(owner == number)
            if not len(here):
                continue
            workload, who, work = request.workload, index[owner == number], request.client.work
            steps = workload.steps[who] if most is None else np.minimum(workload.steps[who], most)
            engine = self.engines[request.run]
            plan = engine.plan(work, workload.ids[who], steps, round=request.round, seed=request.seed)
            pieces.append((plan, self._store(work.rows)[1][request.run]))
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
    """A digest of the module's constants, which are neither trained nor sent."""
    digest = hashlib.sha256()
    for name, value in engine.task.module.named_parameters():
        if not value.requires_grad:
            digest.update(
                name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


def _preparations(engine: Vectorised) -> str:
    """What is done to stored values in a batch, as text."""
    return str([value.preparation for value in engine.stores.values()])


def _personal(request: Request, device: torch.device) -> Tree:
    """What each of a run's clients is sent; what one run shares is personal among several runs."""
    place = on_device(request.workload.place, device)
    shared = {**request.broadcast.shared, "round": torch.full((), request.round, device=device)}
    spread = tree.map_leaves(lambda leaf: leaf.expand(len(place), *leaf.shape), shared)
    return {**spread, **tree.rows(request.broadcast.personal, place)}


def _joined(stores: Sequence[Rows]) -> Tensor | None:
    """The rows' weights; where only some runs have any, those of the others are 1."""
    if all(store.weight is None for store in stores):
        return None
    ones = (torch.ones(len(store.y), device=store.y.device) for store in stores)
    return torch.cat([one if store.weight is None else store.weight for store, one in zip(stores, ones)])
