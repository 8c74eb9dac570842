"""Validation rows: a share of each client's training rows, so that settings are chosen without test rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from consilience.core.federation import Federation, Rows
from consilience.core.rng import host, subseed
from consilience.core.settings import Invalid
from consilience.data.datasets.prepare.splits import held_out


def validated(
    federation: Federation, parts: list[np.ndarray], *, share: float, seed: int
) -> tuple[Federation, list[np.ndarray]]:
    """The federation with its test rows replaced by a share of each client's training rows.

    Drawn from the seed alone, label by label; a client keeps at least one training row. The other rows of each part
    are returned with it, for the record.
    """
    train, taken, kept = _split(federation, parts, share, subseed(seed, "validation"), "evaluation.validation")
    return replace(federation, train=train, test=taken), kept


def held_back(
    federation: Federation, parts: list[np.ndarray], *, share: float, seed: int
) -> tuple[Federation, Rows, list[np.ndarray]]:
    """The federation without a share of each client's training rows, that share by client, and the remaining parts.

    Drawn as in `validated`, but other rows, so that both can be used together; test rows stay as they are.
    """
    train, taken, kept = _split(federation, parts, share, subseed(seed, "held back"), "validation.share")
    return replace(federation, train=train), taken, kept


def held_back_at_home(federation: Federation, hosts: np.ndarray, *, share: float, seed: int) -> Federation:
    """The federation of the clients at one site, each of which holds back its own validation rows.

    A client's draw depends on the seed and its number alone, and so does whether its share is rounded up or down.
    """
    kept, taken = [], []
    for place, client in enumerate(hosts.tolist()):
        start, size = int(federation.train.starts[place]), int(federation.train.sizes[place])
        targets = federation.train.y[start : start + size].numpy(force=True)
        labels = targets if federation.classes is not None and targets.ndim == 1 else np.zeros(size, np.int64)
        own = subseed(seed, "held back", client)
        stay, go = held_out(labels, fraction=share, seed=own, owed=host(own, "rounding").random() - 0.5)
        kept.append(start + stay)
        taken.append(start + go)
    rows = federation.train
    train = Rows.gather(rows.x, rows.y, kept, weight=rows.weight)
    return replace(federation, train=train, validation=Rows.gather(rows.x, rows.y, taken))


def _split(
    federation: Federation, parts: list[np.ndarray], share: float, seed: int, key: str
) -> tuple[Rows, Rows, list[np.ndarray]]:
    rows = federation.train
    owner = np.repeat(np.arange(len(federation)), rows.sizes.numpy())  # [N], rows lie client by client
    places = np.concatenate([np.arange(int(a), int(a + n)) for a, n in zip(rows.starts, rows.sizes)])
    targets = rows.y[places].numpy(force=True)
    labels = targets if federation.classes is not None and targets.ndim == 1 else np.zeros(len(owner), np.int64)
    kept, taken = held_out(labels, fraction=share, seed=seed, groups=owner)
    if not len(taken):
        raise Invalid(f"{key} = {share:g} leaves no client a validation row: take a larger share")

    def of_clients(chosen: np.ndarray) -> list[np.ndarray]:
        return [places[chosen[owner[chosen] == k]] for k in range(len(federation))]

    training = of_clients(kept)
    train = Rows.gather(rows.x, rows.y, training, weight=rows.weight)
    held = Rows.gather(rows.x, rows.y, of_clients(taken))
    return train, held, [part[own - int(start)] for part, own, start in zip(parts, training, rows.starts)]
