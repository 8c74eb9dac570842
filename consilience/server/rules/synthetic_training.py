"""FedDM's server: it trains the model on the union of the clients' synthetic rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consilience.core import rng
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Checked, Count, Decay, NonNegative, Positive
from consilience.core.task import Task
from consilience.core.tree import Tree, map_leaves
from consilience.task.gradients import gradient

Term = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class SyntheticTraining(Checked):
    """`steps` of SGD from the last model on all clients' synthetic rows, within `radius` of it (None: no limit)."""

    steps: Count = 100
    batch_size: Count = 256
    lr: Positive = 0.01
    momentum: Decay = 0.9
    weight_decay: NonNegative = 0.0
    radius: Positive | None = None
    needs_each_reply = True  # synthetic rows cannot be summed

    def init(self, start: Tree, clients: int) -> Tree:
        """The start model."""
        return {"model": start}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The model, to all."""
        return Broadcast(shared={"model": state["model"]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """Nothing yet: training needs the task."""
        return state, {}

    def train(self, task: Task, state: Tree, cohort: Cohort) -> Tree:
        """The model after training on what clients sent; unchanged if no client has rows of any class."""
        x, y = union(cohort)
        return {"model": self.fit(task, state["model"], x, y, cohort)} if len(y) else state

    def fit(self, task: Task, model: Tree, x: Tensor, y: Tensor, cohort: Cohort, term: Term | None = None) -> Tree:
        """The model after `steps` on rows [q, ...] of classes [q]; `term(output, y)` is added to the mean loss."""
        origin = model["params"]
        velocity = map_leaves(torch.zeros_like, origin)
        for step in range(self.steps):
            draw = rng.host(cohort.seed, "synthetic", cohort.round, step)
            chosen = torch.from_numpy(draw.permutation(len(y))[: self.batch_size]).to(y.device)
            key = torch.tensor(rng.key(cohort.seed, "synthetic", cohort.round, step), device=y.device)
            grads, buffers = _slope(task, model, x[chosen], y[chosen], key, term)
            grads = map_leaves(lambda g, w: g + self.weight_decay * w, grads, model["params"])
            velocity = map_leaves(lambda v, g: self.momentum * v + g, velocity, grads)
            params = map_leaves(lambda w, v: w - self.lr * v, model["params"], velocity)
            model = {"params": self._within(params, origin), "buffers": buffers}
        return model

    def model(self, state: Tree) -> Tree:
        """The trained model."""
        return state["model"]

    def _within(self, params: Tree, origin: Tree) -> Tree:
        """The projection onto the ball of the radius, within which the synthetic rows represent the real ones."""
        if self.radius is None:
            return params
        moves = map_leaves(torch.sub, params, origin)
        length = torch.stack([move.to(torch.float64).square().sum() for move in moves.values()]).sum().sqrt()
        scale = (self.radius / length.clamp(min=self.radius)).clamp(max=1)
        return map_leaves(lambda w, move: w + scale.to(w.dtype) * move, origin, moves)


def union(cohort: Cohort) -> tuple[Tensor, Tensor]:
    """(rows, class numbers) of every class that a client has, clients in order of their ids."""
    order = torch.from_numpy(np.argsort(cohort.ids))
    x, known = (cohort.reply[name][order.to(cohort.reply[name].device)] for name in ("x", "labels"))
    who, what = torch.nonzero(known > 0, as_tuple=True)  # [q], [q] pairs of client and class
    return x[who, what].flatten(0, 1), what.repeat_interleave(x.shape[2])


def _slope(task: Task, model: Tree, x: Tensor, y: Tensor, key: Tensor, term: Term | None) -> tuple[Tree, Tree]:
    def objective(params: Tree) -> tuple[Tensor, Tree]:
        output, moved = task.apply({**model, "params": params}, x, train=True, key=key)
        loss = task.losses(output, y).mean()
        return (loss if term is None else loss + term(output, y)), moved

    with torch.no_grad():
        return gradient(objective, model["params"])
