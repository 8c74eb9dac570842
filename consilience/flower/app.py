"""The ClientApp: passes Flower's messages to the object that answers them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from consilience.core.settings import Invalid


@runtime_checkable
class Answers(Protocol):
    """Answers the messages of a round; an optional method `query` answers introductions."""

    def train(self, message: Any, context: Any) -> Any:
        """The answer to a request to train."""

    def evaluate(self, message: Any, context: Any) -> Any:
        """The answer to a request to evaluate."""


def client_app(source: Any, data_fn: Any = None, algorithm: str = "fedavg", **settings: Any) -> Any:
    """A Flower ClientApp, for an app of `consilience deploy` or for a strategy of `consilience.flower`.

    client_app(folder)
        the app in a folder that `consilience deploy init` wrote.
    client_app(model_fn, data_fn, algorithm, **settings)
        clients of a strategy: `model_fn()` returns the module, `data_fn(context)` returns ((x, y), (x, y) or None), the
        training and test rows. Settings are loss, device, the names of Flower's records (`arrayrecord_key`,
        `configrecord_key`, `client_id_key`) and the recipe's options, such as lr and epochs; options of the algorithm
        itself (mu ...) come from the server unless they are given here. What a client remembers stays in Context.state.
    client_app(answers)
        any object with `train(message, context)` and `evaluate(message, context)`.
    """
    answers = _answers(source, data_fn, algorithm, settings)
    from consilience.flower.strategies.records import flwr

    app = flwr("clientapp").ClientApp()
    app.train()(answers.train)
    app.evaluate()(answers.evaluate)
    if hasattr(answers, "query"):
        app.query()(answers.query)
    return app


def _answers(source: Any, data_fn: Any, algorithm: str, settings: dict[str, Any]) -> Answers:
    if data_fn is not None:
        from consilience.flower.strategies.client import strategy_client

        return strategy_client(source, data_fn, algorithm, **settings)
    if settings or algorithm != "fedavg":
        raise Invalid(
            "client_app: an algorithm and its options need data_fn: client_app(model_fn, data_fn, algorithm, ...)"
        )
    if isinstance(source, Answers):
        return source
    if isinstance(source, (str, Path)):
        from consilience.flower.deploy.hosting import folder_client

        return folder_client(source)
    raise Invalid(
        f"client_app: {type(source).__name__} is neither a folder nor a client; "
        "to train a model, give its rows as well: client_app(model_fn, data_fn)"
    )
