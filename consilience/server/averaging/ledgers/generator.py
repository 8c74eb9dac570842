"""FedGen's generator, trained by the server without data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.core import rng
from consilience.core.exchange import Cohort
from consilience.core.settings import Checked, Count, Invalid, NonNegative, Positive
from consilience.core.tree import Tree, leaves, map_leaves
from consilience.server.protocols import RoundOutcome
from consilience.task.gradients import gradient
from consilience.task.latent import classifier, draw_labels, generate, new_generator


@dataclass(frozen=True, kw_only=True)
class Generator(Checked):
    """Features G(y, e) that the clients' classifiers assign to label y, weighted by each client's share of label y.

    min sum_k (share of label y that client k holds) CE(head_k(G(y, e)), y) + diversity exp(-mean |e - e'| |z - z'|).
    """

    noise_size: Count = 32
    hidden: Count = 128
    steps: Count = 50  # of Adam, per round
    batch_size: Count = 64
    lr: Positive = 0.01
    diversity: NonNegative = 1.0
    name = "generator"  # its key in the state and in the broadcast
    needs_each_reply = True  # it uses every client's classifier

    def initial(self, start: Tree, clients: int) -> Tree:
        """An untrained generator and uniform label shares."""
        weight = start["params"][classifier(start["params"]).weight]  # [C, d]
        classes, latent = weight.shape
        shares = torch.full((classes,), 1 / classes, dtype=torch.float64, device=weight.device)
        params = new_generator(classes, latent, noise=self.noise_size, hidden=self.hidden, like=weight)
        return {"params": params, "labels": shares, "ready": torch.zeros_like(shares[0])}

    def broadcast(self, ledger: Tree) -> Tree:
        """Send everything to every client."""
        return ledger

    def update(self, ledger: Tree, round: RoundOutcome) -> tuple[Tree, Tree]:
        """Train on this round's classifiers; the parameters are unchanged."""
        cohort = _in_order(round.cohort)
        if "labels" not in cohort.reply:
            raise Invalid("the ledger Generator needs the clients' label counts: use algorithm = 'fedgen'")
        counts = cohort.reply["labels"] * cohort.examples.unsqueeze(1)  # [m, C]
        if not bool(counts.sum() > 0):  # no client did a step
            return ledger, round.after
        weight, bias = classifier(round.before)
        if weight not in cohort.reply["model"]["params"]:
            raise Invalid(
                "the ledger Generator asks the clients' classifiers, but personal_layers keeps them with the clients"
            )
        params = cohort.reply["model"]["params"]
        heads = (params[weight], None if bias is None else params[bias])
        trained = self._train(ledger["params"], heads, counts, rng.key(cohort.seed, "generator", cohort.round))
        known = counts.sum(0)
        return {
            "params": trained,
            "labels": known / known.sum(),
            "ready": torch.ones_like(ledger["ready"]),
        }, round.after

    def _train(self, params: Tree, heads: tuple[Tensor, Tensor | None], counts: Tensor, key: int) -> Tree:
        """Adam steps from the last generator."""
        known = counts.sum(0)
        expertise = (counts / known.clamp(min=1)).to(heads[0].dtype)  # [m, C]: each client's share of a label
        draws = self._draws(known / known.sum(), expertise, key)

        def step(state: Tree, drawn: Draw) -> Tree:
            loss = functools.partial(self._loss, heads=heads, drawn=drawn)
            return _adam(state, gradient(loss, state["params"])[0], self.lr, drawn)

        state = {"params": params, **{name: map_leaves(torch.zeros_like, params) for name in ("mean", "square")}}
        repeat = _replayed if params["label"].is_cuda and self.steps > 1 else _repeated
        return repeat(step, state, draws)["params"]

    def _draws(self, shares: Tensor, expertise: Tensor, key: int) -> Draw:
        """The draws of all steps [S, ...] at once: on a GPU, drawing step by step takes longer than the steps."""
        counters = torch.arange(2 * self.steps, device=shares.device).reshape(-1, 2)
        keys = rng.fold(torch.tensor(key, device=shares.device), counters)  # [S, 2]
        labels = draw_labels(shares, keys[:, 0], self.batch_size)  # [S, n]
        noise = rng.normals(keys[:, 1], self.batch_size * self.noise_size)
        noise = noise.reshape(self.steps, self.batch_size, self.noise_size).to(expertise.dtype)
        apart = (noise.unsqueeze(1) - noise.unsqueeze(2)).square().mean(3)
        done = range(1, self.steps + 1)  # steps, this one included
        first, second = (
            torch.tensor([1 - beta**n for n in done], dtype=torch.float64).to(expertise) for beta in (0.9, 0.999)
        )
        of_each = labels.repeat(1, len(expertise))
        return Draw(labels, noise, expertise[:, labels].movedim(0, 1), apart, of_each, first, second)

    def _loss(self, params: Tree, *, heads: tuple[Tensor, Tensor | None], drawn: Draw) -> tuple[Tensor, tuple[()]]:
        z = generate(params, drawn.labels, drawn.noise)  # [n, d]
        logits = torch.einsum("nd,mcd->mnc", z, heads[0]) + (0 if heads[1] is None else heads[1].unsqueeze(1))
        wrong = F.cross_entropy(logits.flatten(0, 1), drawn.of_each, reduction="none").reshape(len(logits), -1)
        taught = (drawn.expertise * wrong).sum(0).mean()
        apart = (z.unsqueeze(0) - z.unsqueeze(1)).abs().mean(2) * drawn.apart
        return taught + self.diversity * torch.exp(-apart.mean()), ()


class Draw(NamedTuple):
    """The inputs of one generator step; stacked [S, ...] for several."""

    labels: Tensor  # [n]
    noise: Tensor  # [n, e]
    expertise: Tensor  # [m, n] of each client for these labels
    apart: Tensor  # [n, n] mean squared distances of the noise
    of_each: Tensor  # [m n] the labels, once for each client
    first: Tensor  # Adam's bias correction of the mean
    second: Tensor  # of the mean square


def _adam(state: Tree, grads: Tree, lr: float, drawn: Draw) -> Tree:
    """Parameters, mean and mean square after a step, with list operations over all leaves."""
    names = list(state["params"])  # a generator's leaves have one level
    params, mean, square = (tuple(leaves(state[part])) for part in ("params", "mean", "square"))
    slope = tuple(leaves(grads))
    add, multiply, divide = torch._foreach_add, torch._foreach_mul, torch._foreach_div
    mean = add(multiply(mean, 0.9), multiply(slope, 0.1))
    square = add(multiply(square, 0.999), multiply(multiply(slope, 0.001), slope))
    scale = add(torch._foreach_sqrt(divide(square, drawn.second)), 1e-8)
    params = torch._foreach_sub(params, divide(divide(multiply(mean, lr), drawn.first), scale))
    return {"params": dict(zip(names, params)), "mean": dict(zip(names, mean)), "square": dict(zip(names, square))}


def _repeated(step: Callable[[Tree, Draw], Tree], state: Tree, draws: Draw) -> Tree:
    """The state after one step for each draw."""
    for number in range(len(draws.labels)):
        state = step(state, Draw(*(part[number] for part in draws)))
    return state


def _replayed(step: Callable[[Tree, Draw], Tree], state: Tree, draws: Draw) -> Tree:
    """The same on a GPU: a step is some hundred short kernels, which are recorded once and replayed."""
    held, at = map_leaves(torch.clone, state), torch.zeros(1, dtype=torch.int64, device=draws.labels.device)

    def advance() -> None:
        after = step(held, Draw(*(part.index_select(0, at).squeeze(0) for part in draws)))
        torch._foreach_copy_(list(leaves(held)), list(leaves(after)))
        at.add_(1)

    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        advance()  # libraries choose their kernels before a recording
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        advance()
    for _ in range(len(draws.labels) - 1):
        graph.replay()
    here.synchronize()  # the recording's memory is released now
    return held


def _in_order(cohort: Cohort) -> Cohort:
    """The cohort by client id, since many steps would magnify rounding from another order of summation."""
    if (cohort.ids[1:] > cohort.ids[:-1]).all():
        return cohort
    order = torch.from_numpy(cohort.ids.argsort()).to(cohort.examples.device)
    return Cohort(
        reply=map_leaves(lambda leaf: leaf[order], cohort.reply),
        ids=cohort.ids[order.cpu().numpy()],
        examples=cohort.examples[order],
        steps=cohort.steps[order.cpu().numpy()],
        round=cohort.round,
        seed=cohort.seed,
    )
