"""Strategies inside an app's own subclass, inside Flower's wrappers, and in apps of Flower's former API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'consilience[flower]'")

import flower_messages as fm

from consilience.core.settings import Invalid
from consilience.flower.strategies.strategy import strategy

pytestmark = pytest.mark.usefixtures("untraced")

WEIGHT = torch.arange(12.0).reshape(3, 4)


def rounds_of(mine: Any, change: Callable[[Any], Any] = lambda arrays: arrays, rounds: int = 3) -> list[torch.Tensor]:
    """The model after each round; client k moves it by (k + 1) / 10, and `change` is applied between rounds."""
    arrays, found = fm.record({"w": WEIGHT}), []
    for number in range(1, rounds + 1):
        replies = []
        for node, message in fm.ask(mine, number, arrays).items():
            step = (fm.NODES.index(node) + 1) / 10
            moved = {"w": fm.values_of(message.content["arrays"])["w"] + step}
            replies.append(fm.reply(message, {"arrays": moved}, {"num-examples": 10}))
        after, _ = mine.aggregate_train(number, replies)
        arrays = change(after)
        found.append(fm.values_of(arrays)["w"])
    return found


def test_noise_of_flowers_wrapper_leaves_the_servers_momentum(caplog: pytest.LogCaptureFixture) -> None:
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

    np.random.seed(0)
    noisy = DifferentialPrivacyServerSideFixedClipping(strategy("FedAvgM")(beta=0.9), 0.01, 10.0, num_sampled_clients=5)
    found = rounds_of(noisy)
    assert not [line for line in caplog.messages if "not called" in line or "starts anew" in line]
    np.random.seed(0)
    model, momentum = WEIGHT, 0.0
    for one in found:
        momentum = 0.9 * momentum + 0.3  # the mean of the five updates
        noise = np.random.normal(0.0, 0.01 * 10.0 / 5, (3, 4)).astype(np.float32)
        model = model + momentum + torch.from_numpy(noise)
        torch.testing.assert_close(one, model)


@pytest.mark.parametrize("name", ["FedAMP", "FedSwap", "SimFedSwap", "FedSplit"])
def test_a_rule_with_a_model_for_each_client_starts_anew_and_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"step": 1.0, "keeps_z": True} if name == "FedSplit" else {}
    mine, other = strategy(name)(**options), strategy(name)(**options)
    assert not any("starts anew" in line for line in _logged(caplog, lambda: rounds_of(mine)))
    lines = _logged(caplog, lambda: rounds_of(other, lambda arrays: fm.record({"w": WEIGHT * 2})))
    assert any(f"{name}: its model was changed between two rounds: it starts anew" in line for line in lines)


def test_another_model_between_rounds_starts_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    mine = strategy("FedAvgM")()
    changed = fm.record({"w": WEIGHT.double()})
    lines = _logged(caplog, lambda: rounds_of(mine, lambda _: changed, rounds=2))
    assert any("FedAvgM: its model was changed between two rounds" in line for line in lines)


def test_a_subclass_that_averages_by_itself_is_told_that_the_rule_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    base = strategy("SimProx")

    class Own(base):  # type: ignore[misc, valid-type]
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

            found, _ = self._check_and_log_replies(replies, is_train=True)
            return aggregate_arrayrecords([one.content for one in found], self.weighted_by_key), None

    lines = _logged(caplog, lambda: rounds_of(Own()))
    assert [line for line in lines if "not called" in line] == [
        "SimProx: its aggregate_train is not called, so its rule and checks are not used: call super().aggregate_train"
    ]


def test_a_subclass_that_passes_on_is_told_nothing_and_gives_the_same_model(caplog: pytest.LogCaptureFixture) -> None:
    base = strategy("SimProx")

    class Passing(base):  # type: ignore[misc, valid-type]
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return super().aggregate_train(server_round, replies)

    found: list[list[torch.Tensor]] = []
    assert not any("not called" in line for line in _logged(caplog, lambda: found.append(rounds_of(Passing()))))
    assert all(torch.equal(one, other) for one, other in zip(found[0], rounds_of(base()), strict=True))


def test_a_server_of_flowers_former_api_is_refused_by_name() -> None:
    from flwr.server import Server, SimpleClientManager

    server = Server(client_manager=SimpleClientManager(), strategy=strategy("SimProx")())
    with pytest.raises(Invalid, match=r"SimProx was given to a ServerApp of Flower's former API \(flwr.server\)"):
        server.fit(num_rounds=1, timeout=None)


def _logged(caplog: pytest.LogCaptureFixture, work: Callable[[], Any]) -> list[str]:
    caplog.clear()
    work()
    return [record.getMessage() for record in caplog.records]
