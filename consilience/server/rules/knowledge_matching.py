"""FedAF's server: it trains on the clients' synthetic rows and matches their class statistics of real rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Checked, Count, Decay, NonNegative, Positive
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.server.rules.synthetic_training import SyntheticTraining, union
from consilience.task.latent import classifier


@dataclass(frozen=True, kw_only=True)
class KnowledgeMatching(Checked):
    """Cross-entropy on all synthetic rows + weight mean_c (KL(R_c | T_c) + KL(T_c | R_c)) / 2.

    R_c: the clients' mean softened probabilities of class c, by rows; T_c: the trained model's own, over the synthetic
    rows of a batch. Clients are sent V_c, the mean outputs that were reported last for every class.
    """

    steps: Count = 100
    batch_size: Count = 256
    lr: Positive = 0.01
    momentum: Decay = 0.9
    weight: NonNegative = 0.1
    temperature: Positive = 2.0
    needs_each_reply = True  # synthetic rows cannot be summed

    def init(self, start: Tree, clients: int) -> Tree:
        """The initial model, without class statistics."""
        head = start["params"][classifier(start["params"]).weight]
        table = torch.zeros(len(head), len(head), dtype=torch.float64, device=head.device)
        return {"model": start, "known": {"logits": table, "classes": torch.zeros_like(table[0])}}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The model and what is known of the classes, to all."""
        return Broadcast(shared={"model": state["model"], "known": state["known"]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The mean outputs of every class that was reported; training needs the task."""
        # Paper: clients send their means and get back V_c before they condense. Here: V_c is what they sent along with
        # their last rows, one model older, because a round is one exchange.
        means, heard = _by_class(cohort, "logits")
        logits = torch.where(heard.unsqueeze(1), means, state["known"]["logits"])
        classes = torch.where(heard, torch.ones_like(state["known"]["classes"]), state["known"]["classes"])
        return {**state, "known": {"logits": logits, "classes": classes}}, {}

    def train(self, task: Task, state: Tree, cohort: Cohort) -> Tree:
        """The model after training on what clients sent; unchanged if no client has rows of any class."""
        x, y = union(cohort)
        if not len(y):
            return state
        known, heard = _by_class(cohort, "probabilities")

        def apart(output: Tensor, labels: Tensor) -> Tensor:
            return self.weight * divergence(output, labels, known, heard, self.temperature)

        sgd = SyntheticTraining(steps=self.steps, batch_size=self.batch_size, lr=self.lr, momentum=self.momentum)
        return {**state, "model": sgd.fit(task, state["model"], x, y, cohort, apart if self.weight else None)}

    def model(self, state: Tree) -> Tree:
        """The trained model."""
        return state["model"]


def divergence(output: Tensor, labels: Tensor, known: Tensor, heard: Tensor, temperature: float) -> Tensor:
    """Mean over the classes of a batch of (KL(R_c | T_c) + KL(T_c | R_c)) / 2, from outputs [B, C] and R [C, C]."""
    every = torch.arange(len(known), device=labels.device)
    member = (labels.unsqueeze(1) == every).to(output.dtype)  # [B, C]
    count = member.sum(0)
    own = (member.T @ (output / temperature).softmax(1)) / count.clamp(min=1).unsqueeze(1)  # [C, C] T
    tiny = torch.finfo(torch.float32).tiny  # a probability of 0 on either side would be an infinite distance
    own, told = own.clamp(min=tiny), known.to(output.dtype).clamp(min=tiny)
    both = ((told - own) * (told.log() - own.log())).sum(1) / 2  # = (KL(R|T) + KL(T|R)) / 2
    counted = ((count > 0) & heard).to(output.dtype)
    return (both * counted).sum() / counted.sum().clamp(min=1)


def _by_class(cohort: Cohort, name: str) -> tuple[Tensor, Tensor]:
    """([C, C] means over all clients' rows of a class, [C] whether any client has the class)."""
    rows = cohort.examples.to(torch.float64).unsqueeze(1) * cohort.reply["labels"].to(torch.float64)  # [m, C]
    total = rows.sum(0)
    sums = torch.einsum("mc,mcd->cd", rows, cohort.reply[name].to(torch.float64))
    return sums / total.clamp(min=1e-12).unsqueeze(1), total > 0
