"""Recurrent layers of torch: dropout between the layers drawn from a key, and LSTMs of a group of clients at once.

vmap has no rule for the LSTM kernels of cuDNN and oneDNN and calls them once for every client. `_Layer` computes one
layer of all clients' LSTMs: one matrix product for all inputs, then for every position one product and one kernel for
the gates; its gradient has one product for each weight, over all positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.layers import grouped

Drop = Callable[[Tensor, float], Tensor]
BATCHED_BY_TORCH = ("cpu",)
"""Where torch's own recurrent layers are used. Elsewhere they are cuDNN's, which vmap cannot batch, and which look for
their weights in one piece of memory: a recorded step that is replayed finds the piece of another step there, and gives
wrong gradients silently."""


def layer_by_layer(func: Any, args: tuple[Any, ...], drop: Drop) -> Any:
    """torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu, padded or packed, with `drop` between the layers."""
    packed = isinstance(args[3], (list, tuple))
    data, (hx, params, biases, layers, rate, train, both_ways) = args[: 1 + packed], args[1 + packed : 8 + packed]
    tail = args[8 + packed :]
    ways = 2 if both_ways else 1
    each = len(params) // layers
    projects = each > ways * (4 if biases else 2)
    by_hand = data[0].device.type not in BATCHED_BY_TORCH or (func is torch.lstm and not projects and grouped.grouped())
    by_hand = by_hand and not packed
    if not by_hand and not (train and rate > 0 and layers > 1):
        return func(*data, hx, params, biases, layers, 0.0, train, both_ways, *tail)
    x, states = data[0], list[tuple[Tensor, ...]]()
    for layer in range(layers):
        part = slice(layer * ways, (layer + 1) * ways)
        start = [state[part] for state in hx] if isinstance(hx, (list, tuple)) else hx[part]
        weights = list(params[layer * each : (layer + 1) * each])
        if by_hand:
            x, *ends = _layer(func, x, start, weights, ways, biases, tail[0])
        else:
            x, *ends = func(x, *data[1:], start, weights, biases, 1, 0.0, train, both_ways, *tail)
        states.append(tuple(ends))
        if train and rate > 0 and layer < layers - 1:
            x = drop(x, rate)
    return (x, *(torch.cat(parts) for parts in zip(*states)))


def _layer(
    func: Any, x: Tensor, start: Any, weights: list[Tensor], ways: int, biases: bool, batch_first: bool
) -> tuple[Tensor, ...]:
    """Outputs and last states of one layer of a group of clients, in each direction."""
    kind = x.device.type
    start = list(start) if isinstance(start, (list, tuple)) else [start]
    if torch.is_autocast_enabled(kind):
        to = torch.get_autocast_dtype(kind)
        x, start, weights = x.to(to), [state.to(to) for state in start], [weight.to(to) for weight in weights]
    x = x.transpose(0, 1) if batch_first else x
    each, found = len(weights) // ways, []
    for way in range(ways):
        mine, states = weights[way * each : (way + 1) * each], [state[way] for state in start]
        if func is torch.lstm and each == (4 if biases else 2):
            bias = mine[2] + mine[3] if biases else None
            found.append(grouped.apply(_Layer(reverse=way == 1), x, *states, *mine[:2], bias))
        else:
            found.append(_one_by_one(func, x, states, mine, biases, reverse=way == 1))
    outputs, *last = zip(*found)
    out = torch.cat(outputs, -1)
    return (out.transpose(0, 1) if batch_first else out, *(torch.stack(parts) for parts in last))


def _one_by_one(
    func: Any, x: Tensor, states: list[Tensor], weights: list[Tensor], biases: bool, *, reverse: bool
) -> tuple[Tensor, ...]:
    """The definition of a layer in one direction, position by position; x [T, B, in], states [B, H]."""
    inner, outer = (weights[2], weights[3]) if biases else (None, None)
    project = weights[-1] if len(weights) > (4 if biases else 2) else None
    steps = F.linear(x, weights[0], inner).unbind(0)
    h, outputs = states[0], []
    for step in reversed(steps) if reverse else steps:
        hidden = F.linear(h, weights[1], outer)
        if func is torch.gru:
            (reset, update, new), (to_reset, to_update, to_new) = step.chunk(3, -1), hidden.chunk(3, -1)
            new = (new + (reset + to_reset).sigmoid() * to_new).tanh()
            h = new + (update + to_update).sigmoid() * (h - new)
        elif func is torch.lstm:
            h, cell, _ = _gates(step + hidden, states[1])
            states = [h, cell]
            h = h if project is None else F.linear(h, project)
        else:
            h = (step + hidden).tanh() if func is torch.rnn_tanh else (step + hidden).relu()
        outputs.append(h)
    out = torch.stack(outputs[::-1] if reverse else outputs)
    return (out, h, *states[1:])


class _Layer:
    """One direction of a layer: x [k, T, B, in], h and c [k, B, H], weights [k, 4H, in], [k, 4H, H], bias [k, 4H]."""

    def __init__(self, *, reverse: bool) -> None:
        self._reverse = reverse

    def forward(self, clients: int | None, *given: Tensor | None) -> tuple[Tensor, ...]:
        """Outputs [k, T, B, H], the last output and the last cell [k, B, H]."""
        self._alone = clients is None
        if self._alone:
            given = tuple(None if part is None else part.unsqueeze(0) for part in given)
        x, h, c, inner, outer, bias = given
        assert x is not None and h is not None and c is not None and inner is not None and outer is not None
        with torch.autocast(x.device.type, enabled=False):
            k, length, rows, _ = x.shape
            if bias is None:
                gates = torch.bmm(x.flatten(1, 2), inner.mT)
            else:
                gates = torch.baddbmm(bias.unsqueeze(1), x.flatten(1, 2), inner.mT)
            steps = gates.view(k, length, rows, -1).transpose(0, 1).contiguous().unbind(0)  # [k, B, 4H] each
            self._x, self._inner, self._outer, self._biased = x, inner, outer, bias is not None
            self._h, self._c, self._kept = [h], [c], list[Tensor]()
            for step in reversed(steps) if self._reverse else steps:
                h, c, kept = _cell(step, torch.bmm(self._h[-1], outer.mT), self._c[-1])
                self._h.append(h)
                self._c.append(c)
                self._kept.append(kept)
        out = torch.stack(self._order(self._h[1:]), 1)
        return self._shaped(out, self._h[-1].clone(), self._c[-1].clone())

    def backward(self, out: Tensor, last_h: Tensor, last_c: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients by the inputs, in their order."""
        if self._alone:
            out, last_h, last_c = (part.unsqueeze(0) for part in (out, last_h, last_c))
        with torch.autocast(out.device.type, enabled=False):
            steps = self._order(list(out.unbind(1)))
            gates, h, c = list[Tensor](), steps[-1] + last_h, last_c.contiguous()
            for at in range(len(steps) - 1, -1, -1):
                grad, c = _cell_gradient(h, c, self._c[at], self._c[at + 1], self._kept[at])
                gates.append(grad)
                h = torch.bmm(grad, self._outer) if at == 0 else torch.baddbmm(steps[at - 1], grad, self._outer)
            gates.reverse()
            before = torch.stack(self._order(self._h[:-1]), 1).flatten(1, 2)  # [k, T B, H]
            grads = torch.stack(self._order(gates), 1).flatten(1, 2)  # [k, T B, 4H]
            x = self._x.flatten(1, 2)
            found = [
                torch.bmm(grads, self._inner).view(self._x.shape),
                h,
                c,
                torch.bmm(grads.mT, x),
                torch.bmm(grads.mT, before),
            ]
            bias = grads.sum(1) if self._biased else None
        parts = self._shaped(*found, *([] if bias is None else [bias]))
        return (*parts, None) if bias is None else parts

    def _order(self, steps: list[Tensor]) -> list[Tensor]:
        return steps[::-1] if self._reverse else steps

    def _shaped(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.squeeze(0) for part in parts) if self._alone else parts


def _cell(inputs: Tensor, hidden: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The next output and cell, and the gates [k, B, 4H]."""
    if inputs.is_cuda:  # one kernel, over the clients' rows
        h, c, kept = torch.ops.aten._thnn_fused_lstm_cell(inputs.flatten(0, 1), hidden.flatten(0, 1), c.flatten(0, 1))
        return tuple(part.view(*inputs.shape[:2], -1) for part in (h, c, kept))  # type: ignore[return-value]
    return _gates(inputs + hidden, c)


def _gates(values: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    enter, keep, fresh, show = values.chunk(4, -1)
    enter, keep, fresh, show = enter.sigmoid(), keep.sigmoid(), fresh.tanh(), show.sigmoid()
    c = keep * c + enter * fresh
    return show * c.tanh(), c, torch.cat([enter, keep, fresh, show], -1)


def _cell_gradient(h: Tensor, c: Tensor, before: Tensor, after: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by the gates before their nonlinearities and by the cell before, from those by output and cell."""
    if h.is_cuda:
        flat = (part.flatten(0, 1) for part in (h, c, before, after, kept))
        gates, cell, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*flat, False)
        return gates.view(*h.shape[:2], -1), cell.view(h.shape)
    enter, keep, fresh, show = kept.chunk(4, -1)
    shown = after.tanh()
    cell = c + h * show * (1 - shown * shown)
    gates = (
        cell * fresh * enter * (1 - enter),
        cell * before * keep * (1 - keep),
        cell * enter * (1 - fresh * fresh),
        h * shown * show * (1 - show),
    )
    return torch.cat(gates, -1), cell * keep
