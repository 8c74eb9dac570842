"""One ClientApp for deployed folders, strategies and clients of one's own."""

from pathlib import Path
from typing import Any

import pytest

from consilience.core.settings import Invalid
from consilience.flower import client_app

pytest.importorskip("flwr")


class Echo:
    """A client of one's own that answers with what it was sent."""

    def train(self, message: Any, context: Any) -> Any:
        """The same content."""
        from flwr.app import Message

        return Message(message.content, reply_to=message)

    evaluate = train


def _message(kind: str) -> Any:
    from flwr.app import ConfigRecord, Message, RecordDict

    return Message(RecordDict({"config": ConfigRecord({"round": 3})}), dst_node_id=1, message_type=kind)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_any_object_that_trains_and_evaluates_is_a_client(kind: str) -> None:
    reply = client_app(Echo())(_message(kind), None)
    assert dict(reply.content["config"]) == {"round": 3}


def test_only_a_client_that_introduces_itself_answers_queries(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="query"):
        client_app(Echo())(_message("query"), None)
    assert "query" in str(client_app(tmp_path)._registered_funcs)


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        ((lambda: None,), {}, "give its rows as well"),
        (("folder",), {"lr": 0.1}, "need data_fn"),
        (("folder", None, "scaffold"), {}, "need data_fn"),
        ((lambda: None, lambda context: None, "fedavg"), {"mu": 0.1}, "mu"),
    ],
)
def test_what_is_no_client_is_refused(arguments: tuple[Any, ...], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        client_app(*arguments, **settings)
