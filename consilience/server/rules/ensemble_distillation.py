"""FedDF's server: the averaged model is distilled from the ensemble of client models on unlabelled rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from consilience.core import rng, tree
from consilience.core.capabilities import Buffers, Reasons, TrainsModel, Wraps
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Count, Invalid, Positive
from consilience.core.task import Task
from consilience.core.tree import Tree, map_leaves
from consilience.privacy import SpendsPrivacy
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.public_rows import NoiseRows, PublicRows
from consilience.task.gradients import gradient

BETAS, EPS = (0.9, 0.999), 1e-8  # Adam's usual ones
ROUNDING = 64  # epsilons: probabilities that differ by less count as equal
BLOCK = 1024  # rows at a time through the clients' models


@dataclass(frozen=True, kw_only=True)
class EnsembleDistillation(Wraps):
    """An averaging server, then `steps` of Adam (cosine annealed) on KL(softmax(mean_k f_k(x)) || softmax(f(x))).

    x are public rows, f_k the client models, f the average, which is trained further.
    """

    averaging: Averaging = field(default_factory=Averaging)
    public: PublicRows = field(default_factory=NoiseRows)
    steps: Count = 500
    batch_size: Count = 128
    lr: Positive = 1e-3
    holds = "averaging"
    refuses: ClassVar[Reasons] = {
        Buffers: "updates from a buffer, and the models in it are of different ages",
        TrainsModel: "trains the model itself: there can be only one such server",
        SpendsPrivacy: "protects what it averages, and the ensemble reads each model as it was sent",
    }
    needs_each_reply = True  # every model is evaluated

    @property
    def reads(self) -> tuple[str, ...]:
        """What averaging reads of the replies."""
        return self.averaging.reads

    def init(self, start: Tree, clients: int) -> Tree:
        """As averaging; refuses public rows that cannot be loaded."""
        self.public.public_rows(start["params"], 0)
        return self.averaging.init(start, clients)

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The model, to all."""
        return self.averaging.broadcast(state, ids)

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The average; learning needs the task."""
        return self.averaging.update(state, cohort)

    def model(self, state: Tree) -> Tree:
        """The average after distillation."""
        return self.averaging.model(state)

    def check_against(self, task: Task) -> None:
        """Refuse a task without class numbers."""
        if not task.kind.class_per_row:
            raise Invalid(f"ensemble distillation needs class numbers, one for each row: {task.kind.name} has none")

    def train(self, task: Task, state: Tree, cohort: Cohort) -> Tree:
        """The state with the average distilled from the clients' models."""
        self.check_against(task)
        model = state["model"]
        x = self.public.public_rows(model["params"], cohort.seed)
        _refuse_unreadable(task, model, x)
        wanted = teacher(task, cohort, x)
        with torch.no_grad():
            known = torch.cat([torch.softmax(task.apply(model, part, train=False)[0], 1) for part in x.split(BLOCK)])
        if bool((known - wanted).abs().max() <= ROUNDING * torch.finfo(wanted.dtype).eps):
            return state  # nothing to learn, and Adam would magnify rounding
        params, first, second = model["params"], *(map_leaves(torch.zeros_like, model["params"]) for _ in range(2))
        for step in range(self.steps):
            draw = rng.host(cohort.seed, "distillation", cohort.round, step)
            chosen = torch.from_numpy(draw.permutation(len(x))[: self.batch_size]).to(x.device)
            grads = _slope(task, {**model, "params": params}, x[chosen], wanted[chosen])
            first = map_leaves(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, grads)
            second = map_leaves(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g.square(), second, grads)
            params = self._moved(params, first, second, step)
        return {**state, "model": {**model, "params": params}}

    def _moved(self, params: Tree, first: Tree, second: Tree, step: int) -> Tree:
        """One step of Adam, whose rate falls to 0 as a half cosine."""
        rate = self.lr * 0.5 * (1 + math.cos(math.pi * step / self.steps)) / (1 - BETAS[0] ** (step + 1))
        spread = 1 - BETAS[1] ** (step + 1)
        return map_leaves(lambda w, m, v: w - rate * m / ((v / spread).sqrt() + EPS), params, first, second)


@torch.no_grad()
def _refuse_unreadable(task: Task, model: Tree, x: Tensor) -> None:
    try:
        task.apply(model, x[:1], train=False)
    except (RuntimeError, ValueError, TypeError, IndexError) as problem:
        raise Invalid(
            f"the model cannot read public rows of shape {list(x.shape[1:])} and type {x.dtype}, which must be as the "
            f"clients' rows are: {problem}"
        ) from problem


@torch.no_grad()
def teacher(task: Task, cohort: Cohort, x: Tensor) -> Tensor:
    """[n, classes] softmax of the mean logits of the models that were heard, clients in order of their ids."""
    order = np.argsort(cohort.ids)
    heard = order if cohort.heard is None or not cohort.heard.any() else order[cohort.heard[order]]
    total = torch.zeros((), device=x.device)
    for client in heard:
        sent = tree.rows(cohort.reply["model"], int(client))
        total = total + torch.cat([task.apply(sent, part, train=False)[0] for part in x.split(BLOCK)])
    return torch.softmax(total / len(heard), 1)


def _slope(task: Task, model: Tree, x: Tensor, wanted: Tensor) -> Tree:
    """The gradient of the cross-entropy with the teacher, which is that of KL."""

    # Paper: does not say in which mode the student learns. Here: evaluation mode, because public rows may be of another
    # domain, whose batch statistics are not those of the clients.
    def objective(params: Tree) -> tuple[Tensor, None]:
        output, _ = task.apply({**model, "params": params}, x, train=False)
        return -(wanted * torch.log_softmax(output, 1)).sum(1).mean(), None

    with torch.no_grad():
        return gradient(objective, model["params"])[0]
