"""Differentially private averaging: a mean of clipped updates with Gaussian noise."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import RoundKeys
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.protocols import Engine
from consilience.core.remote import each
from consilience.core.rounds import TooFewClients
from consilience.core.screening import Limits
from consilience.core.settings import Fraction, Invalid, Positive, Whole, check
from consilience.core.tree import Tree, here, map_leaves, map_rows
from consilience.privacy import History, Mechanism, Spending, Spent
from consilience.privacy.adaptive_bound import AdaptiveBound
from consilience.privacy.proof import refuse_unproven
from consilience.privacy.round_keys import derived, fresh, name_of, normals, seeded
from consilience.server.averaging.steps.plain import Replace
from consilience.server.protocols import Step, take_step

__all__ = ["AdaptiveBound", "PrivateAveraging"]


@dataclass(frozen=True, kw_only=True)
class PrivateAveraging:
    """w + (sum_k clip(w_k - w, bound) + N(0, (noise bound)^2)) / (rate K), then the server's step.

    The denominator is the expected number of clients, which does not reveal participants; so every round changes the
    model, also one without replies. `adaptive`: the bound follows a quantile of the updates' lengths from `bound` on,
    and the noise on updates is larger by as much as that costs. `epsilon`: a round that would spend more than this is
    not done. `noise_seed`: draw all noise from this seed, so that a run can be repeated, but anyone who knows it can
    remove the noise.
    """

    bound: Positive = 1.0
    noise: Positive = 1.0
    rate: Fraction = 1.0
    delta: Positive = 1e-5
    epsilon: Positive | None = None
    noise_seed: Whole | None = None
    adaptive: AdaptiveBound | None = None
    step: Step = field(default_factory=Replace)
    needs_each_reply = True  # it clips each
    # whether one client's update is used must not depend on another's: the sum would move by more than `bound`
    independent_replies = True
    charged_first = False  # after a crash a round is done again with its key
    moves_without_replies = True  # a round without replies adds noise, too: otherwise its absence would reveal that

    def __post_init__(self) -> None:
        check(self)
        _ = self.spending  # refuses an impossible delta

    @property
    def spending(self) -> Spending:
        """What its rounds cost."""
        return Spending(noise=self.noise, rate=self.rate, delta=self.delta)

    def check_surroundings(self, algorithm: Algorithm, engine: Engine, limits: Limits | None) -> None:
        """Refuse what lets one client decide about another's reply."""
        refuse_unproven(algorithm, engine, limits, rate=self.rate)

    def round_key(self, round: int, keys: RoundKeys | None) -> bytes:
        """A key that was never used before, unless there is a seed for all of them."""
        return (keys or fresh)(round) if self.noise_seed is None else seeded(self.noise_seed, round)

    def init(self, start: Tree, clients: int) -> Tree:
        """The start model; refuses what would be released without noise."""
        refuse_statistics(start)
        bound = {}
        if self.adaptive is not None:
            self.adaptive.update_noise(self.noise, self.rate * clients)  # refuses where there is no such noise
            bound = {"bound": torch.tensor(self.bound, dtype=torch.float64)}
        return {
            "model": start,
            "step": self.step.init(start["params"]),
            "clients": torch.tensor(clients),
            "spent": torch.zeros((0, 3), dtype=torch.float64),  # [mechanisms, (noise, rate, rounds)]
            **bound,
        }

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The global model to all."""
        return Broadcast(shared={"model": state["model"]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The next global model, if the budget allows for it; `release` in the notes names it, `key` its key."""
        key = cohort.secret if self.noise_seed is None else seeded(self.noise_seed, cohort.round + 1)
        if key is None:
            raise Invalid("PrivateAveraging draws its noise from a key of the round: give the cohort a `secret`")
        if cohort.counts.get("worker_lost"):  # which one client's rows may have brought about
            raise TooFewClients(
                f"round {cohort.round + 1} is not released: a worker died, and the {cohort.counts['worker_lost']} "
                "replies that went with it would be missed in the sum. Resume the run"
            )
        self.refuse_overspending(1, after=self.spent_in(state))
        before = state["model"]["params"]
        expected, bound, noise = self.rate * int(state["clients"]), self.bound, self.noise
        if self.adaptive is not None:
            bound, noise = float(state["bound"]), self.adaptive.update_noise(self.noise, expected)
        deviation = noise * bound
        total, within = _sum_of_clipped(cohort, before, bound)
        told = "" if self.adaptive is None else f" within {within} of {len(cohort)}, bound {bound!r}"
        release = _digest(before, total, f"round {cohort.round} noise {deviation!r}{told}")
        # noise that anyone can repeat may as well be the same in every lane, whose sums differ in their last bits
        draw = derived(key, "noise", release if self.noise_seed is None else b"")
        drawn = np.split(normals(draw, "noise", sum(map(Tensor.numel, before.values()))), _ends(before))
        added = dict(zip(before, drawn))

        def moved(name: str, value: Tensor) -> Tensor:
            noisy = torch.as_tensor(deviation * added[name].reshape(tuple(value.shape)), device=value.device)
            return (value.to(torch.float64) + (total[name] + noisy) / expected).to(value.dtype)

        merged = {name: moved(name, value) for name, value in before.items()}
        params, step = take_step(self.step, before, merged, state["step"], cohort.round)
        model = {"params": params, "buffers": {}}
        after = {**state, "model": model, "step": step, "spent": with_one_more(state["spent"], self.noise, self.rate)}
        notes: Notes = {
            "release": name_of(derived(key, "release", release)),
            "key": name_of(key),
        }
        if self.adaptive is not None:
            share = self.adaptive.share(within, len(cohort), float(normals(draw, "count", 1)[0]), expected)
            after["bound"] = torch.tensor(self.adaptive.next(bound, share), dtype=torch.float64)
            notes["bound"] = bound
        weights = torch.full((len(cohort),), 1 / expected, dtype=torch.float64)
        return after, {**notes, "weights": weights} if len(cohort) else notes

    def refuse_overspending(self, rounds: int, *, after: History) -> None:
        """Raise `Spent` if this many more rounds exceed the budget."""
        if self.epsilon is None or self.spending.fits(rounds, self.epsilon, after):
            return
        cost, done = self.spending.epsilon(rounds, after), sum(after.values())
        raise Spent(
            f"round {done + rounds} would bring epsilon to {cost:.4g}, above the budget of {self.epsilon:g} "
            f"(delta = {self.delta:g}): {done + self.spending.rounds_within(self.epsilon, after)} rounds fit"
        )

    def spent_in(self, state: Tree) -> History:
        """The rounds that led to a state."""
        return {Mechanism(noise, rate): int(rounds) for noise, rate, rounds in state["spent"].tolist()}

    def model(self, state: Tree) -> Tree:
        """The global model: all that is released."""
        return state["model"]


def refuse_statistics(start: Tree) -> None:
    """Refuse a model with buffers, which would be released without noise."""
    if start["buffers"]:
        first = next(iter(start["buffers"]))
        raise Invalid(
            f"the model keeps statistics of its data ({first}), which clipping and noise do not cover: use a model "
            "without batch norm, such as norm = 'group'"
        )


def with_one_more(spent: Tensor, noise: float, rate: float) -> Tensor:
    """[mechanisms, (noise, rate, rounds)] after one more round: it grows with new mechanisms only."""
    same = (spent[:, 0] == noise) & (spent[:, 1] == rate)
    if not bool(same.any()):
        return torch.cat([spent, spent.new_tensor([[noise, rate, 1.0]])])
    return spent + torch.stack([torch.zeros_like(same), torch.zeros_like(same), same], 1).to(spent.dtype)


def _ends(leaves: Tree) -> np.ndarray:
    """End offsets of all leaves but the last in one flat vector."""
    return np.cumsum([leaf.numel() for leaf in leaves.values()])[:-1]


def _digest(before: Tree, total: Tree, what: str) -> bytes:
    """SHA-256 of all that a release is made of, so that noise is the same only where everything is.

    Two sums under the same noise would give away their difference, and two noises of one stream the sum: after a crash,
    a round that is done again with other replies or settings therefore has noise of its own.
    """
    digest = hashlib.sha256(what.encode())
    for name in before:
        for leaf in (before[name], total[name]):
            digest.update(f"\0{name} {leaf.dtype} {tuple(leaf.shape)}\0".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _sum_of_clipped(cohort: Cohort, before: Tree, bound: float) -> tuple[Tree, int]:
    """sum_k (w_k - w) min(1, bound / |w_k - w|) in float64, over all parameters together; how many were not clipped."""
    if not len(cohort):
        return map_leaves(lambda value: torch.zeros_like(value, dtype=torch.float64), before), 0
    models = cohort.reply["model"]["params"]
    squares = torch.stack(each(_squares, list(models.values()), [before[name] for name in models])).sum(0)
    shares = (bound / squares.sqrt().clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1)
    summed = here(map_rows(_weighted_sum, models, {name: before[name] for name in models}, given=(shares,)))
    return summed, int((squares <= bound**2).sum())


def _updates(stacked: Tensor, start: Tensor) -> Tensor:
    return stacked.to(torch.float64) - start.to(torch.float64)


def _squares(stacked: Tensor, start: Tensor) -> Tensor:
    """[m] squared lengths of one tensor's updates."""
    return _updates(stacked, start).flatten(1).square().sum(1)


def _weighted_sum(stacked: Tensor, start: Tensor, shares: Tensor) -> Tensor:
    shares = shares.to(stacked.device)
    by_row = shares.reshape(-1, *(1,) * (stacked.dim() - 1))
    # an update too long for its square to be a number has no share, and must not turn the sum into none either
    return torch.tensordot(shares, torch.where(by_row > 0, _updates(stacked, start), 0.0), dims=1)
