"""How clients' gradients and models differ, compared with the same rows assigned at random."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.exchange import Broadcast
from consilience.core.federation import Federation, Rows
from consilience.core.plans import Batch, Work
from consilience.core.rng import host
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.vectorised.engine import Vectorised
from consilience.server.geometry.similarity import all_pairs
from consilience.task.gradients import gradient

MOST_CLIENTS = 64
MOST_NUMBERS = 300_000_000  # gradients of all probed clients together
MOST_ROWS = 512  # inputs on which clients' models are compared


@dataclass(frozen=True, kw_only=True)
class FullGradient:
    """A client rule that computes the mean loss and its gradient over all rows, in evaluation mode."""

    work: Work = field(default_factory=lambda: Work(epochs=1, batch_size=256, shuffle=False, trains=False))

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """All sums at zero."""
        zero = torch.zeros((), dtype=torch.float64, device=message["round"].device)
        return {
            "gradient": tree.map_leaves(torch.zeros_like, message["model"]["params"]),
            "loss": zero,
            "rows": zero,
        }

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """Add one batch."""

        def loss(params: Tree) -> tuple[Tensor, Tensor]:
            model = {"params": params, "buffers": message["model"]["buffers"]}
            losses = task.row_losses(task.apply(model, batch.x, train=False)[0], batch)
            mask = torch.ones_like(losses) if batch.mask is None else batch.mask
            found = (losses * mask).sum()
            return found, torch.stack([found.detach(), mask.sum()])

        grads, (total, rows) = gradient(loss, message["model"]["params"])
        return {
            "gradient": tree.map_leaves(torch.add, carry["gradient"], grads),
            "loss": carry["loss"] + total,
            "rows": carry["rows"] + rows,
        }

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The means."""
        rows = carry["rows"].clamp(min=1)
        mean = tree.map_leaves(lambda total: total / rows.to(total.dtype), carry["gradient"])
        return {"gradient": mean, "loss": carry["loss"] / rows}, memory


@dataclass(frozen=True, eq=False, kw_only=True)
class Dissimilarity:
    """Of clients' gradients at one model: B = sqrt(E|g_k|^2 / |E g_k|^2), clients weighted by their rows."""

    b: float
    chance: float  # B of clients of the same sizes with random rows
    cosines: np.ndarray  # [m, m] between clients' gradients
    opposed: float  # share of pairs with a negative cosine
    loss: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Similarity:
    """Linear CKA between the models that clients train from the same start, on the same inputs."""

    matrix: np.ndarray  # [m, m]
    mean: float  # over pairs
    chance: float  # of clients of the same sizes with random rows
    of: str  # features or outputs


def b_of(gradients: Tensor, sizes: np.ndarray) -> tuple[float, np.ndarray]:
    """(B, [m, m] cosines) of [m, P] gradients, weighted by sizes; B is infinite where they cancel."""
    weights = torch.from_numpy(sizes / sizes.sum()).to(gradients.dtype)
    products = gradients @ gradients.mT  # [m, m]
    lengths = products.diagonal().clamp(min=0)
    mean_square, square_mean = float(weights @ lengths), float(weights @ products @ weights)
    b = float(np.sqrt(mean_square / square_mean)) if square_mean > 1e-30 * mean_square else float("inf")
    norms = lengths.sqrt()
    below = (norms[:, None] * norms[None, :]).clamp(min=1e-300)
    return (1.0 if mean_square == 0 else b), (products / below).clamp(-1, 1).cpu().numpy()


def gradients_of(engine: Vectorised, model: Tree, ids: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """([m, P] float64 gradients of clients' mean losses, [m] losses)."""
    found = engine.exchange(FullGradient(), Plain(), Broadcast(shared={"model": model}), ids, round=0, seed=0)
    flat = [leaf.flatten(1).to("cpu", torch.float64) for leaf in tree.leaves(found.reply["gradient"])]
    return torch.cat(flat, 1), found.reply["loss"].cpu().numpy()


def dissimilarity(engine: Vectorised, dealt: Vectorised, model: Tree, ids: np.ndarray) -> Dissimilarity:
    """Gradient dissimilarity at a model, for some clients and for clients of the same sizes with random rows."""
    sizes = engine.sizes[ids].astype(np.float64)
    gradients, losses = gradients_of(engine, model, ids)
    b, cosines = b_of(gradients, sizes)
    chance, _ = b_of(gradients_of(dealt, model, ids)[0], sizes)
    pairs = cosines[np.triu_indices(len(ids), 1)]
    return Dissimilarity(
        b=b,
        chance=chance,
        cosines=cosines,
        opposed=float((pairs < 0).mean()) if len(pairs) else 0.0,
        loss=float(losses @ sizes / sizes.sum()),
    )


def similarity(
    engine: Vectorised, dealt: Vectorised, algorithm: Algorithm, model: Tree, ids: np.ndarray, seed: int
) -> Similarity:
    """CKA between the models that clients train in one round from `model`."""
    stacks = []
    for here in (engine, dealt):
        here.restore({})
        sent = here.exchange(algorithm.client, Plain(), Broadcast(shared={"model": model}), ids, round=10**6, seed=seed)
        stacks.append(sent.reply["model"])
    x = _inputs(engine.federation)
    own, of = activations(engine.task, stacks[0], tree.to(x, engine.device))
    other, _ = activations(engine.task, stacks[1], tree.to(x, engine.device), of=of)
    matrix = all_pairs("cka_linear", own).cpu().numpy()
    chance = all_pairs("cka_linear", other).cpu().numpy()
    return Similarity(matrix=matrix, mean=_pair_mean(matrix), chance=_pair_mean(chance), of=of)


@torch.no_grad()
def activations(task: Task, models: Tree, x: object, of: str = "") -> tuple[Tensor, str]:
    """([m, n, d], what they are): features in front of the last layer, or outputs where these do not depend on it."""
    count = len(next(tree.leaves(models)))
    each = [tree.rows(models, k) for k in range(count)]
    if of != "outputs" and hasattr(task.module, "features"):
        found = torch.stack([task.features(model, x).flatten(1) for model in each])
        if of == "features" or count < 2 or not torch.equal(found[0], found[1]):
            return found, "features"
    return torch.stack([task.apply(model, x, train=False)[0].flatten(1) for model in each]), "outputs"


def dealt_at_random(federation: Federation, seed: int) -> Federation:
    """The same federation with its training rows assigned at random to clients of the same sizes."""
    train = federation.train
    owned = [torch.arange(int(a), int(a + n)) for a, n in zip(train.starts, train.sizes)]
    rows = torch.cat(owned)
    order = rows[torch.from_numpy(host(seed, "dealt rows").permutation(len(rows)))]
    starts = torch.cumsum(train.sizes, 0) - train.sizes
    weight = None if train.weight is None else train.weight[order]
    shuffled = Rows(x=tree.rows(train.x, order), y=train.y[order], starts=starts, sizes=train.sizes, weight=weight)
    return replace(federation, train=shuffled)


def probed(federation: Federation, parameters: int, seed: int) -> np.ndarray:
    """Ascending ids of the probed clients: all with rows, or a sample that fits the limits on memory and time."""
    ids = np.flatnonzero(federation.train.sizes.numpy() > 0)
    most = max(2, min(MOST_CLIENTS, MOST_NUMBERS // max(1, parameters)))
    return ids if len(ids) <= most else np.sort(host(seed, "probed clients").choice(ids, most, replace=False))


def _inputs(federation: Federation) -> object:
    """Some test rows, or training rows where there are none."""
    rows = federation.test if federation.test is not None and len(federation.test.y) else federation.train
    every = torch.linspace(0, len(rows.y) - 1, min(MOST_ROWS, len(rows.y))).to(torch.int64)
    return tree.rows(rows.x, every)


def _pair_mean(matrix: np.ndarray) -> float:
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    return float(pairs.mean()) if len(pairs) else 1.0
