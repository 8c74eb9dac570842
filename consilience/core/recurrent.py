"""Recurrent layers of torch: dropout between the layers drawn from a key."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Drop = Callable[[Tensor, float], Tensor]


def layer_by_layer(func: Any, args: tuple[Any, ...], drop: Drop) -> Any:
    """torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu, padded or packed, with `drop` between the layers."""
    packed = isinstance(args[3], (list, tuple))
    data, (hx, params, biases, layers, rate, train, both_ways) = args[: 1 + packed], args[1 + packed : 8 + packed]
    tail = args[8 + packed :]
    if not (train and rate > 0 and layers > 1):
        return _call(func, *data, hx, params, biases, layers, 0.0, train, both_ways, *tail)
    ways = 2 if both_ways else 1
    each = len(params) // layers
    x, states = data[0], list[tuple[Tensor, ...]]()
    for layer in range(layers):
        part = slice(layer * ways, (layer + 1) * ways)
        start = [state[part] for state in hx] if isinstance(hx, (list, tuple)) else hx[part]
        weights = list(params[layer * each : (layer + 1) * each])
        x, *ends = _call(func, x, *data[1:], start, weights, biases, 1, 0.0, train, both_ways, *tail)
        states.append(tuple(ends))
        if layer < layers - 1:
            x = drop(x, rate)
    return (x, *(torch.cat(parts) for parts in zip(*states)))


def _call(func: Any, *args: Any) -> Any:
    with warnings.catch_warnings():  # the weights are values of their own here, gathered for cuDNN at every call
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        return func(*args)
