"""FedAF's client: synthetic rows that match the client's rows and the class means of all clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from consilience.client.condensed_rows import Start, first_rows, membership, no_rows_yet, outputs_and_features
from consilience.client.solver_wrappers import refuse_accumulation
from consilience.client.solvers import SGD, Solver
from consilience.core import rng
from consilience.core.evaluate import ONE_PASS
from consilience.core.plans import Batch, Work
from consilience.core.protocols import ClientRule
from consilience.core.settings import Count, Fraction, Invalid, NonNegative, Positive, check
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.task.gradients import gradient
from consilience.task.latent import classifier


@dataclass(frozen=True, kw_only=True)
class ClassKnowledge:
    """One pass without training: per-class sums of the received model's outputs and softened probabilities."""

    temperature: Positive = 2.0
    work: Work = ONE_PASS

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """All sums at zero."""
        return _no_knowledge(message)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """Add one batch."""
        output = task.apply(message["model"], batch.x, train=False)[0]  # [B, C]
        member = membership(batch, len(carry["rows"]), output.dtype)
        return {
            "logits": carry["logits"] + member.T @ output,
            "probabilities": carry["probabilities"] + member.T @ (output / self.temperature).softmax(1),
            "rows": carry["rows"] + member.sum(0),
        }

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The sums."""
        return carry, memory


@dataclass(frozen=True, kw_only=True)
class Condensation:
    """min over s of sum_c |mean f(x_c; w') - mean f(s_c; w')|^2 + agreement SW^2(mean z(s_c; w'), V_c).

    f is the model's output z and, where the module has `features(x)`, its features; w' = keep w + (1 - keep) noise, new
    in each step; V_c are the mean outputs of all clients' rows of class c. The reply holds the synthetic rows, the
    share of every class, and by class the received model's mean output and mean softened probabilities over the
    client's rows.
    """

    per_class: Count = 10
    shape: tuple[Count, ...] | None = None  # of a row; None: the input size of the model's first dense layer
    start: Start = "means"
    keep: Fraction = 0.9
    agreement: NonNegative = 0.1
    temperature: Positive = 2.0
    clip: Positive | None = 2.0  # maximum gradient norm over all synthetic rows
    solver: Solver = field(default_factory=lambda: SGD(lr=0.2))
    work: Work = field(default_factory=lambda: Work(epochs=50, batch_size=256))

    def __post_init__(self) -> None:
        check(self)
        refuse_accumulation(self.solver)

    @property
    def pre_training(self) -> ClientRule:
        """A pass over the rows with the received model."""
        return ClassKnowledge(temperature=self.temperature)

    def check_against(self, task: Task) -> None:
        """Refuse a task without class numbers."""
        if not task.kind.class_per_row:
            raise Invalid(f"condensation needs class numbers, one for each row: {task.kind.name} has none")

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """Zero rows, which the first step initialises."""
        self.check_against(task)
        return no_rows_yet(message["model"]["params"], self.per_class, self.shape, self.solver)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """One gradient step of the synthetic rows towards the class means of a batch and of all clients."""
        x = torch.where(carry["steps"] > 0, carry["x"], first_rows(carry["x"], batch, self.start))
        model = {**message["model"], "params": self._resampled(message["model"]["params"], batch.key)}
        classes = len(x)
        member = membership(batch, classes, x.dtype)
        count = member.sum(0)  # [C]
        wanted = (member.T @ outputs_and_features(task, model, batch.x)) / count.clamp(min=1).unsqueeze(1)  # [C, d]
        here, known = (count > 0).to(x.dtype), message["known"]["classes"].to(x.dtype)

        def apart(rows: Tree) -> tuple[Tensor, Tensor]:
            seen = outputs_and_features(task, model, rows["x"].flatten(0, 1))
            found = seen.reshape(classes, self.per_class, -1).mean(1)  # [C, d]
            matching = ((found - wanted).square().sum(1) * here).sum()
            # Paper: a sliced Wasserstein distance between two class means, by random projections. Here: the mean over
            # all directions, because between two single points it is |u - v|^2 / C exactly.
            aside = (found[:, :classes] - message["known"]["logits"].to(x.dtype)).square().mean(1)
            loss = matching + self.agreement * (aside * here * known).sum()
            return loss, loss.detach()

        grads, loss = gradient(apart, {"x": x})
        after, solver = self.solver.step({"x": x}, self._clipped(grads), carry["solver"], message["round"])
        return {
            "x": after["x"],
            "solver": solver,
            "labels": carry["labels"] + count,
            "loss": carry["loss"] + loss,
            "steps": carry["steps"] + 1,
        }

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The synthetic rows, the class shares, and the received model's mean outputs on the real rows."""
        seen = message["seen"] if "seen" in message else _no_knowledge(message)
        rows = seen["rows"].clamp(min=1).unsqueeze(1)
        reply = {
            "x": carry["x"],
            "labels": carry["labels"] / carry["labels"].sum().clamp(min=1),
            "logits": seen["logits"] / rows,
            "probabilities": seen["probabilities"] / rows,
            "loss": carry["loss"] / carry["steps"].clamp(min=1),
        }
        return reply, memory

    def _resampled(self, params: Tree, key: Tensor) -> Tree:
        """keep w + (1 - keep) w~ for weights; biases and scales (one axis) are unchanged."""
        # Paper: w~ is a new initial model. Here: normal numbers of the deviation of PyTorch's initial weights,
        # 1 / sqrt(3 inputs), because a rule does not know how its user's model was initialised.
        if self.keep == 1:
            return params
        weights = {name: leaf for name, leaf in params.items() if leaf.dim() > 1}
        noise = rng.normals(rng.fold(key, 2**33 + 1), sum(leaf.numel() for leaf in weights.values()))
        parts = noise.split([leaf.numel() for leaf in weights.values()])
        mixed = {}
        for (name, leaf), part in zip(weights.items(), parts):
            fresh = part.reshape(leaf.shape) / math.sqrt(3 * math.prod(leaf.shape[1:]))
            mixed[name] = self.keep * leaf + (1 - self.keep) * fresh.to(leaf.dtype)
        return {**params, **mixed}

    def _clipped(self, grads: Tree) -> Tree:
        if self.clip is None:
            return grads
        norm = grads["x"].square().sum().sqrt()
        return {"x": grads["x"] * (self.clip / norm.clamp(min=self.clip))}


def _no_knowledge(message: Tree) -> Tree:
    params = message["model"]["params"]
    classes = len(params[classifier(params).weight])
    table = torch.zeros(classes, classes, dtype=torch.float64, device=message["round"].device)
    return {"logits": table, "probabilities": table, "rows": table[0]}
