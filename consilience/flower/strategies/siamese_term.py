"""FedSiam-DA's objective for a training loop of one's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from consilience.client.cosine import cosine
from consilience.client.siamese_training import SiameseTraining
from consilience.core.settings import Invalid
from consilience.flower.strategies.terms import features_of, frozen


class FedSiamTerm:
    """mu (cos(z_past, z) - 1/2 cos(p', sg z) - 1/2 cos(p, sg z')): ' is a private copy of the received model.

    The copy learns too: give `parameters()` to the optimiser together with the model's. `previous` is the client's last
    state dict; call `new_epoch` before every local epoch but the first. The model needs features(x) and predict(z).
    """

    def __init__(
        self,
        model: nn.Module,
        previous: Mapping[str, Tensor] | None = None,
        mu: float = 0.1,
        freeze_global: bool = False,
    ) -> None:
        settings = SiameseTraining(mu=mu, freeze_global=freeze_global)  # checked there
        if not callable(getattr(model, "predict", None)):
            raise Invalid(f"{type(model).__name__} has no predict(z) method, which siamese training needs")
        self._mu, self._frozen = settings.mu, settings.freeze_global
        self._copy: Any = frozen(model) if freeze_global else copy.deepcopy(model).train()
        self._past = None if previous is None else frozen(model, previous)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the copy, as far as they learn."""
        return (value for value in self._copy.parameters() if value.requires_grad)

    def new_epoch(self, model: nn.Module) -> None:
        """The model as it is now becomes the past one."""
        self._past = frozen(model)

    def __call__(self, z: Tensor, p: Tensor, x: Any) -> Tensor:
        """The term for z = features(x) and p = predict(z) of a batch; its gradient reaches model and copy."""
        away = z.sum() * 0
        if self._past is not None:
            with torch.no_grad():
                past = features_of(self._past, x)
            away = cosine(past, z).mean()
        if self._frozen:
            with torch.no_grad():
                other = features_of(self._copy, x)
            return self._mu * (away - cosine(p, other).mean() / 2)
        other = features_of(self._copy, x)
        predicted = self._copy.predict(other)
        closer = cosine(p, other.detach()).mean() + cosine(predicted, z.detach()).mean()
        return self._mu * (away - closer / 2)
