"""Data augmentation in training, drawn from the batch's key: the same in every lane, group and engine.

Each row draws by its position in the batch, so padding changes nothing. Only training is augmented: passes before and
after training, and every evaluation, use the original rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from consilience.core import rng
from consilience.core.plans import Batch
from consilience.core.settings import Checked, Count, Invalid, Positive, Probability, Whole, check
from consilience.core.task import Task
from consilience.core.tree import leaves, map_leaves

SALT = 2**41  # separates these draws from those of dropout layers, augmenting models and terms


@runtime_checkable
class Augmentation(Protocol):
    """One augmentation."""

    def vary(self, x: Any, key: Tensor, live: Any) -> Any:
        """The augmented features [B, ...] (or a dict of them); only the first `live` rows count."""
        ...

    def check_rows(self, x: Any) -> None:
        """Refuse features that it cannot augment."""
        ...


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Random horizontal flip of images."""

    probability: Probability = 0.5

    def __post_init__(self) -> None:
        check(self)
        _refuse_never(self, self.probability)

    def vary(self, x: Any, key: Tensor, live: Any) -> Any:
        """Flip each image with the given probability."""
        chosen = _draws(key, x, 1)[:, 0] < self.probability
        return _pictures(lambda leaf: torch.where(chosen.reshape(-1, 1, 1, 1), leaf.flip(-1), leaf), x)

    def check_rows(self, x: Any) -> None:
        """Refuse features that are not images."""
        _refuse_others(self, x, is_picture, "pictures [channels, height, width]")


@dataclass(frozen=True, kw_only=True)
class Crop(Checked):
    """Random crop of images padded with `padding` zero pixels on each side."""

    padding: Count = 4

    def vary(self, x: Any, key: Tensor, live: Any) -> Any:
        """A random crop, of the original size, of each zero-padded image."""
        moves = torch.floor(_draws(key, x, 2) * (2 * self.padding + 1)).to(torch.int64) - self.padding  # [B, 2]

        def moved(leaf: Tensor) -> Tensor:
            for axis, move in ((2, moves[:, 0]), (3, moves[:, 1])):
                at = torch.arange(leaf.shape[axis], device=leaf.device) + move.unsqueeze(1)  # [B, side]
                inside = (at >= 0) & (at < leaf.shape[axis])
                shape = (-1, 1, at.shape[1], 1) if axis == 2 else (-1, 1, 1, at.shape[1])
                index = at.clamp(0, leaf.shape[axis] - 1).reshape(shape).expand(leaf.shape)
                leaf = torch.where(inside.reshape(shape), leaf.gather(axis, index), torch.zeros_like(leaf))
            return leaf

        return _pictures(moved, x)

    def check_rows(self, x: Any) -> None:
        """Refuse features that are not images larger than the padding."""
        _refuse_others(self, x, is_picture, "pictures [channels, height, width]")
        for leaf in leaves(x):
            if is_picture(leaf) and min(leaf.shape[2:]) <= self.padding:
                raise Invalid(
                    f"Crop.padding = {self.padding} can move a picture of {tuple(leaf.shape[2:])} out of sight"
                )


@dataclass(frozen=True, kw_only=True)
class Cutout(Checked):
    """A square of `size` pixels around a random pixel set to 0, truncated at borders (DeVries and Taylor 2017)."""

    size: Count = 4

    def vary(self, x: Any, key: Tensor, live: Any) -> Any:
        """Set one square of each image to 0."""
        draws = _draws(key, x, 2)

        def cut(leaf: Tensor) -> Tensor:
            hidden = None
            for axis, draw in ((2, draws[:, 0]), (3, draws[:, 1])):
                side = leaf.shape[axis]
                first = torch.floor(draw * side).to(torch.int64).unsqueeze(1) - self.size // 2
                at = torch.arange(side, device=leaf.device)
                inside = ((at >= first) & (at < first + self.size)).unsqueeze(4 - axis)  # [B, h, 1] or [B, 1, w]
                hidden = inside if hidden is None else hidden & inside
            assert hidden is not None
            return torch.where(hidden.unsqueeze(1), torch.zeros_like(leaf), leaf)

        return _pictures(cut, x)

    def check_rows(self, x: Any) -> None:
        """Refuse features that are not images larger than the square."""
        _refuse_others(self, x, is_picture, "pictures [channels, height, width]")
        for leaf in leaves(x):
            if is_picture(leaf) and self.size >= 2 * min(leaf.shape[2:]):
                raise Invalid(
                    f"Cutout.size = {self.size} can hide a picture of {tuple(leaf.shape[2:])} pixels as a whole"
                )


@dataclass(frozen=True, kw_only=True)
class TokenDropout:
    """Tokens randomly replaced by the token `unknown`; the token `padding` is never replaced."""

    probability: Probability = 0.1
    unknown: Whole = 1
    padding: Whole = 0

    def __post_init__(self) -> None:
        check(self)
        _refuse_never(self, self.probability)

    def vary(self, x: Any, key: Tensor, live: Any) -> Any:
        """Replace each token with the given probability."""

        def dropped(leaf: Tensor) -> Tensor:
            if not is_tokens(leaf):
                return leaf
            gone = _draws(key, leaf, leaf[0].numel()).reshape(leaf.shape) < self.probability
            return torch.where(gone & (leaf != self.padding), torch.full_like(leaf, self.unknown), leaf)

        return map_leaves(dropped, x)

    def check_rows(self, x: Any) -> None:
        """Refuse features that are not sequences of integers."""
        _refuse_others(self, x, is_tokens, "sequences of token numbers [length]")


@dataclass(frozen=True, kw_only=True)
class MixUp(Checked):
    """Rows mixed in pairs (Zhang et al. 2018): x = s x_i + (1 - s) x_j, loss = s loss(y_i) + (1 - s) loss(y_j).

    s ~ Beta(alpha, alpha), one for a batch; j is a permutation of the batch's rows.
    """

    alpha: Positive = 0.2

    def vary(self, x: Any, key: Tensor, live: Any) -> Any:
        """Mix each row with its partner."""
        share, partners = self.mixture(key, len(next(leaves(x))), live)

        def mixed(leaf: Tensor) -> Tensor:
            own = share.to(leaf.dtype)
            return own * leaf + (1 - own) * leaf.index_select(0, partners)

        return map_leaves(mixed, x)

    def mixture(self, key: Tensor, width: int, live: Any) -> tuple[Tensor, Tensor]:
        """(share s of the row itself, [B] indices of the partners among the first `live` rows)."""
        count = live if isinstance(live, Tensor) else torch.full((), live, device=key.device)
        return _beta(rng.fold(key, 1), self.alpha), rng.permutations(rng.fold(key, 2), count, width)

    def check_rows(self, x: Any) -> None:
        """Refuse features that are not floating-point."""
        if not all(leaf.is_floating_point() for leaf in leaves(x)):
            raise Invalid("MixUp mixes real-valued features, and these are whole numbers: use token_dropout for tokens")


class Mixed(NamedTuple):
    """The partners' targets of mixed rows."""

    share: Tensor  # weight of a row's own target
    y: Tensor  # [B, ...] target of its partner


def refuse_misfits(augment: tuple[Augmentation, ...], task: Task) -> None:
    """Refuse mix-up of targets that cannot be mixed, and more than one mix-up."""
    moving = [part for part in augment if isinstance(part, (Flip, Crop))]
    if moving and task.kind.name == "dense":
        raise Invalid(
            f"{type(moving[0]).__name__} moves pixels, and the targets of {task.kind.name} tasks, which belong to "
            "pixels, would stay: leave it out of augment"
        )
    mixing = [part for part in augment if isinstance(part, MixUp)]
    if len(mixing) > 1:
        raise Invalid(f"augment = {list(augment)!r} mixes rows {len(mixing)} times: leave one MixUp")
    if mixing and task.kind.decide is None:
        raise Invalid(
            f"MixUp weighs the losses of two classes, and {task.kind.name} has no classes: leave it out of augment"
        )


def augmented(augment: tuple[Augmentation, ...], batch: Batch) -> tuple[Batch, Mixed | None]:
    """(the batch with augmented features, the partners' targets if rows were mixed)."""
    mixed = None
    live: Any = len(batch.y) if batch.mask is None else batch.mask.sum().to(torch.int64)
    for number, part in enumerate(augment):
        part.check_rows(batch.x)  # depends on shapes and types only
        key = rng.fold(batch.key, SALT + number)
        if isinstance(part, MixUp):
            share, partners = part.mixture(key, len(batch.y), live)
            mixed = Mixed(share, batch.y.index_select(0, partners))
        batch = batch._replace(x=part.vary(batch.x, key, live))
    return batch, mixed


def mixed_losses(task: Task, output: Any, batch: Batch, mixed: Mixed) -> Tensor:
    """[B] the weighted losses of mixed rows with both targets."""
    own = task.row_losses(output, batch)
    share = mixed.share.to(own.dtype)
    return share * own + (1 - share) * task.row_losses(output, batch._replace(y=mixed.y))


def is_picture(leaf: Tensor) -> bool:
    """Whether this is a floating tensor [B, channels, height, width]."""
    return leaf.dim() == 4 and leaf.is_floating_point()


def is_tokens(leaf: Tensor) -> bool:
    """Whether this is an integer tensor [B, length]."""
    return leaf.dim() == 2 and not leaf.is_floating_point() and leaf.dtype != torch.bool


def _pictures(change: Any, x: Any) -> Any:
    return map_leaves(lambda leaf: change(leaf) if is_picture(leaf) else leaf, x)


def _draws(key: Tensor, x: Any, count: int) -> Tensor:
    """[B, count] independent numbers in [0, 1) for each row."""
    first = next(leaves(x))
    return rng.uniforms(rng.fold(key, torch.arange(len(first), device=first.device)), count)


def _refuse_never(part: Any, probability: float) -> None:
    if not probability:
        raise Invalid(f"{type(part).__name__}.probability = 0 varies nothing: leave the augmentation out")


def _refuse_others(part: Any, x: Any, fits: Any, what: str) -> None:
    if not any(fits(leaf) for leaf in leaves(x)):
        found = ", ".join(f"{tuple(leaf.shape[1:])} {leaf.dtype}" for leaf in leaves(x))
        raise Invalid(f"{type(part).__name__} varies {what}, and a row here is {found}: leave it out of augment")


def _beta(key: Tensor, alpha: float) -> Tensor:
    """A float64 draw of Beta(alpha, alpha), by two gamma draws in logarithms."""
    one, two = (_log_gamma(rng.fold(key, number), alpha) for number in (0, 1))
    return torch.sigmoid(one - two)


TRIES = 12  # each is accepted with probability > 0.95 (Marsaglia and Tsang 2000), so that all fail once in 10^15


def _log_gamma(key: Tensor, alpha: float) -> Tensor:
    """The logarithm of a draw of Gamma(alpha): Gamma(alpha + 1), the first of a few tries, times U^(1/alpha)."""
    d = alpha + 1 - 1 / 3
    c = 1 / (9 * d) ** 0.5
    normal, uniform = rng.normals(rng.fold(key, 0), TRIES), rng.uniforms(rng.fold(key, 1), TRIES + 1)
    cube = (1 + c * normal).clamp(min=1e-12) ** 3
    good = torch.log1p(-uniform[:TRIES]) < normal.square() / 2 + d - d * cube + d * cube.log()
    good = good & (1 + c * normal > 1e-12)
    first = good.to(torch.int64).argmax(0)  # index of the first accepted try
    value = cube.gather(0, first.unsqueeze(0)).squeeze(0)
    return math.log(d) + value.log() + torch.log1p(-uniform[TRIES]) / alpha
