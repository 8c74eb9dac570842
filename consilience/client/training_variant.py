"""Named alternatives to plain local training, for recipes that work with any local training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from consilience.client.local_training import LocalTraining
from consilience.client.memory.models import PreviousModel
from consilience.client.siamese_training import SiameseTraining
from consilience.client.solver_wrappers import without_weight_decay
from consilience.core.protocols import ClientRule
from consilience.core.settings import Invalid, NonNegative, check


@runtime_checkable
class TrainingVariant(Protocol):
    """An alternative to plain local training."""

    def applied_to(self, training: LocalTraining) -> ClientRule:
        """A client rule with the solver, work, terms and memories of `training`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Siamese:
    """FedSiam-DA's clients; the options are those of `SiameseTraining`. Needs projection and prediction heads."""

    mu: NonNegative = 0.1
    freeze_global: bool = False
    history: Literal["epoch", "round"] = "epoch"
    sequential: bool = False
    stop_gradient: bool = True
    predictor: bool = True

    def __post_init__(self) -> None:
        check(self)
        if self.freeze_global and self.sequential:
            raise Invalid("sequential = True has no effect with freeze_global = True: only one model moves")

    def applied_to(self, training: LocalTraining) -> SiameseTraining:
        """Siamese training; clients also keep their previous model in memory."""
        memory = training.memory
        if "previous" not in [part.name for part in memory]:
            memory = (*memory, PreviousModel())
        # Paper: does not say which optimiser the copy has. Here: the client's rate and momentum, with a velocity of
        # its own, and no weight decay, because the stop-gradient term is all that reaches it.
        copies = None if self.freeze_global else without_weight_decay(training.solver)
        return SiameseTraining(
            solver=training.solver,
            copy_solver=copies,
            work=training.work,
            mu=self.mu,
            freeze_global=self.freeze_global,
            history=self.history,
            sequential=self.sequential,
            stop_gradient=self.stop_gradient,
            predictor=self.predictor,
            terms=training.terms,
            memory=memory,
            augment=training.augment,
        )
