"""MOON's model-contrastive term."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.client.cosine import cosine
from consilience.client.terms.term import Context
from consilience.core.plans import Batch
from consilience.core.settings import Checked, Invalid, NonNegative, Positive
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.task.losses import average


@dataclass(frozen=True, kw_only=True)
class Contrastive(Checked):
    """-mu log(e^{a/T} / (e^{a/T} + e^{b/T})): a, b = cosines of z with the received and with the last own model's.

    z is the model's `features(x)`. Received and last own model are constants in evaluation mode. In a client's first
    round there is no last own model, and the term is zero.
    """

    mu: NonNegative = 1.0
    temperature: Positive = 0.5
    reads_features = True  # see `ReadsFeatures`

    @property
    def needs(self) -> tuple[str, ...]:
        """Names in the client's memory."""
        return ("previous",)

    def check_against(self, task: Task) -> None:
        """Refuse a model without `features(x)`."""
        if not callable(getattr(task.module, "features", None)):
            raise Invalid(
                f"{type(task.module).__name__} has no features(x) method, whose values Contrastive compares: "
                "use a model of the zoo, such as model.name = 'siamese', or add one that returns [B, d]"
            )

    def __call__(self, params: Tree, context: Context, batch: Batch) -> Tensor:
        """The model-contrastive loss, averaged over the batch."""
        self.check_against(context.task)
        task, previous = context.task, context.memory["previous"]
        with torch.no_grad():
            received = task.features(context.message["model"], batch.x)
            own = task.features(previous["model"], batch.x)
        z = context.features
        if z is None:
            model = {"params": params, "buffers": context.buffers}
            z = task.features(model, batch.x, train=True, mask=batch.mask, key=batch.key)
        # Paper: says nothing of a client's first round; the authors' code compares with the initial model then. Here:
        # left out, as FedSiam-DA does; in round 0 both have the same gradient, zero.
        closer = (cosine(z, received) - cosine(z, own)) / self.temperature  # [B]
        loss = average(-F.logsigmoid(closer), batch.mask)
        return self.mu * torch.where(previous["known"], loss, torch.zeros_like(loss))
