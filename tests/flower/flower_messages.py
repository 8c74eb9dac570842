"""Flower's real messages in memory: a grid that knows nodes, and replies that a cohort would have sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Cohort
from consilience.core.tree import Tree

NODES = (8831, 17, 902144, 550, 4)  # as random as Flower's own; node NODES[k] is client k


class Grid:
    """The nodes that are connected."""

    def __init__(self, nodes: Sequence[int] = NODES) -> None:
        self.nodes = list(nodes)

    def get_node_ids(self) -> list[int]:
        return self.nodes


def record(values: dict[str, Tensor]) -> Any:
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(value.detach().cpu().numpy()) for name, value in values.items()})


def state_dict(model: Tree) -> dict[str, Tensor]:
    """Parameters and buffers in one dict: in another order than the library's, but parameters in the module's."""
    return {**model["buffers"], **model["params"]}


def values_of(arrays: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}


def reply(message: Any, arrays: dict[str, Any], metrics: dict[str, Any]) -> Any:
    from flwr.app import Message, MetricRecord, RecordDict

    records = {name: record(value) if isinstance(value, dict) else value for name, value in arrays.items()}
    return Message(RecordDict({**records, "metrics": MetricRecord(metrics)}), reply_to=message)


def ask(strategy: Any, round: int, arrays: Any, grid: Grid | None = None) -> dict[int, Any]:
    """node -> the message it is sent in this round."""
    from flwr.app import ConfigRecord

    messages = strategy.configure_train(round, arrays, ConfigRecord(), grid or Grid())
    return {message.metadata.dst_node_id: message for message in messages}


def answers(messages: dict[int, Any], cohort: Cohort, *, say_id: bool = True) -> list[Any]:
    """What the clients of a cohort, computed elsewhere, would have answered."""
    found = []
    for row, client in enumerate(cohort.ids.tolist()):
        one = tree.rows(cohort.reply, row)
        arrays = {"arrays": state_dict(one["model"])}
        metrics = {"num-examples": int(cohort.examples[row]), "num-steps": int(cohort.steps[row])}
        if say_id:
            metrics["partition-id"] = client
        for name, value in one.items():
            if isinstance(value, Tensor):
                metrics[name.replace("_", "-")] = float(value)
            elif name != "model":
                arrays[name] = value
        found.append(reply(messages[NODES[client]], arrays, metrics))
    return found


def train(
    strategy: Any, rounds: Iterable[Any], start: Tree, change: Callable[[list[Any]], list[Any]] | None = None
) -> Any:
    """Feed a strategy the cohorts of a run made by another engine; the last model it gives."""
    arrays = record(state_dict(start))
    for one in rounds:
        found = answers(ask(strategy, one.number, arrays), one.cohort)
        after, _ = strategy.aggregate_train(one.number, change(found) if change else found)
        arrays = arrays if after is None else after
    return arrays
