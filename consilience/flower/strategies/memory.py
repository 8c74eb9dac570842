"""A client's memory between rounds, in Flower's `Context.state`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from consilience.client.personal_layers import Normalisation
from consilience.flower.strategies.records import StateDictLayout, to_record, to_tensors


def remember(context: Any, name: str, values: Mapping[str, Tensor]) -> None:
    """Keep tensors under a name until the client's next message."""
    context.state[name] = to_record(values)


def recall(context: Any, name: str) -> dict[str, Tensor] | None:
    """What was kept under this name; None before the first time."""
    return to_tensors(context.state[name]) if name in context.state else None


def personal_values(model: nn.Module) -> dict[str, Tensor]:
    """FedBN: the values of the normalisation layers, which stay at the client."""
    values = model.state_dict()
    names = Normalisation().personal_names(StateDictLayout.of(values).tree(values))
    return {name: value.detach().clone() for name, value in values.items() if name in names}


def load_shared(model: nn.Module, arrays: Any, personal_layers: Mapping[str, Tensor] | None = None) -> None:
    """FedBN: load an ArrayRecord into a model, with the client's own normalisation layers in place of the received."""
    with torch.no_grad():
        model.load_state_dict({**to_tensors(arrays), **(personal_layers or {})})
