"""Clients swap models between rounds, with periodic averaging (FedSwap, SimFedSwap)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.rng import host
from consilience.core.settings import Checked, Count, Fraction, Invalid, NonNegative, Probability
from consilience.core.tree import Tree
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.steps.plain import Replace
from consilience.server.averaging.weighting.by_size import ByExamples
from consilience.server.geometry.model_similarity import Layerwise, ModelSimilarity
from consilience.server.geometry.pairing import MinimumSimilarity, Pairing
from consilience.server.protocols import Combine, Step, Weighting, read_by, take_step

NOBODY = -1


@dataclass(frozen=True, kw_only=True)
class Swapping(Checked):
    """`every` - 1 rounds end with a swap, the next with an average, and so on; a swap moves whole models, buffers too.

    A client keeps the model it holds until it next answers; one that holds none is sent the last average. Only clients
    that answered swap. Between averages, `model` is what an average at this point would give. The server keeps one
    model for each client that replied since the last average: `room` says how many there can be (a number, a share of
    all clients, None: all).
    """

    every: Count = 3
    swap_percentage: Probability = 1.0
    pairing: Pairing = field(default_factory=MinimumSimilarity)
    similarity: ModelSimilarity = field(default_factory=Layerwise)
    room: Count | Fraction | None = None
    weighting: Weighting = field(default_factory=ByExamples)
    combine: Combine = field(default_factory=WeightedMean)
    step: Step = field(default_factory=Replace)
    needs_each_reply = True  # every model is kept

    @property
    def reads(self) -> tuple[str, ...]:
        """What the weighting reads of the replies."""
        return read_by(self.weighting)

    def init(self, start: Tree, clients: int) -> Tree:
        """The initial model as the average; no client holds another model."""
        device = next(tree.leaves(start)).device
        return {
            "model": start,
            "average": start,
            "held": tree.map_leaves(lambda leaf: leaf.new_empty((0, *leaf.shape)), start),  # [n, ...]
            "holders": torch.empty(0, dtype=torch.int64, device=device),  # [n]
            "room": torch.tensor(self._places(clients)),
            "weighting": self.weighting.init(start, clients),
            "step": self.step.init(start["params"]),
        }

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """To each client the model that it holds, or the last average."""
        place = {holder: row for row, holder in enumerate(state["holders"].tolist())}
        own = torch.tensor([place.get(int(client), NOBODY) for client in ids], device=state["holders"].device)

        def pick(held: Tensor, average: Tensor) -> Tensor:
            theirs = average.expand(len(ids), *average.shape)
            if not place:
                return theirs
            has = (own != NOBODY).reshape(-1, *(1,) * average.dim())
            return torch.where(has, held[own.clamp(min=0)], theirs)

        return Broadcast(shared={}, personal={"model": tree.map_leaves(pick, state["held"], state["average"])})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """A swap, or in every `every`-th round an average."""
        cohort = _in_order(cohort)
        averaged, notes = self._average(state, cohort)
        if (cohort.round + 1) % self.every == 0:
            nobody = {"held": tree.rows(state["held"], slice(0, 0)), "holders": state["holders"][:0]}
            return {**averaged, "average": averaged["model"], **nobody, "room": state["room"]}, notes
        source, swap_notes = self._swap(state, cohort)
        held, holders = self._shelve(state, cohort, tree.rows(cohort.reply["model"], source))
        kept = {key: state[key] for key in ("average", "room", "weighting", "step")}
        return {**kept, "model": averaged["model"], "held": held, "holders": holders}, {**notes, **swap_notes}

    def model(self, state: Tree) -> Tree:
        """The average of the current models."""
        return state["model"]

    def _average(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The weighted mean of the replies: by default N_k / N of the clients that hold the models now."""
        last = state["average"]
        weights, weighting, notes = self.weighting.weigh(cohort, last, state["weighting"])
        merged = self.combine.merge(cohort.reply["model"], weights)
        params, step = take_step(self.step, last["params"], merged["params"], state["step"], cohort.round)
        model = {"params": params, "buffers": merged["buffers"]}
        return {"model": model, "weighting": weighting, "step": step}, {"weights": weights, **notes}

    def _swap(self, state: Tree, cohort: Cohort) -> tuple[Tensor, Notes]:
        """([m] whose model each client holds now, what to report)."""
        places = np.arange(len(cohort)) if cohort.heard is None else np.flatnonzero(cohort.heard)
        count = int(len(places) // 2 * self.swap_percentage + 1e-9)  # Paper: may be fractional. Here: its floor.
        similarity, source, notes = np.zeros((len(places), len(places))), np.arange(len(cohort)), {}
        if count and self.pairing.needs_similarity:
            answered = tree.rows(cohort.reply["model"]["params"], torch.from_numpy(places))
            found = self.similarity.compare(answered, state["average"]["params"])
            similarity, notes = found.detach().cpu().numpy(), {"similarity": found}
        for a, b in self.pairing.pairs(similarity, count, host(cohort.seed, "swap", cohort.round)):
            source[places[a]], source[places[b]] = places[b], places[a]
        held_from = torch.from_numpy(cohort.ids[source])
        return torch.from_numpy(source).to(state["holders"].device), {**notes, "model_of": held_from}

    def _shelve(self, state: Tree, cohort: Cohort, models: Tree) -> tuple[Tree, Tensor]:
        """(models, holders) with this cohort's in front; others keep their models while there is room."""
        before, places = state["holders"].cpu().numpy(), int(state["room"])
        if len(cohort) > places:
            raise Invalid(
                f"{len(cohort)} clients take part, and the server has room for {places} models: raise Swapping.room "
                f"(now {self.room!r}) to the number of clients that a round can have"
            )
        absent = np.flatnonzero(~np.isin(before, cohort.ids))[: places - len(cohort)]
        holders = torch.from_numpy(np.concatenate([cohort.ids, before[absent]])).to(state["holders"].device)
        held = tree.take(state["held"], absent)
        return tree.map_leaves(lambda new, old: torch.cat([new, old]), models, held), holders

    def _places(self, clients: int) -> int:
        if self.room is None:
            return clients
        return min(clients, self.room if isinstance(self.room, int) else max(1, int(self.room * clients + 1e-9)))


def traffic(
    method: Literal["fedavg", "fedswap", "simfedswap"],
    *,
    clients: Count,
    model_bytes: NonNegative,
    h1: Count,
    h2: Count,
) -> float:
    """Bytes in h1 x h2 steps by the paper's formulas; what a run really moves is measured, in its rows.

    FedAvg is taken to communicate at every step (the printed savings of 86.66 % and 80 % need that), FedSwap's clients
    to send each other their models, which ours do through the server.
    """
    models = {"fedavg": 2 * h1 * h2, "fedswap": h2 + 1, "simfedswap": 2 * h2}
    if method not in models:
        raise Invalid(f"method = {method!r} is not one of {', '.join(models)}")
    return models[method] * clients * model_bytes


def _in_order(cohort: Cohort) -> Cohort:
    """The same clients by ascending id, so that ties and draws do not depend on who came first."""
    if (np.diff(cohort.ids) > 0).all():
        return cohort
    order = np.argsort(cohort.ids)
    index = torch.from_numpy(order)
    return Cohort(
        reply=tree.map_leaves(lambda leaf: leaf[index.to(leaf.device)], cohort.reply),
        ids=cohort.ids[order],
        examples=cohort.examples[index.to(cohort.examples.device)],
        steps=cohort.steps[order],
        round=cohort.round,
        seed=cohort.seed,
        heard=None if cohort.heard is None else cohort.heard[order],
        counts=cohort.counts,
    )
