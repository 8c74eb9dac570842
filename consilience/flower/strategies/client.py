"""Answers the messages of Flower strategies with consilience's client rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from consilience import algorithms
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import own_model_of
from consilience.core.evaluate import Evaluate
from consilience.core.federation import Federation
from consilience.core.metrics import Loss
from consilience.core.settings import Invalid, check_options, options_of
from consilience.flower.strategies.answering import Answering
from consilience.flower.strategies.memory import recall, remember
from consilience.flower.strategies.records import flwr, to_tensors
from consilience.flower.strategies.replies import STEPS
from consilience.flower.strategies.strategy import ALGORITHM
from consilience.options.recipes import built
from consilience.task.task import Task

MEMORY = "consilience-memory"
OWN_SETTINGS = ("loss", "device", "arrayrecord_key", "configrecord_key", "client_id_key")
Split = tuple[Any, Tensor]
Data = Callable[[Any], tuple[Split, Split | None]]


@dataclass(frozen=True, eq=False, kw_only=True)
class StrategyClient:
    """One client: how to make the model, where its rows are, and the algorithm both sides agreed on."""

    model_fn: Callable[[], nn.Module]
    data_fn: Data
    algorithm: str
    options: dict[str, Any]
    loss: str | Loss = "cross_entropy"
    device: str = "cpu"
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    client_id_key: str = "partition-id"

    def train(self, message: Any, context: Any) -> Any:
        """Local training by the algorithm's rule."""
        module = self.model_fn()
        answering = self._answering(message.content, context, module)
        reply = answering.train()
        if answering.memory:
            remember(context, MEMORY, answering.memory)
        records, numbers = answering.packed(reply, module, self.arrayrecord_key)
        numbers |= {"num-examples": int(answering.engine.sizes[0]), STEPS: answering.steps}
        return self._reply(message, answering, records, numbers)

    def evaluate(self, message: Any, context: Any) -> Any:
        """Test the received model, or the client's personal one, on the client's test rows."""
        answering = self._answering(message.content, context, self.model_fn())
        found = answering.exchange(Evaluate(rule=own_model_of(answering.algorithm.client)), Plain())
        known = answering.engine.task.metrics.values(found)
        numbers: dict[str, Any] = {"num-examples": round(float(found["loss"]["count"]))}
        numbers |= {key: value for key, value in known.items() if value is not None}
        return self._reply(message, answering, {}, numbers)

    def _algorithm(self, content: Any) -> Algorithm:
        """The algorithm with the settings given here, and the server's for the others."""
        sent = dict(content.get(ALGORITHM, {}))
        named = sent.pop("name", self.algorithm)
        if named != self.algorithm:
            raise Invalid(f"the server runs {named!r}, this client {self.algorithm!r}: use one algorithm on both sides")
        recipe = algorithms.recipe(self.algorithm)
        theirs = {key: value for key, value in sent.items() if key in options_of(recipe)}
        for key, value in self.options.items():
            if key in theirs and theirs[key] != value:
                raise Invalid(f"{key} = {value!r} here, but the server has {theirs[key]!r}: set it in one place")
        return built(recipe, {**theirs, **self.options}, key=self.algorithm, explicit=self.options)[0]

    def _answering(self, content: Any, context: Any, module: nn.Module) -> Answering:
        algorithm, number = self._algorithm(content), context.node_config.get(self.client_id_key)
        if type(number) is not int or number < 0:
            raise Invalid(f"node config {self.client_id_key} = {number!r} must be the client's number, such as 0")
        train, test = self.data_fn(context)
        received = to_tensors(content[self.arrayrecord_key])
        module.load_state_dict(received)
        names = [key for key in content.array_records if key != self.arrayrecord_key]
        return Answering(
            algorithm,
            Task(module, loss=self.loss),
            Federation.from_clients([train], client_tests=None if test is None else [test]),
            client=number,
            received=received,
            others={key: to_tensors(content[key]) for key in names},
            memory=recall(context, MEMORY),
            round=int(content.get(self.configrecord_key, {}).get("server-round", 1)) - 1,
            seed=int(content.get(ALGORITHM, {}).get("seed", 0)),
            device=self.device,
        )

    def _reply(self, message: Any, answering: Answering, records: dict[str, Any], numbers: dict[str, Any]) -> Any:
        app = flwr("app")
        metrics = app.MetricRecord({**numbers, self.client_id_key: answering.client})
        return app.Message(app.RecordDict({**records, "metrics": metrics}), reply_to=message)


def strategy_client(
    model_fn: Callable[[], nn.Module], data_fn: Data, algorithm: str = "fedavg", **settings: Any
) -> StrategyClient:
    """`settings` are fields of `StrategyClient` (loss, device ...) or options of the recipe (lr, mu ...)."""
    own = {name: settings.pop(name) for name in OWN_SETTINGS if name in settings}
    options = check_options(algorithms.recipe(algorithm), settings, algorithm)
    return StrategyClient(model_fn=model_fn, data_fn=data_fn, algorithm=algorithm, options=options, **own)
