"""FedGen's two terms from the server's generator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.client.terms.term import Context
from consilience.core import rng
from consilience.core.plans import Batch
from consilience.core.settings import Checked, Count, Fraction, Invalid, NonNegative
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.task.latent import classifier, generate, labels_at
from consilience.task.losses import average


@dataclass(frozen=True, kw_only=True)
class GeneratedFeatures(Checked):
    """alpha CE(head(G(y')), y') + beta KL(head(G(y)) || model(x)), both times decay^round.

    G is the server's generator of features, y' are labels drawn by their share in the federation, y those of the batch.
    In round 0 the generator is untrained, and both are zero.
    """

    alpha: NonNegative = 1.0
    beta: NonNegative = 1.0
    decay: Fraction = 0.98
    count: Count = 32  # generated features per step

    @property
    def reads_broadcast(self) -> tuple[str, ...]:
        """The server ledger it reads."""
        return ("generator",)

    def check_against(self, task: Task) -> None:
        """Refuse a task without class numbers."""
        if not task.kind.class_per_row:
            raise Invalid(f"GeneratedFeatures needs one class number per row: {task.kind.name} has none")

    def __call__(self, params: Tree, context: Context, batch: Batch) -> Tensor:
        """The two terms for one batch."""
        self.check_against(context.task)
        if context.output.dim() != 2:
            raise Invalid(f"GeneratedFeatures needs one class number per row, not {tuple(batch.y.shape[1:])} of them")
        told, head = context.message["generator"], classifier(params)
        generator, like = told["params"], context.output
        # one hash for all; every row has a key of its own, so that padding does not change what it draws
        purposes = rng.folds(batch.key, (2**33, 2**33 + 1, 2**33 + 2))
        for_labels, for_drawn, for_batch = rng.split(purposes, max(self.count, len(batch.y))).unbind(-2)
        drawn = labels_at(told["labels"], rng.fractions(for_labels[: self.count]))
        keys = torch.cat([for_drawn[: self.count], for_batch[: len(batch.y)]])
        noise = rng.normals(keys, len(generator["noise"])).to(like.dtype)
        scores = head.logits(params, generate(generator, torch.cat([drawn, batch.y]), noise))

        met = drawn.unsqueeze(1) == torch.arange(scores.shape[1], device=drawn.device)
        taught = -(scores[: self.count].log_softmax(1) * met).sum() / self.count
        target = scores[self.count :].softmax(1).detach()
        apart = F.kl_div(like.log_softmax(1), target, reduction="none").sum(1)  # [B]
        decay = torch.as_tensor(self.decay, dtype=like.dtype, device=like.device)
        strength = told["ready"].to(like.dtype) * torch.pow(decay, context.message["round"])
        return strength * (self.alpha * taught + self.beta * average(apart, batch.mask))
