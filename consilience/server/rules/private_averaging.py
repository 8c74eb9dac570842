"""A mean of clipped updates with Gaussian noise: what it releases says little about any one client."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.remote import each
from consilience.core.rng import host
from consilience.core.settings import Fraction, Invalid, Positive, check
from consilience.core.tree import Tree, here, map_leaves, map_rows
from consilience.privacy import Spending, Spent
from consilience.server.averaging.steps.replace import Replace
from consilience.server.protocols import Step


@dataclass(frozen=True, kw_only=True)
class PrivateAveraging:
    """w + (sum_k clip(w_k - w, bound) + N(0, (noise bound)^2)) / (rate K), then the server's step.

    The denominator is the expected number of clients, which says nothing about who was there; so every round moves the
    model, also one without replies. `epsilon`: a round that would spend more than this is not done.
    """

    bound: Positive = 1.0
    noise: Positive = 1.0
    rate: Fraction = 1.0
    delta: Positive = 1e-5
    epsilon: Positive | None = None
    step: Step = field(default_factory=Replace)

    def __post_init__(self) -> None:
        check(self)
        _ = self.spending  # refuses an impossible delta

    @property
    def spending(self) -> Spending:
        """What its rounds cost."""
        return Spending(noise=self.noise, rate=self.rate, delta=self.delta)

    @property
    def needs_each_reply(self) -> bool:
        """It clips each."""
        return True

    @property
    def independent_replies(self) -> bool:
        """Whether one client's update is used must not depend on another's: the sum would move by more than `bound`."""
        return True

    @property
    def moves_without_replies(self) -> bool:
        """A round without replies adds noise, too: else its absence would tell."""
        return True

    def init(self, start: Tree, clients: int) -> Tree:
        """The start model; refuses what would be released without noise."""
        if start["buffers"]:
            first = next(iter(start["buffers"]))
            raise Invalid(
                f"the model keeps statistics of its data ({first}), which clipping and noise do not cover: use a model "
                "without batch norm, such as norm = 'group'"
            )
        rounds = torch.zeros((), dtype=torch.int64)
        return {
            "model": start,
            "step": self.step.init(start["params"]),
            "clients": torch.tensor(clients),
            "spent": rounds,
        }

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The global model to all."""
        return Broadcast(shared={"model": state["model"]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The next global model, if the budget allows for it."""
        rounds = int(state["spent"]) + 1
        self.refuse_overspending(rounds)
        before = state["model"]["params"]
        expected = self.rate * int(state["clients"])
        total = _sum_of_clipped(cohort, before, self.bound)
        draw = host(cohort.seed, "private averaging", cohort.round)
        deviation = self.noise * self.bound

        def moved(name: str, value: Tensor) -> Tensor:
            noise = torch.as_tensor(deviation * draw.standard_normal(tuple(value.shape)), device=value.device)
            return (value.to(torch.float64) + (total[name] + noise) / expected).to(value.dtype)

        merged = {name: moved(name, value) for name, value in before.items()}
        params, step = self.step.move(before, merged, state["step"])
        after = {"model": {"params": params, "buffers": {}}, "step": step, "clients": state["clients"]}
        weights = torch.full((len(cohort),), 1 / expected, dtype=torch.float64)
        return {**after, "spent": torch.tensor(rounds)}, {"weights": weights} if len(cohort) else {}

    def refuse_overspending(self, rounds: int) -> None:
        """Raise `Spent` if so many rounds cost more than the budget."""
        if self.epsilon is None or self.spending.epsilon(rounds) <= self.epsilon:
            return
        raise Spent(
            f"round {rounds} would bring epsilon to {self.spending.epsilon(rounds):.4g}, above the budget of "
            f"{self.epsilon:g} (delta = {self.delta:g}): {self.spending.rounds_within(self.epsilon)} rounds fit"
        )

    def model(self, state: Tree) -> Tree:
        """The global model: all that is released."""
        return state["model"]


def _sum_of_clipped(cohort: Cohort, before: Tree, bound: float) -> Tree:
    """sum_k (w_k - w) min(1, bound / |w_k - w|) in float64, over all parameters together."""
    if not len(cohort):
        return map_leaves(lambda value: torch.zeros_like(value, dtype=torch.float64), before)
    models = cohort.reply["model"]["params"]
    squares = torch.stack(each(_squares, list(models.values()), [before[name] for name in models])).sum(0)
    shares = (bound / squares.sqrt().clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1)
    return here(map_rows(_weighted_sum, models, {name: before[name] for name in models}, given=(shares,)))


def _updates(stacked: Tensor, start: Tensor) -> Tensor:
    return stacked.to(torch.float64) - start.to(torch.float64)


def _squares(stacked: Tensor, start: Tensor) -> Tensor:
    """[m] squared lengths of one tensor's updates."""
    return _updates(stacked, start).flatten(1).square().sum(1)


def _weighted_sum(stacked: Tensor, start: Tensor, shares: Tensor) -> Tensor:
    return torch.tensordot(shares.to(stacked.device), _updates(stacked, start), dims=1)
