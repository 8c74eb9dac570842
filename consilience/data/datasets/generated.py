"""Small generated federations, one for each kind of task other than classification: nothing to download."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np

from consilience.core.settings import Count, Fraction, NonNegative, OnlyWith, Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.splits import HeldOut, held_out
from consilience.task.kinds import KINDS
from consilience.task.losses import IGNORED

STREAM = 0x6E  # a stream of its own: independent of other draws with the same seed
PADDING, MASK = "<pad>", "<mask>"
SHAPES = ("background", "square", "disc", "cross")


def synthetic_regression(
    *,
    clients: Count = 8,
    rows: Count = 60,
    features: Count = 8,
    outputs: Count = 3,
    spread: NonNegative = 0.3,
    noise: NonNegative = 0.1,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
) -> Dataset:
    """Regression with several targets a row: y = tanh(x W_k) + noise, W_k = W + `spread` times a draw of the client."""
    rng = np.random.default_rng([seed, STREAM, 1])
    common = rng.normal(0, features**-0.5, (features, outputs))
    x = rng.standard_normal((clients, rows, features))
    own = common + spread * rng.normal(0, features**-0.5, (clients, features, outputs))
    y = np.tanh(x @ own) + noise * rng.standard_normal((clients, rows, outputs))
    y = y[..., 0] if outputs == 1 else y
    return _federation("synthetic_regression", x, y, "regression", (test_fraction, seed))


def synthetic_labels(
    *,
    clients: Count = 8,
    rows: Count = 80,
    features: Count = 10,
    labels: Count = 5,
    spread: NonNegative = 0.5,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
) -> Dataset:
    """Several labels a row, each 0 or 1, some rare: label l is 1 where x w_l + b_l + noise > 0; clients' b differ."""
    rng = np.random.default_rng([seed, STREAM, 2])
    weights = rng.normal(0, 2 * features**-0.5, (features, labels))
    offset = np.linspace(0.5, -2.0, labels) + spread * rng.standard_normal((clients, 1, labels))
    x = rng.standard_normal((clients, rows, features))
    y = (x @ weights + offset + 0.5 * rng.standard_normal((clients, rows, labels)) > 0).astype(np.int64)
    names = tuple(f"label_{number}" for number in range(labels))
    return _federation("synthetic_labels", x, y, "multi_label", (test_fraction, seed), label_names=names)


def synthetic_text(
    *,
    objective: Literal["next", "masked", "labels"] = "next",
    clients: Count = 8,
    rows: Count = 60,
    length: Count = 16,
    words: Count = 20,
    spread: Fraction = 0.3,
    masked: Annotated[Fraction, OnlyWith("objective", ("masked",))] = 0.15,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
) -> Dataset:
    """Sequences of a Markov chain over `words`, of different lengths; a share `spread` of a client's chain is its own.

    objective: "next" the next token (the targets are the sequence), "masked" the masked words, "labels" for
    every word whether it comes before, behind or far from the word in front of it. Token 0 is padding, 1 the mask.
    """
    rng = np.random.default_rng([seed, STREAM, 3])
    common = rng.dirichlet(np.full(words, 0.15), words)
    text = np.zeros((clients, rows, length), np.int64)
    for client in range(clients):
        chain = (1 - spread) * common + spread * rng.dirichlet(np.full(words, 0.15), words)
        steps = chain.cumsum(1)
        word = rng.integers(words, size=rows)
        for place in range(length):
            text[client, :, place] = word + 2
            word = np.minimum((rng.random(rows)[:, None] > steps[word]).sum(1), words - 1)
    lengths = rng.integers(max(2, length // 2), length + 1, (clients, rows, 1))
    live = np.arange(length) < lengths
    x = np.where(live, text, 0)
    y, kind, names = x.copy(), "next_token", (PADDING, MASK, *(f"w{number}" for number in range(words)))
    vocabulary = names
    if objective == "masked":
        chosen = live & (rng.random(x.shape) < masked)
        chosen[..., 0] |= ~chosen.any(-1)  # every sequence has one
        x, kind = np.where(chosen, 1, x), "tokens"
        y = np.where(chosen, y, IGNORED)
    if objective == "labels":
        apart = np.diff(text, axis=-1, prepend=text[..., :1])
        y, kind, names = np.where(np.abs(apart) > words // 4, 2, (apart > 0).astype(np.int64)), "tokens", LABELS
    y = np.where(live, y, IGNORED)
    split = (test_fraction, seed)
    return _federation(f"synthetic_text_{objective}", x, y, kind, split, label_names=names, vocabulary=vocabulary)


LABELS = ("before", "behind", "far")


def shapes(
    *,
    clients: Count = 4,
    rows: Count = 40,
    side: Count = 16,
    noise: NonNegative = 0.3,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
) -> Dataset:
    """Grey pictures of a square, a disc or a cross, and for every pixel what it shows; clients' brightness differs."""
    rng = np.random.default_rng([seed, STREAM, 4])
    down, across = np.mgrid[:side, :side]
    pictures = np.zeros((clients, rows, 1, side, side))
    masks = np.zeros((clients, rows, side, side), np.int64)
    for client in range(clients):
        level = 0.6 + 0.8 * client / max(1, clients - 1)  # brightness of the client's pictures
        shares = rng.dirichlet(np.full(3, 1.0))
        for row in range(rows):
            radius = rng.integers(max(1, side // 8), max(2, side // 4) + 1)
            middle = rng.integers(radius, side - radius, 2)
            near = np.abs(down - middle[0]), np.abs(across - middle[1])
            kind = 1 + int(rng.choice(3, p=shares))
            inside = {
                1: np.maximum(*near) <= radius,
                2: near[0] ** 2 + near[1] ** 2 <= radius**2,
                3: (np.minimum(*near) <= radius // 3) & (np.maximum(*near) <= radius),
            }[kind]
            masks[client, row][inside] = kind
            pictures[client, row, 0] = level * inside + noise * rng.standard_normal((side, side))
    return _federation("shapes", pictures, masks, "dense", (test_fraction, seed), label_names=SHAPES)


def _federation(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    kind: str,
    split: tuple[float, int],
    *,
    label_names: tuple[str, ...] = (),
    vocabulary: tuple[str, ...] = (),
) -> Dataset:
    """The data set of clients' rows [K, n, ...]."""
    clients, rows = y.shape[:2]
    owners = np.repeat(np.arange(clients), rows)
    flat_x, flat_y = (values.reshape(clients * rows, *values.shape[2:]) for values in (x, y))
    if flat_x.dtype.kind == "f":
        flat_x = flat_x.astype(np.float32)
    train, test = held_out(np.zeros(len(owners)), fraction=split[0], seed=split[1], groups=owners)
    return assemble(
        name,
        (flat_x[train], flat_y[train]),
        (flat_x[test], flat_y[test]),
        classes=len(label_names) if KINDS[kind].multiclass else None,
        groups=owners[train],
        test_groups=owners[test],
        group_names=tuple(f"client_{k}" for k in range(clients)),
        label_names=label_names,
        vocabulary=vocabulary,
        kind=KINDS[kind],
    )
