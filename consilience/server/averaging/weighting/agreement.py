"""Weights for cohorts with untrusted clients: excludes clients whose updates oppose most others over many rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from consilience.core.capabilities import Wraps
from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Decay, Fraction, Positive
from consilience.core.tree import Tree, flatten
from consilience.server.averaging.combining.tolerance import Faulty, faulty, require
from consilience.server.averaging.weighting.by_size import ByExamples
from consilience.server.averaging.weighting.capped import connected
from consilience.server.geometry.geometry import measure_updates
from consilience.server.protocols import Weighting


@dataclass(frozen=True, kw_only=True)
class AgreementWeights(Wraps):
    """`inner`'s weights, with up to `untrusted` clients excluded whose updates disagree with the others'.

    Of n replies, f may be hostile. Updates longer than `far` times the median are left out. Near copies of each other
    (cosines of at least `min_cosine`; larger groups than f + 1 must be honest and are ignored) count as one reply. Then
    client j's score is the mean cosine of its update with the others', without the f highest, since f accomplices could
    raise each other's scores; cosines are averaged over weight matrices (labels that differ between clients show most
    in the last layer), and scores over rounds. As far as f allows after the long ones and the copies, the client with
    the lowest score is excluded and no longer votes, one at a time; then all are scored again by the remaining clients,
    and a client with a score of zero or more is included after all. The stored score is the mean of the first and the
    last score: with the last alone, clients that were kept once would keep each other. No client counts more than
    `max_weight` times the median weight.
    """

    inner: Weighting = field(default_factory=ByExamples)
    untrusted: Faulty = 0.2
    memory: Decay = 0.9  # of the scores
    far: Positive = 3.0
    min_cosine: Fraction = 0.99
    max_weight: Positive = 2.0
    holds = "inner"
    needs_each_reply = True  # it compares them

    def init(self, start: Tree, clients: int) -> Tree:
        """The inner state, every client's score, and in how many rounds it was measured."""
        require("a defence", self.untrusted, clients, times=2, plus=1)
        zeros = torch.zeros(clients, dtype=torch.float64, device=next(iter(start["params"].values())).device)
        return {"inner": self.inner.init(start, clients), "score": zeros, "rounds": zeros.clone()}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """The inner weights of the clients that are kept."""
        weights, inner, notes = self.inner.weigh(cohort, model, state["inner"])
        f = min(faulty(self.untrusted, len(cohort)), (len(cohort) - 1) // 2)
        if f == 0:
            return weights, {**state, "inner": inner}, notes
        geometry = measure_updates(cohort.reply["model"]["params"], model["params"])
        cosine, moved = geometry.cosine.cpu().numpy(), geometry.movement.cpu().numpy()
        far = _far(moved, self.far, f)
        labels = _copies(cosine, ~far, self.min_cosine, f)
        left = max(0, f - int(far.sum()) - _spare(labels, ~far))
        share = np.where(far, 0.0, 1 / np.bincount(labels, minlength=len(labels))[labels])  # of one reply
        ids = torch.from_numpy(np.asarray(cohort.ids)).to(state["score"].device)
        before, rounds = state["score"][ids].cpu().numpy(), state["rounds"][ids].cpu().numpy()
        by_matrix = _by_matrix(cohort.reply["model"]["params"], model["params"])

        def smoothed(now: np.ndarray) -> np.ndarray:
            return np.where(rounds > 0, self.memory * before + (1 - self.memory) * now, now)

        voters = ~far
        first = now = scores(by_matrix, share * voters, labels, left)
        for hostile in range(left, 0, -1):
            voters = voters & (labels != _lowest(smoothed(now), labels, voters))
            now = scores(by_matrix, share * voters, labels, hostile - 1)
        kept = share * (voters | (~far & (smoothed(now) >= 0)))
        score = smoothed((first + now) / 2)
        given = weights.detach().to("cpu", torch.float64).numpy()
        given = np.minimum(given, self.max_weight * np.median(given)) * kept
        if not given.sum() > 0:
            given = kept
        after = {
            "inner": inner,
            "score": state["score"].index_copy(0, ids, torch.from_numpy(score).to(state["score"])),
            "rounds": state["rounds"].index_add(0, ids, torch.ones_like(ids, dtype=torch.float64)),
        }
        return torch.from_numpy(given / given.sum()).to(weights), after, {**notes, "agreement": torch.from_numpy(score)}


def _by_matrix(stacked: Tree, anchor: Tree) -> np.ndarray:
    """[m, m] the mean over weight matrices of the updates' cosines; over all tensors where there are no matrices."""
    flat, start = flatten(stacked), flatten(anchor)
    moving = [path for path, leaf in start.items() if leaf.is_floating_point() and leaf.numel()]
    matrices = [path for path in moving if start[path].dim() > 1] or moving
    found = [measure_updates({path: flat[path]}, {path: start[path]}).cosine for path in matrices]
    return torch.stack(found).mean(0).cpu().numpy()


def scores(cosine: np.ndarray, share: np.ndarray, labels: np.ndarray, f: int) -> np.ndarray:
    """[m] mean cosine with the others, each counting as `share` of a reply, without the f highest; copies do not vote
    for each other."""
    found = np.zeros(len(cosine))
    for row in range(len(cosine)):
        others = (labels != labels[row]) & (share > 0)
        order = np.argsort(-cosine[row][others], kind="stable")
        value, count = cosine[row][others][order], share[others][order]
        counted = np.clip(np.cumsum(count) - f, 0, count)
        found[row] = (counted @ value) / counted.sum() if counted.sum() > 0 else 0.0
    return found


def _far(moved: np.ndarray, times: float, f: int) -> np.ndarray:
    """[m] whether each update is too long; at most the f longest are."""
    far = moved > times * np.sort(moved)[(len(moved) - 1) // 2]
    far[np.argsort(-moved, kind="stable")[f:]] = False
    return far


def _copies(cosine: np.ndarray, near: np.ndarray, least: float, f: int) -> np.ndarray:
    """[m] each client's group of copies, as the index of its first member; its own if it has none, or too many."""
    alike = (cosine >= least) & near[:, None] & near[None, :]
    labels = connected(alike)
    size = np.bincount(labels, minlength=len(labels))[labels]
    return np.where(size <= f + 1, labels, np.arange(len(labels)))


def _spare(labels: np.ndarray, near: np.ndarray) -> int:
    """How many replies are copies of another."""
    return int(near.sum()) - len(np.unique(labels[near]))


def _lowest(score: np.ndarray, labels: np.ndarray, voters: np.ndarray) -> int:
    """The voters' group of copies with the lowest mean score."""
    groups = np.unique(labels[voters])
    means = [score[voters & (labels == group)].mean() for group in groups]
    return int(groups[int(np.argmin(means))])
