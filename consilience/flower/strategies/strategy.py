"""Flower strategies made from recipes: subclasses of Flower's FedAvg that take its arguments and the algorithm's."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from consilience.core.capabilities import KeepsLayers, QueriesBeforeSelection, capability
from consilience.core.exchange import Pool
from consilience.core.protocols import Selection
from consilience.core.refusal import Refusal, Refused
from consilience.core.rng import host
from consilience.core.screening import Limits
from consilience.core.settings import Invalid, nearest, refuse_unknown
from consilience.core.tree import rows
from consilience.flower.messages.pulling import BoundedGrid, MessageLimit
from consilience.flower.strategies.catalogue import STRATEGIES, Entry, needs_of, refuse_unworkable
from consilience.flower.strategies.former import refuse_former_arguments, refuse_former_server
from consilience.flower.strategies.records import flwr, to_record
from consilience.flower.strategies.replies import Expected, cleaned, examples_of, in_common, numbers_of
from consilience.flower.strategies.serving import LOG, RoundRequest, Serving, Settings
from consilience.selection.fixed_for_rounds import FixedForRounds
from consilience.selection.uniform import Uniform

ALGORITHM = "algorithm"  # the ConfigRecord that tells clients the algorithm's name and settings
METRICS = 2**22  # bytes of a reply's metrics and configs
BYPASSED = "%s: its aggregate_train is not called, so its rule and checks are not used: call super().aggregate_train"
OURS = tuple(field.name for field in fields(Settings))


class TooFewNodes(RuntimeError):
    """Not enough nodes connected in time."""


@functools.cache
def strategy(name: str) -> type:
    """The strategy of this name, such as `SimProx`."""
    if name not in STRATEGIES:
        raise Invalid(f"strategy {name!r} is unknown{nearest(name, STRATEGIES)}; known: {', '.join(STRATEGIES)}")
    entry = STRATEGIES[name]
    document = inspect.getdoc(entry.build)
    body = {"__doc__": document, "__module__": "consilience.flower", "_name": name, "_entry": entry}
    made = type(name, (_adapted(),), body)
    made.__signature__ = _signature(entry)  # type: ignore[attr-defined]
    return made


@functools.cache
def _adapted() -> type:
    """The base class of all strategies, defined on demand since it needs Flower."""
    flower = flwr("serverapp.strategy").FedAvg

    class Adapted(flower):  # type: ignore[misc, valid-type]
        """Flower's FedAvg with a server rule of ours and checks of every reply."""

        _name: str
        _entry: Entry

        def __init__(self, *args: Any, **options: Any) -> None:
            theirs = inspect.signature(flower.__init__).parameters
            known = (*list(theirs)[1:], *OURS, *self._entry.options)
            refuse_former_arguments(self._name, [key for key in options if key not in known])
            refuse_unknown(options, known, self._name)
            super().__init__(*args, **{key: value for key, value in options.items() if key in theirs})
            self.settings = Settings(**{key: value for key, value in options.items() if key in OURS})
            own = {key: value for key, value in options.items() if key in self._entry.options and key not in theirs}
            self.algorithm = self._entry.algorithm(own, self._name)
            refuse_unworkable(self._name, self.algorithm)
            self.sent = {"name": self._entry.recipe, "seed": self.settings.seed, **self._entry.sent(own)}
            self.refusals: list[tuple[int, Refusal]] = []  # (round, refusal), of the whole run
            self.notes: dict[str, Any] = {}  # the server rule's report on its last round
            self._serving = Serving(self.algorithm, self.settings, name=self._name, identity=self._entry.identity)
            self._asked: RoundRequest | None = None  # the request whose replies have not been aggregated yet
            self._bypassed = False  # whether a subclass or wrapper replaces `aggregate_train`
            self._grid: BoundedGrid | None = None

        def summary(self) -> None:
            """Log the settings."""
            LOG.info("\t├──> %s: %r", self._name, self.algorithm.server)
            super().summary()

        def start(self, grid: Any, *args: Any, **options: Any) -> Any:
            """Run Flower's rounds; replies larger than allowed are not assembled."""
            self._grid = BoundedGrid(grid, self._bound)
            return super().start(self._grid, *args, **options)

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
            """Choose nodes and make a message for each."""
            if self.fraction_train == 0.0:
                return []
            nodes = self._connected(grid, self.fraction_train, self.min_train_nodes)
            replaced = self._serving.open(arrays, len(nodes), continues=server_round > 1)
            if replaced and self._asked is not None and not self._bypassed:
                self._bypassed = True
                LOG.warning(BYPASSED, self._name)
            slots = self._serving.slots.arrange(nodes)
            if len(slots) < len(nodes):
                LOG.warning(
                    "%s: %d of %d nodes are more than the %s clients it was begun with: set num_clients",
                    self._name, len(nodes) - len(slots), len(nodes), self._serving.slots.count,
                )  # fmt: skip
            chosen = self._choose(server_round - 1, slots, len(nodes))
            LOG.info("configure_train: Sampled %s nodes (out of %s)", len(chosen), len(nodes))
            config["server-round"] = server_round
            if "mu" in self.sent:  # the key that clients of Flower's own FedProx read
                config["proximal-mu"] = self.sent["mu"]
            self._asked = self._serving.ask(server_round - 1, chosen)
            return self._messages(self._asked, config)

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
            """The next model, and the metrics of the accepted replies."""
            unread = self._refuse_unread(server_round)
            sound, _ = self._check_and_log_replies(list(replies), is_train=True, validate=False)
            if not sound:
                return None, None
            if self._asked is None or self._asked.round != server_round - 1:
                raise Invalid(f"round {server_round} was never configured: call configure_train first")
            heard = self._serving.hear(self._asked, sound, self._expected())
            self._asked = None
            self.notes = heard.notes
            self.refusals += [(server_round, refusal) for refusal in heard.refusals]
            contents = [content for _, content in sorted(heard.contents.items())]
            metrics = self._averaged(contents, self.train_metrics_aggr_fn) if contents else None
            if heard.refusals or unread:
                metrics = flwr("app").MetricRecord() if metrics is None else metrics
                metrics["refused-replies"] = len(heard.refusals) + unread
            return (self._serving.record() if heard.moved else None), metrics

        def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
            """Messages to a sample of nodes, which depends only on the connected nodes."""
            if self.fraction_evaluate == 0.0:
                return []
            nodes = self._connected(grid, self.fraction_evaluate, self.min_evaluate_nodes)
            count = max(int(len(nodes) * self.fraction_evaluate), self.min_evaluate_nodes)
            slots = sorted((slot, node) for node, slot in self._serving.slots.arrange(nodes).items())
            drawn = host(self.settings.seed, "evaluate", server_round).choice(
                len(slots), min(count, len(slots)), replace=False
            )
            chosen = [slots[row][1] for row in sorted(drawn)]
            LOG.info("configure_evaluate: Sampled %s nodes (out of %s)", len(chosen), len(nodes))
            config["server-round"] = server_round
            app = flwr("app")
            settings = {self.configrecord_key: config, ALGORITHM: app.ConfigRecord(self.sent)}
            record = app.RecordDict({self.arrayrecord_key: arrays, **settings})
            return self._construct_messages(record, chosen, app.MessageType.EVALUATE)

        def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
            """The metrics of the valid replies."""
            self._refuse_unread(server_round)
            sound, _ = self._check_and_log_replies(list(replies), is_train=False, validate=False)
            contents: list[tuple[Any, Any]] = []
            for message in sound:
                node, said = message.metadata.src_node_id, numbers_of(message.content)
                try:
                    examples_of(said, self.weighted_by_key, self.settings.limits or Limits())
                except Refused as problem:
                    refusal = problem.by(f"node {node}")
                    self.refusals.append((server_round, refusal))
                    LOG.warning("%s round %d, evaluation: %s", self._name, server_round, refusal)
                    continue
                contents.append((self._order(node, said), message.content))
            found = [content for _, content in sorted(contents, key=lambda pair: pair[0])]
            return self._averaged(found, self.evaluate_metrics_aggr_fn) if found else None

        def initialize_parameters(self, *_: Any, **__: Any) -> Any:
            """What a server of Flower's former API calls first."""
            refuse_former_server(self._name)

        def _bound(self) -> MessageLimit:
            """The size limit of a reply: the whole model, other required entries, and metrics."""
            limits, layout = self.settings.limits or Limits(), self._serving.layout
            if layout is None:
                return MessageLimit(0, METRICS)
            template = replace(self._expected(), personal=frozenset()).template(self._serving.model())
            found = MessageLimit.of(template.most(limits.castable, slack=limits.slack), len(template.leaves))
            return found._replace(text=found.text + METRICS)

        def _refuse_unread(self, server_round: int) -> int:
            """Log the replies that were refused before they were read; returns their number."""
            unread = [] if self._grid is None else self._grid.refused.copy()
            for node, problem in unread:
                LOG.warning("%s round %d: %s", self._name, server_round, problem.by(f"node {node}"))
            self.refusals += [(server_round, problem.by(f"node {node}")) for node, problem in unread]
            if self._grid is not None:
                self._grid.refused.clear()
            return len(unread)

        def _averaged(self, contents: list[Any], function: Any) -> Any:
            """Metrics by Flower's average, or by the user's own function."""
            usual = function is flwr("serverapp.strategy.strategy_utils").aggregate_metricrecords
            contents = [cleaned(one, (self.settings.client_id_key,) if usual else ()) for one in contents]
            return function(in_common(contents) if usual else contents, self.weighted_by_key)

        def _connected(self, grid: Any, fraction: float, least: int) -> list[int]:
            """The nodes, once there are enough of them."""
            deadline = time.monotonic() + self.settings.wait_for_nodes
            while True:
                nodes = sorted(grid.get_node_ids())
                needed = max(self.min_available_nodes, int(len(nodes) * fraction), least)
                if len(nodes) >= needed:
                    return nodes
                if time.monotonic() >= deadline:
                    raise TooFewNodes(
                        f"{len(nodes)} nodes are connected after {self.settings.wait_for_nodes:g} s, and {needed} are "
                        "needed: start more, lower min_available_nodes, or raise wait_for_nodes"
                    )
                LOG.info("Waiting for nodes to connect: %d connected (minimum required: %d).", len(nodes), needed)
                time.sleep(min(1.0, self.settings.wait_for_nodes))

        def _choose(self, round: int, slots: dict[int, int], connected: int) -> dict[int, int]:
            """node -> slot of the selected clients."""
            count = max(int(connected * self.fraction_train), self.min_train_nodes)
            selection = selection_of(self.algorithm.selection, self.settings.selection, count)
            size = max(slots.values(), default=-1) + 1
            available = np.isin(np.arange(size), list(slots.values()))
            pool = Pool(sizes=np.ones(size, np.int64), losses=np.full(size, np.nan), available=available)
            chosen = set(selection.choose(round, pool, self.settings.seed).tolist())
            return {node: slot for node, slot in slots.items() if slot in chosen}

        def _messages(self, asked: RoundRequest, config: Any) -> list[Any]:
            """One message for each node, in the order of their slots; the shared part is serialised once."""
            app = flwr("app")
            layout = self._serving.layout
            assert layout is not None

            def records(sent: dict[str, Any]) -> dict[str, Any]:
                return {
                    self.arrayrecord_key if name == "model" else name: to_record(
                        layout.flat(value) if name == "model" else value
                    )
                    for name, value in sent.items()
                }

            personal = asked.broadcast.personal
            settings = {self.configrecord_key: config, ALGORITHM: app.ConfigRecord(self.sent)}
            common = app.RecordDict({**records(asked.broadcast.shared), **settings})
            messages = []
            for node, slot in sorted(asked.slots.items(), key=lambda pair: pair[1]):
                row = int(np.searchsorted(asked.ids, slot))
                content = app.RecordDict({**records(rows(personal, row)), **common}) if personal else common
                messages.append(app.Message(content, dst_node_id=node, message_type=app.MessageType.TRAIN))
            return messages

        def _expected(self) -> Expected:
            keeps, layout = capability(self.algorithm.client, KeepsLayers), self._serving.layout
            assert layout is not None
            return Expected(
                layout=layout,
                needs=needs_of(self._entry, self.algorithm),
                personal=frozenset() if keeps is None else keeps.kept_leaves(self._serving.model()),
                steps=self._entry.steps,
                weighted_by_key=self.weighted_by_key,
                arrayrecord_key=self.arrayrecord_key,
                client_id_key=self.settings.client_id_key,
            )

        def _order(self, node: int, said: dict[str, Any]) -> tuple[int, int]:
            """Sort key: the client's number if it reports one, then the node."""
            slot = said.get(self.settings.client_id_key)
            return (slot if type(slot) is int else -1, node)

    return Adapted


def selection_of(recipe: Selection, given: Selection | None, count: int) -> Selection:
    """The user's selection, or a sample of `count`; fixed for several rounds if the recipe's is."""
    chosen = given or Uniform(count=count)
    if capability(chosen, QueriesBeforeSelection) is not None:
        raise Invalid(
            f"selection = {type(chosen).__name__} asks clients for losses first, which Flower's rounds do not support"
        )
    if isinstance(recipe, FixedForRounds) and not isinstance(chosen, FixedForRounds):
        return FixedForRounds(inner=chosen, rounds=recipe.rounds)
    return chosen


def _signature(entry: Entry) -> inspect.Signature:
    """Flower's arguments as they are, then ours and the algorithm's, by name."""
    theirs = list(inspect.signature(flwr("serverapp.strategy").FedAvg).parameters.values())
    ours = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(Settings)
    ]
    own = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.required else option.default,
            annotation=option.annotation,
        )
        for name, option in entry.options.items()
    ]
    return inspect.Signature([*theirs, *ours, *own])
