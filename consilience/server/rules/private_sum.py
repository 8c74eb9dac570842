"""Distributed differential privacy: a secure mean of updates that clients have clipped and added noise to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import RoundKeys
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.protocols import Engine
from consilience.core.screening import Limits
from consilience.core.settings import Invalid, Positive, check
from consilience.core.tree import Tree
from consilience.privacy import History, Mechanism, Spending
from consilience.privacy.noise_shares import NoiseShares
from consilience.privacy.proof import refuse_unproven
from consilience.privacy.round_keys import fresh, name_of, release_of
from consilience.server.averaging.steps.plain import Replace
from consilience.server.protocols import Step, take_step
from consilience.server.rules.private_averaging import PrivateAveraging, refuse_statistics, with_one_more

WITHIN = "within"  # of a reply: by this the bound is moved


@dataclass(frozen=True, kw_only=True)
class PrivateSum:
    """w + (sum_k clip(w_k - w, bound) + noise of the clients) / n for the n in a secure sum, then the server's step.

    The participants of a sum are public, so n reveals nothing about rows. most_bound: the limit of an adaptive bound.
    """

    shares: NoiseShares
    bound: Positive = 1.0
    delta: Positive = 1e-5
    epsilon: Positive | None = None
    most_bound: Positive | None = None
    step: Step = field(default_factory=Replace)
    needs_each_reply = False
    independent_replies = True
    charged_first = True  # the server sees a sum as soon as it is unmasked
    noise_seed = None

    def __post_init__(self) -> None:
        check(self)
        _ = self.spending  # refuses an impossible delta

    @staticmethod
    def of(server: PrivateAveraging, *, clients: int, colluding: int, most: Any) -> PrivateSum:
        """The rule with the settings of one whose server clips; `most` gives the largest bound for its shares."""
        if server.noise_seed is not None:
            raise Invalid("algorithm.noise_seed is for noise that the server draws: in secure sums clients draw it")
        if server.rate != 1:
            raise Invalid(
                f"algorithm.rate = {server.rate:g} with deploy.secure_aggregation = true: the server knows who takes "
                "part, so that sampling hides nobody from it, and it would not be counted. Leave the rate at 1"
            )
        shares = NoiseShares(noise=server.noise, clients=clients, colluding=colluding, adaptive=server.adaptive)
        largest = most(shares)
        if server.bound > largest:
            raise Invalid(
                f"algorithm.bound = {server.bound:g}, and a secure sum with noise of {server.noise:g} has room for "
                f"{largest:.3g}: raise deploy.secure_clip"
            )
        return PrivateSum(
            shares=shares,
            bound=server.bound,
            delta=server.delta,
            epsilon=server.epsilon,
            most_bound=largest,
            step=server.step,
        )

    @property
    def spending(self) -> Spending:
        """What its rounds cost, if as few nodes stay as may."""
        return Spending(noise=self.shares.noise, delta=self.delta, discrete=True)

    def check_surroundings(self, algorithm: Algorithm, engine: Engine, limits: Limits | None) -> None:
        """Refuse what lets one client decide about another's reply."""
        refuse_unproven(algorithm, engine, limits, rate=1.0)

    def round_key(self, round: int, keys: RoundKeys | None) -> bytes:
        """The round's name in the ledger: no noise is drawn from it."""
        return (keys or fresh)(round)

    def init(self, start: Tree, clients: int) -> Tree:
        """The start model; refuses what would be released without noise."""
        refuse_statistics(start)
        return {
            "model": start,
            "step": self.step.init(start["params"]),
            "spent": torch.zeros((0, 3), dtype=torch.float64),  # [mechanisms, (noise, rate, rounds)]
            "bound": torch.tensor(self.bound, dtype=torch.float64),
        }

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The global model, and the bound to which clients clip."""
        return Broadcast(shared={"model": state["model"], "bound": state["bound"]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The next global model; `release` in the notes names it."""
        if cohort.secret is None:
            raise Invalid("PrivateSum names its releases by a key of the round: give the cohort a `secret`")
        before, bound = state["model"]["params"], float(state["bound"])
        # every reply of a secure sum is the mean of all
        merged = {name: cohort.reply["model"]["params"][name][0] for name in before}
        params, step = take_step(self.step, before, merged, state["step"], cohort.round)
        spent = with_one_more(state["spent"], self.shares.noise, 1.0)
        after = {**state, "model": {"params": params, "buffers": {}}, "step": step, "spent": spent}
        adaptive = self.shares.adaptive
        if adaptive is not None:
            within = float(cohort.reply[WITHIN][0]) / self.shares.count_scale(bound)
            following = min(adaptive.next(bound, adaptive.limited(0.5 + within)), self.most_bound or math.inf)
            after["bound"] = torch.tensor(following, dtype=torch.float64)
        notes: Notes = {"release": release_of(cohort.secret), "key": name_of(cohort.secret), "bound": bound}
        return after, {**notes, "weights": torch.full((len(cohort),), 1 / len(cohort), dtype=torch.float64)}

    def spent_in(self, state: Tree) -> History:
        """The rounds that led to a state."""
        return {Mechanism(noise, rate, True): int(rounds) for noise, rate, rounds in state["spent"].tolist()}

    def model(self, state: Tree) -> Tree:
        """The global model."""
        return state["model"]
