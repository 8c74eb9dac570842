"""A server rule behind a Flower strategy: it sends the broadcast, checks the replies, and updates."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.conclusion import conclude
from consilience.core.exchange import Broadcast, Notes
from consilience.core.protocols import Selection, ServerRule
from consilience.core.refusal import Refusal, Refused
from consilience.core.screening import Limits
from consilience.core.settings import Checked, Count, Invalid, Positive, Whole
from consilience.core.tree import Tree
from consilience.flower.strategies.records import STATISTICS, StateDictLayout, to_record, to_tensors
from consilience.flower.strategies.replies import Expected, numbers_of
from consilience.flower.strategies.slots import ClientSlots
from consilience.wire.admission import Arrival, admit

LARGE = 2**28  # bytes of a round's models above which several threads are faster
LOG = logging.getLogger("flwr")  # Flower's own logger, so that all lines are in one log


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """Settings of our strategies besides Flower's own arguments and the algorithm's.

    `num_clients`: of the whole federation (None: those connected in the first round). `client_id_key`: the metric in
    which clients report their number. `selection`: one of consilience's, instead of a sample of `fraction_train`.
    `buffers`: patterns of floating arrays that are no parameters. `wait_for_nodes`: seconds until too few are an error.
    """

    num_clients: Count | None = None
    client_id_key: str = "partition-id"
    seed: Whole = 0
    selection: Selection | None = None
    limits: Limits | None = None
    buffers: tuple[str, ...] = STATISTICS
    wait_for_nodes: Positive = 3600.0


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundRequest:
    """The broadcast of a round, and its nodes."""

    round: int  # from 0
    slots: dict[int, int]  # node -> its slot
    broadcast: Broadcast
    ids: np.ndarray  # ascending, in the order of `broadcast.personal`


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundResult:
    """The result of a round's replies: those accepted, by client, and whether the model was updated."""

    contents: dict[int, Any]
    refusals: tuple[Refusal, ...]
    notes: Notes
    moved: bool


class Serving:
    """The state of a server rule over the rounds of a Flower run."""

    def __init__(self, algorithm: Algorithm, settings: Settings, *, name: str, identity: bool) -> None:
        self.algorithm, self.settings, self.name = algorithm, settings, name
        self._identity = identity
        self._state: Tree | None = None
        self._model: Any = None  # the ArrayRecord that corresponds to the state
        self.layout: StateDictLayout | None = None
        self.slots = ClientSlots(None, key=settings.client_id_key, must_say=identity)

    def open(self, record: Any, nodes: int, *, continues: bool = False) -> bool:
        """Start from these arrays, unless they are the result of the last round; returns whether they replace it.

        `continues`: not the first round of a run, so that arrays that a subclass or a wrapper has changed (such as
        Flower's differential privacy, which adds noise) replace the model only, and the rest of the state is kept.
        """
        if self._state is not None and (record is self._model or record == self._model):
            return False
        values = to_tensors(record)
        layout = StateDictLayout.of(values, self.settings.buffers)
        start, clients = layout.tree(values), self.settings.num_clients or nodes
        replaces = continues and self._state is not None
        if replaces and self._replace(start):
            self._model = record
            return True
        if replaces:
            LOG.warning("%s: its model was changed between two rounds: it starts anew from the changed one", self.name)
        self._state = self.algorithm.server.init(start, clients)
        self._model, self.layout = record, layout
        count = clients if counts_clients(self.algorithm.server, start, clients) else None
        self.slots = ClientSlots(count, key=self.settings.client_id_key, must_say=self._identity)
        return replaces

    def _replace(self, model: Tree) -> bool:
        """Put this model into the state, if it has the same arrays and the rule sends one model to all clients."""
        assert self._state is not None
        sent = self.algorithm.server.broadcast(self._state, np.arange(1))
        one_for_all = not sent.personal and sent.shared.get("model") is self._state.get("model")
        if not one_for_all or _form(model) != _form(self.model()):
            return False
        self._state = {**self._state, "model": model}
        return True

    def model(self) -> Tree:
        """The model to evaluate and return."""
        assert self._state is not None
        return self.algorithm.server.model(self._state)

    def ask(self, round: int, slots: dict[int, int]) -> RoundRequest:
        """The request to the nodes with these slots."""
        assert self._state is not None
        ids = np.array(sorted(slots.values()), dtype=np.int64)
        broadcast = self.algorithm.server.broadcast(self._state, ids)
        return RoundRequest(round=round, slots=slots, ids=ids, broadcast=broadcast)

    def hear(self, asked: RoundRequest, replies: Iterable[Any], expected: Expected) -> RoundResult:
        """Accept valid replies and update; refused ones are logged, and the round continues."""
        with few_threads(len(asked.ids) * tree.nbytes(self.model())):
            return self._hear(asked, replies, expected)

    def _hear(self, asked: RoundRequest, replies: Iterable[Any], expected: Expected) -> RoundResult:
        contents, refusals = self._one_each(asked, replies)
        slots, unknown = self.slots.assign(
            ((node, numbers_of(content).get(expected.client_id_key)) for node, content in contents.items()),
            asked.slots,
        )
        refusals += unknown.values()
        arrivals: list[Arrival] = []
        for node, slot in slots.items():
            try:
                arrivals.append(expected.arrival(slot, asked.round, contents[node]))
            except Refused as problem:
                refusals.append(problem.by(slot))
        admitted, refused = admit(
            arrivals,
            template=expected.template(self.model()),
            round=asked.round,
            asked=set(slots.values()),
            limits=self.settings.limits,
        )
        for note in admitted.notes:
            LOG.info("\t> %s", note)
        cohort = admitted.cohort(round=asked.round, seed=self.settings.seed)
        nodes = {slot: node for node, slot in slots.items()}
        assert self._state is not None
        ended = conclude(
            self.algorithm,
            self._state,
            cohort,
            self._received(asked, [nodes[i] for i in cohort.ids.tolist()]),
            round=asked.round,
            seed=self.settings.seed,
            limits=self.settings.limits,
        )
        self.slots.keep({nodes[i]: i for i in ended.sound.tolist()})
        refusals += [*refused, *ended.cohort.refusals[len(refused) :]]
        refusals = [self.slots.named(refusal, nodes) for refusal in refusals]
        for refusal in refusals:
            LOG.warning("%s round %d: %s", self.name, asked.round + 1, refusal)
        if isinstance(ended.problem, Invalid) and not refusals and len(ended.cohort) == len(asked.ids):
            raise ended.problem  # no reply is missing, so a retry would fail too
        if ended.problem is not None:
            LOG.error("%s round %d changes nothing: %s", self.name, asked.round + 1, ended.problem)
        self._state = ended.state
        return RoundResult(
            contents={i: contents[nodes[i]] for i in ended.cohort.ids.tolist()},
            refusals=tuple(refusals),
            notes=ended.notes,
            moved=len(ended.cohort) > 0 and ended.problem is None,
        )

    def record(self) -> Any:
        """The model as an ArrayRecord, with the user's names in the user's order."""
        assert self.layout is not None
        self._model = to_record(self.layout.flat(self.model()))
        return self._model

    def _received(self, asked: RoundRequest, nodes: list[int]) -> Broadcast:
        """What these nodes were sent, in this order."""
        sent = [asked.slots[node] for node in nodes]
        rows = torch.from_numpy(np.searchsorted(asked.ids, np.array(sent, dtype=np.int64)))
        return replace(asked.broadcast, personal=tree.rows(asked.broadcast.personal, rows))

    def _one_each(self, asked: RoundRequest, replies: Iterable[Any]) -> tuple[dict[int, Any], list[Refusal]]:
        """(node -> its first reply, refusals of nodes that were not asked or answered twice)."""
        contents: dict[int, Any] = {}
        refusals: list[Refusal] = []
        for message in replies:
            node = message.metadata.src_node_id
            if node in asked.slots and node not in contents:
                contents[node] = message.content
                continue
            reason = "duplicate" if node in contents else "unasked"
            refusals.append(Refusal(client=f"node {node}", reason=reason, detail=f"in round {asked.round + 1}"))
        return contents, refusals


def _form(model: Tree) -> dict[str, Any]:
    return {path: (leaf.shape, leaf.dtype) for path, leaf in tree.flatten(model).items()}


@contextlib.contextmanager
def few_threads(nbytes: int) -> Iterator[None]:
    """Use one thread for small models: beside simulated clients on every core, waiting for a second one takes longer.

    Measured with ten models of 0.6 MB on two cores with a load of 14: 30 ms with one thread, 450 ms with two.
    """
    before = torch.get_num_threads()
    if nbytes > LARGE:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def counts_clients(server: ServerRule, start: Tree, clients: int) -> bool:
    """Whether a server's state depends on the number of clients, so that client numbers matter."""
    state = tree.flatten(server.init(start, clients))
    try:
        larger = tree.flatten(server.init(start, clients + 1))
    except Invalid:
        return True
    return any(not torch.equal(state[path], larger[path]) for path in state)
