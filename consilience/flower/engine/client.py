"""The client side of the engine: it carries out the server's orders on rows that never leave the node."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import PreTrainingPass, capability
from consilience.core.exchange import Broadcast
from consilience.core.federation import Federation
from consilience.core.protocols import ClientRule
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.program import memories
from consilience.engines.workload import Workload, planned_steps
from consilience.environments.environment import Environment
from consilience.flower.audit import receipts
from consilience.flower.engine.agreement import TESTS, TRAIN, RuleAndChannel, agreement, differences, rules_of
from consilience.flower.engine.memory import FoundMemory, MemoryStore
from consilience.flower.messages import wire
from consilience.flower.secure.client import contribution, masked, refuse_repetition
from consilience.flower.secure.terms import SecureTerms
from consilience.wire import arrays
from consilience.wire.admission import Arrival
from consilience.wire.template import Template


class SiteEngine(NamedTuple):
    """The engine of some clients, and the memory that each begins with from the task's own model."""

    engine: Vectorised
    first: Tree


@dataclass(frozen=True, eq=False, kw_only=True)
class Site:
    """One node: the agreed algorithm and task, and its own clients' rows."""

    algorithm: Algorithm
    task: Task
    federation: Federation  # of the clients here only
    hosts: np.ndarray  # [h] their ids, ascending
    clients: int  # in the whole federation
    engine: Mapping[str, Any] = field(default_factory=dict)  # settings of `Vectorised`
    memory: Path | None = None  # a folder for memories
    kept: int = 4  # memories of each client in it
    secure: SecureTerms | None = None  # of secure sums; None: replies in clear
    engines: dict[tuple[int, ...], SiteEngine] = field(default_factory=dict)  # by clients, kept between messages

    @functools.cached_property
    def rules(self) -> dict[str, RuleAndChannel]:
        """The rules that its clients may be asked to run, by name."""
        return rules_of(self.algorithm)

    @functools.cached_property
    def agreement(self) -> dict[str, str]:
        """The digests that must equal the server's."""
        dtype = self.engine.get("dtype", "float32")
        return agreement(self.algorithm, self.task, dtype, self.clients, self.secure)


Open = Callable[[Any, str], Site]
"""From Flower's Context and the name of a case to the site."""
Terms = Callable[[Any, str], SecureTerms | None]
"""From the same to the terms of its secure sums, without reading any rows; None if replies are sent in clear."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SiteClient:
    """Answers the messages of consilience's own server: it introduces its site and carries out orders."""

    open_site: Open
    secure: Terms = lambda context, case: None
    receipts: Path | None = None  # a folder for receipts

    def query(self, message: Any, context: Any) -> Any:
        """The introduction of the site."""
        return self._reply(message, introduce(message.content, context, self.open_site))

    def train(self, message: Any, context: Any) -> Any:
        """The replies to an order, masked where the run uses secure sums."""
        terms = self.secure(context, _case(message.content))
        if terms is None:
            return self.evaluate(message, context)
        asked = copy.deepcopy(message) if self.receipts is not None else message  # SecAgg+ changes it
        reply = masked(
            message, context, terms, lambda content, ctx: answer_for_sum(content, ctx, self.open_site, terms)
        )
        return self._noted(asked, reply)

    def evaluate(self, message: Any, context: Any) -> Any:
        """The replies to an order, in clear."""
        content = _packed(_executed(message.content, context, self.open_site))
        return self._noted(message, self._reply(message, content))

    def _noted(self, message: Any, reply: Any) -> Any:
        if self.receipts is not None:
            receipts.keep(self.receipts, message, reply.content)
        return reply

    def _reply(self, message: Any, content: Any) -> Any:
        from flwr.app import Message

        return Message(content, reply_to=message)


def introduce(content: Any, context: Any, open_site: Open) -> Any:
    """Which clients are here, how many rows they have, and what was agreed on."""
    site = open_site(context, wire.get_json(content, "query")["case"])
    if site.secure is not None and len(site.hosts) != 1:
        raise Invalid(f"this node holds clients {site.hosts.tolist()}: a secure sum needs one client on each node")
    rows, none = site.federation, [0] * len(site.hosts)
    reply = wire.records().RecordDict()
    here = {
        "clients": site.hosts.tolist(),
        "train": rows.train.sizes.tolist(),
        "test": none if rows.test is None else rows.test.sizes.tolist(),
        "validation": none if rows.validation is None else rows.validation.sizes.tolist(),
        "agreement": site.agreement,
    }
    wire.put_json(reply, "introduction", here)
    return reply


class ExecutedOrder(NamedTuple):
    """The results of an order, not yet packed."""

    engine: Vectorised
    site: Site
    order: wire.Order
    store: MemoryStore
    found: list[FoundMemory]  # the memories before
    shared: Tree  # what was received
    replies: Tree  # stacked


def answer_for_sum(content: Any, context: Any, open_site: Open, terms: SecureTerms) -> Any:
    """Execute an order for the one client here; SecAgg+ masks the reply."""
    done = _executed(content, context, open_site, in_clear=False)
    if len(done.order.clients) != 1:
        raise Invalid(f"a secure sum needs one client on each node, and clients {done.order.clients} were asked here")
    reply = tree.rows(done.replies, 0)
    if terms.noise is None:  # in a private sum, whether a reply is finite must not be seen
        Template.of(reply).check(reply)  # before its memory is stored
    return contribution(context, done.order.seed, _said(done, 0, digest=""), reply, done.shared, terms)


def _executed(content: Any, context: Any, open_site: Open, *, in_clear: bool = True) -> ExecutedOrder:
    """Do what an order says for each client it names."""
    order = wire.get_order(content)
    site = open_site(context, order.case)
    other = differences(site.agreement, order.agreement)
    if other:
        raise Invalid(f"the server's settings differ from this node's: {other}; use one config and one federation.py")
    if site.secure is not None and in_clear != (order.rule in TESTS):
        raise Invalid(f"of {order.rule!r}, this node gives {'a sum only' if in_clear else 'no sum'}")
    if site.secure is not None and in_clear and not site.secure.clear_tests:
        raise Invalid("this node reports no test results in clear: deploy.clear_tests is not true in its config.toml")
    if not in_clear:
        refuse_repetition(context, order)
    ids = np.array(order.clients, dtype=np.int64)
    unknown = np.setdiff1d(ids, site.hosts)
    if len(unknown):
        raise Invalid(f"clients {unknown.tolist()} are not at this node: it holds {site.hosts.tolist()}")
    engine, first = _engine(site, ids)
    store = MemoryStore(state=context.state, run=order.run, folder=site.memory, kept=site.kept)
    if "start" in content:
        first = _first_memory(site.algorithm, wire.get_tree(content, "start"))
    found = [store.find(client, digest, first) for client, digest in zip(order.clients, order.memory)]
    engine.memories.restore(tree.stack([one.memory for one in found]))
    shared, personal = (tree.to(wire.get_tree(content, name), engine.device) for name in ("shared", "personal"))
    replies = _work(engine, site.rules[order.rule], order, Broadcast(shared=shared, personal=personal))
    return ExecutedOrder(engine, site, order, store, found, shared, replies)


def _engine(site: Site, ids: np.ndarray) -> SiteEngine:
    """The engine of these clients, reused with its traces for all messages in this process."""
    clients = tuple(ids.tolist())
    if clients not in site.engines:
        mine = site.federation.among(np.searchsorted(site.hosts, ids))
        site.engines.clear()  # engines of other selections of clients are dropped
        engine = Vectorised(site.task, mine, hosts=ids, **_settings(site.engine))
        site.engines[clients] = SiteEngine(engine, _first_memory(site.algorithm, engine.start()))
    return site.engines[clients]


@torch.no_grad()
def _work(engine: Vectorised, asked: RuleAndChannel, order: wire.Order, broadcast: Broadcast) -> Tree:
    """The replies, stacked in the order's client order."""
    rule, channel = asked
    ids, place = np.array(order.clients, dtype=np.int64), np.arange(len(order.clients))
    before_training = capability(rule, PreTrainingPass) if order.rule == TRAIN else None
    if before_training is not None:  # its result is not sent
        reading = _reading_workload(engine, before_training.pre_training, ids)
        seen = engine.run_clients(
            before_training.pre_training, Plain(), broadcast, reading, round=order.round, seed=order.seed
        )
        broadcast = Broadcast(shared=broadcast.shared, personal={**broadcast.personal, "seen": seen})
    workload = Workload(
        ids=ids,
        place=place,
        steps=np.array(order.steps, dtype=np.int64),
        heard=np.array(order.heard, dtype=bool),
        sizes=engine.store(rule.work.rows).sizes.numpy(),
        counts={},
    )
    return engine.run_clients(rule, channel, broadcast, workload, round=order.round, seed=order.seed)


def _reading_workload(engine: Vectorised, rule: ClientRule, ids: np.ndarray) -> Workload:
    sizes = engine.store(rule.work.rows).sizes.numpy()
    steps = planned_steps(Environment(), rule.work, ids, sizes, 0, 0)
    return Workload(ids, np.arange(len(ids)), steps, np.ones(len(ids), dtype=bool), sizes, {})


def _packed(done: ExecutedOrder) -> Any:
    """The replies as records, with a report on each; memories are stored."""
    content = wire.records().RecordDict()
    said = []
    for place, client in enumerate(done.order.clients):
        reply = tree.rows(done.replies, place)
        said.append(_said(done, place, digest=arrays.digest(reply, *Arrival(**_facts(done, place)).facts)))
        flat = tree.flatten(reply)
        content[wire.reply_name(client)] = wire.array_record(
            {path: arrays.to_bytes(leaf) for path, leaf in flat.items()}
        )
    wire.put_answer(content, said)
    return content


def _facts(done: ExecutedOrder, place: int) -> dict[str, Any]:
    order, rule = done.order, done.site.rules[done.order.rule].rule
    facts: dict[str, Any] = {"client": order.clients[place], "run": order.run, "round": order.round}
    return facts | {
        "examples": int(done.engine.store(rule.work.rows).sizes[place]),
        "steps": order.steps[place],
    }


def _said(done: ExecutedOrder, place: int, *, digest: str) -> wire.ReplyReport:
    """The report on one reply; its memory is stored."""
    order, before = done.order, done.found[place]
    memory = order.memory[place]
    if done.site.rules[order.rule].rule.work.trains:
        now = tree.to(tree.rows(done.engine.memories.tree(), place), "cpu")
        memory = done.store.keep(order.clients[place], before.memory, now)
    return wire.ReplyReport(**_facts(done, place), digest=digest, memory=memory, lost=before.lost)


def _case(content: Any) -> str:
    """The case that a message belongs to."""
    return wire.get_json(content, wire.ABOUT)["case"] if wire.ABOUT in content else wire.get_order(content).case


def _first_memory(algorithm: Algorithm, start: Tree) -> Tree:
    """A client's memory before its first round."""
    return tree.to(tree.clone(memories(algorithm.client.init(start), algorithm.channel.init(start))), "cpu")


def _settings(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Engine settings without lane measurement: each message has its own process, too short for measuring to pay."""
    return {**engine, "lane": "serial" if engine.get("lane", "auto") == "auto" else engine["lane"]}
