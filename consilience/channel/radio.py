"""Noisy wireless uplinks, with optional fading."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from consilience.channel.update import by_row, carrying, closed, each_floating, floating, leaf_key, opened
from consilience.core import rng
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.rng import exponentials, normals
from consilience.core.settings import Checked, OnlyWith, Positive, Range
from consilience.core.tree import Tree

Fading = Literal["none", "rayleigh"]
Decibels = Annotated[float, Range(least=-100, most=300)]


@dataclass(frozen=True, kw_only=True)
class Radio(Checked):
    """Every client has its own radio channel with the signal-to-noise ratio `snr_db` in decibels.

    The server receives y = h x + n and, knowing h, takes x + n/h: noise of variance mean(x^2) / (snr |h|^2) on every
    value x of the update. Without fading h = 1; with "rayleigh", |h|^2 is exponential with mean 1, drawn afresh for
    every client and round, and where it is below `min_gain` the client sends with more power, as if it were `min_gain`.
    """

    snr_db: Decibels = 20.0
    fading: Fading = "none"
    min_gain: Annotated[Positive, OnlyWith("fading", ("rayleigh",))] = 0.1
    form = "dense"  # the update keeps its shapes

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The update unchanged: noise is added in `decode`."""
        return carrying(reply, opened(reply, message, self)), memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Models from noisy updates."""
        if not len(cohort):
            return cohort
        update = cohort.reply["model"]["params"]
        keys = client_keys(cohort, key)
        loudness = rms(update) / (10 ** (self.snr_db / 20) * gains(keys, self.fading, self.min_gain).sqrt())  # [m]
        noise = [normals(leaf_key(keys, 1 + n), leaf[0].numel()) for n, leaf in enumerate(floating(update))]

        def disturb(leaf: Tensor, number: int) -> Tensor:
            return leaf + (loudness.unsqueeze(-1) * noise[number]).reshape(leaf.shape).to(leaf.dtype)

        return closed(cohort, received, each_floating(disturb, update))


@dataclass(frozen=True, kw_only=True)
class OverTheAir(Checked):
    """All clients send at once (over-the-air computation): the server receives the sum of the updates plus one noise.

    All clients scale their signals by the same factor, so that the one with the longest update uses full power: over m
    clients the mean has noise of variance max_k mean(x_k^2) / (snr g m^2), g the weakest client's power gain as in
    `Radio`. Only server rules that read nothing but weighted sums can work with it; the weights are applied by the
    clients.
    """

    snr_db: Decibels = 20.0
    fading: Fading = "none"
    min_gain: Annotated[Positive, OnlyWith("fading", ("rayleigh",))] = 0.1
    form = "dense"  # the update keeps its shapes
    sums_only = True  # the server cannot distinguish the replies

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The update unchanged."""
        return carrying(reply, opened(reply, message, self)), memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Models with the same added noise, so that any weighted mean is the true mean plus that noise."""
        heard = range(len(cohort)) if cohort.heard is None else cohort.heard.nonzero()[0].tolist()
        update = cohort.reply["model"]["params"] if len(cohort) else {}
        models = closed(cohort, received, update) if len(cohort) else cohort
        if not len(heard):
            return models
        loud = rms(update)[list(heard)].max()
        weakest = gains(client_keys(cohort, key)[list(heard)], self.fading, self.min_gain).min()
        deviation = loud / (10 ** (self.snr_db / 20) * weakest.sqrt() * len(heard))
        common = torch.tensor(rng.key(key, "air"), device=loud.device)

        def disturb(leaf: Tensor, number: int) -> Tensor:
            noise = normals(leaf_key(common, number), leaf[0].numel()).reshape(leaf.shape[1:])
            return leaf + (deviation * noise).to(leaf.dtype)

        return replace(models, reply=carrying(models.reply, each_floating(disturb, models.reply["model"]["params"])))


def client_keys(cohort: Cohort, key: int) -> Tensor:
    """[m] one key for each client's own transmission."""
    return rng.fold(key, torch.from_numpy(cohort.ids).to(cohort.examples.device))


def gains(keys: Tensor, fading: Fading, min_gain: float) -> Tensor:
    """[m] |h|^2, at least `min_gain`."""
    ones = torch.ones(keys.shape, dtype=torch.float64, device=keys.device)
    return ones if fading == "none" else exponentials(keys).clamp(min=min_gain)


def rms(update: Tree) -> Tensor:
    """[m] the root of the mean square over all values of each client's update."""
    leaves = [by_row(leaf) for leaf in floating(update)]
    squares = [torch.linalg.vector_norm(leaf, dim=1, dtype=torch.float64).square() for leaf in leaves]
    return (torch.stack(squares).sum(0) / max(1, sum(leaf.shape[1] for leaf in leaves))).sqrt()
