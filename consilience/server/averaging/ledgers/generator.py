"""FedGen's generator, trained by the server without data."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core import rng
from consilience.core.exchange import Cohort
from consilience.core.settings import Checked, Count, Invalid, NonNegative, Positive
from consilience.core.tree import Tree, flatten, leaves, map_leaves, shaped_like, unflatten
from consilience.server.averaging.ledgers.generator_training import trained
from consilience.server.averaging.ledgers.recording import Recording
from consilience.server.protocols import RoundOutcome
from consilience.task.latent import classifier, new_generator


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
    queued = True  # on the device

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
        weight, bias = classifier(round.before)
        params = cohort.reply["model"]["params"]
        if weight not in params:
            raise Invalid(
                "the ledger Generator asks the clients' classifiers, but personal_layers keeps them with the clients"
            )
        counts = cohort.reply["labels"] * cohort.examples.unsqueeze(1)  # [m, C]
        seed = rng.key(cohort.seed, "generator", cohort.round)
        key = torch.full((), seed, dtype=torch.int64, device=counts.device)
        given: Tree = {"ledger": ledger, "weight": params[weight], "counts": counts, "key": key}
        if bias is not None:
            given["bias"] = params[bias]
        records = counts.is_cuda and not any(leaf.requires_grad for leaf in leaves(given))
        return self._recorded(given) if records else self._learned(given), round.after

    def _learned(self, given: Tree) -> Tree:
        """The ledger after training, without reading a value on the host."""
        ledger, counts = given["ledger"], given["counts"]
        known = counts.sum(0)
        met = known.sum() > 0  # else no client did a step
        params = trained(ledger["params"], given["weight"], given.get("bias"), counts, given["key"], self)
        return {
            "params": map_leaves(lambda new, old: torch.where(met, new, old), params, ledger["params"]),
            "labels": torch.where(met, known / known.sum(), ledger["labels"]),
            "ready": torch.maximum(ledger["ready"], met.to(ledger["ready"].dtype)),
        }

    def _recorded(self, given: Tree) -> Tree:
        """The same on a GPU, where the operations of all steps are queued at once."""
        values = flatten({**given, **{name: _padded(given[name]) for name in OF_CLIENTS if name in given}})
        like = tuple((path, leaf.shape, leaf.dtype, leaf.device) for path, leaf in values.items())
        kind = (like, torch.cuda.current_stream(), torch.backends.cuda.matmul.allow_tf32)
        names = list(flatten(given["ledger"]))

        def learned(some: Sequence[Tensor]) -> list[Tensor]:
            found = flatten(self._learned(unflatten(dict(zip(values, some)))))
            return [found[name] for name in names]

        recordings = _RECORDINGS.setdefault(self, {})
        recording = recordings.pop(kind, None)  # one run at a time uses its memory
        if recording is None:
            recording = Recording(learned, list(values.values()))
        found = recording(list(values.values()))
        recordings[kind] = recording
        return shaped_like(given["ledger"], dict(zip(names, found)))


OF_CLIENTS = ("weight", "bias", "counts")  # [m, ...]
# kept as long as the rule: a run's first round records, and one with twice as many clients
_RECORDINGS: weakref.WeakKeyDictionary[Generator, dict[Hashable, Recording]] = weakref.WeakKeyDictionary()


def _padded(stacked: Tensor) -> Tensor:
    """With zeros for clients without rows up to the next power of two: cohorts of similar size share a recording."""
    more = (1 << (len(stacked) - 1).bit_length()) - len(stacked)
    return torch.cat([stacked, stacked.new_zeros(more, *stacked.shape[1:])]) if more else stacked


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
