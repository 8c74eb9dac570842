"""Augmentation: each variation by hand, mixed targets, equality over lanes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.func import vmap

import consilience as cs
from consilience import algorithms
from consilience.client.augmentations import Crop, Cutout, Flip, MixUp, TokenDropout, augmented, mixed_losses
from consilience.core.federation import Federation
from consilience.core.plans import Batch
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.task.task import Task

KEY = torch.tensor(1234567)
PICTURES = [Flip(), Crop(padding=2), Cutout(size=3)]


def pictures(count: int = 64, side: int = 6) -> Tensor:
    return torch.arange(1, count * side * side + 1, dtype=torch.float64).reshape(count, 1, side, side)


def batch(x: Any, y: Tensor, mask: Tensor | None = None) -> Batch:
    return Batch(x=x, y=y, mask=mask, key=KEY, first=torch.tensor(True))


def test_each_picture_is_mirrored_or_not() -> None:
    x = pictures()
    found = Flip(probability=0.3).vary(x, KEY, 64)
    mirrored = [torch.equal(new, old.flip(-1)) for new, old in zip(found, x)]
    kept = [torch.equal(new, old) for new, old in zip(found, x)]
    assert all(a != b for a, b in zip(mirrored, kept)) and 8 < sum(mirrored) < 32


def test_a_crop_is_one_of_the_padded_picture() -> None:
    x, seen = pictures(400), set()
    for new, old in zip(Crop(padding=1).vary(x, KEY, 400), x):
        border = nn.functional.pad(old, (1, 1, 1, 1))
        fits = [(i, j) for i in range(3) for j in range(3) if torch.equal(new, border[:, i : i + 6, j : j + 6])]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) == 9  # every move happens


def test_a_square_is_cut_out_and_the_rest_stays() -> None:
    x = pictures(200)
    sizes = set()
    for new, old in zip(Cutout(size=3).vary(x, KEY, 200), x):
        gone = (new != old)[0]
        assert (new[0][gone] == 0).all() and torch.equal(new[0][~gone], old[0][~gone])
        rows, columns = gone.any(1), gone.any(0)
        assert torch.equal(gone, rows[:, None] & columns[None, :]) and 2 <= int(rows.sum()) <= 3
        sizes.add((int(rows.sum()), int(columns.sum())))
    assert sizes == {(2, 2), (2, 3), (3, 2), (3, 3)}  # borders cut it off


def test_tokens_become_unknown_and_padding_stays() -> None:
    x = torch.randint(2, 50, (100, 20), generator=torch.Generator().manual_seed(0))
    x[:, 15:] = 0
    found = TokenDropout(probability=0.25).vary(x, KEY, 100)
    changed = found != x
    assert (
        (found[changed] == 1).all() and not changed[:, 15:].any() and 0.2 < float(changed[:, :15].double().mean()) < 0.3
    )


def test_rows_are_mixed_with_their_partners_and_so_are_losses() -> None:
    x, y = pictures(8), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    part = MixUp(alpha=0.4)
    varied, mixed = augmented((part,), batch(x, y))
    assert mixed is not None and 0 <= float(mixed.share) <= 1
    partner = [int(((varied.x[i] - mixed.share * x[i]) / (1 - mixed.share) - x).abs().flatten(1).sum(1).argmin())
               for i in range(8)]  # fmt: skip
    assert sorted(partner) == list(range(8)) and torch.equal(mixed.y, y[partner])
    task = Task(tiny.mlp().double())
    output = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    soft = mixed.share * nn.functional.one_hot(y, 3) + (1 - mixed.share) * nn.functional.one_hot(y[partner], 3)
    by_hand = nn.functional.cross_entropy(output, soft, reduction="none")
    torch.testing.assert_close(mixed_losses(task, output, varied, mixed), by_hand)


def test_shares_are_drawn_from_a_beta_distribution() -> None:
    for alpha in (0.2, 1.0, 3.0):
        keys = torch.arange(4000) * 7919
        part = MixUp(alpha=alpha)
        found = vmap(lambda key, part=part: part.mixture(key, 2, 2)[0])(keys)
        variance = 1 / (4 * (2 * alpha + 1))
        assert float(found.mean()) == pytest.approx(0.5, abs=0.025)
        assert float(found.var()) == pytest.approx(variance, rel=0.08)


@pytest.mark.parametrize("part", [*PICTURES, MixUp()], ids=repr)
def test_padding_changes_nothing(part: Any) -> None:
    x, y = pictures(9), torch.arange(9) % 3
    short, mixed = augmented((part,), batch(x[:5], y[:5]))
    mask = (torch.arange(9) < 5).double()
    padded, also = augmented((part,), batch(x, y, mask))
    assert torch.equal(short.x, padded.x[:5])
    assert (mixed is None and also is None) or torch.equal(mixed.y, also.y[:5])  # type: ignore[union-attr]


AUGMENT = (*PICTURES, MixUp(alpha=0.5))


def final(algorithm: Any, build: Any, **options: Any) -> Tree:
    last = list(run(algorithm, tiny.engine(build, **options), rounds=2, seed=3))[-1]
    return {"model": last.model, "memory": last.snapshot.memory}


@pytest.mark.parametrize("name", ["fedavg", "moon", "ditto", "fedsiam_da"])
def test_lanes_agree(name: str) -> None:
    build: Any = {"moon": lambda: tiny.Backbone(tiny.convnet()), "fedsiam_da": tiny.MODELS_WITH_HEADS["convnet"]}.get(
        name, tiny.convnet
    )
    algorithm = algorithms.recipe(name)(lr=0.1, batch_size=4, augment=AUGMENT)
    serial = final(algorithm, build, lane="serial")
    for lane in ("batched", "streams"):
        assert tiny.gap(serial, final(algorithm, build, lane=lane)) < 1e-9
    plain = algorithms.recipe(name)(lr=0.1, batch_size=4)
    assert tiny.gap(serial, final(plain, build, lane="serial")) > 1e-4


def test_tokens_in_lanes() -> None:
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randint(0, 9, (n, 5), generator=draw), torch.randint(0, 3, (n,), generator=draw)) for n in (7, 4, 9)
    ]
    data = Federation.from_clients(clients)
    build = lambda: tiny.seeded(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)))  # noqa: E731
    algorithm = cs.fedavg(lr=0.1, batch_size=4, augment=[{"name": "token_dropout", "probability": 0.5}])  # type: ignore[list-item, typeddict-item]
    assert tiny.gap(*(final(algorithm, build, data=data, lane=lane) for lane in ("serial", "batched"))) < 1e-9


@pytest.mark.parametrize(
    ("augment", "x", "words"),
    [
        (("flip",), torch.zeros(4, 3), "Flip varies pictures [channels, height, width], and a row here is (3,)"),
        (("crop",), torch.zeros(4, 1, 3, 3), "Crop.padding = 4 can move a picture of (3, 3) out of sight"),
        (("cutout",), torch.zeros(4, 1, 2, 2), "Cutout.size = 4 can hide a picture of (2, 2) pixels as a whole"),
        (("token_dropout",), torch.zeros(4, 3), "TokenDropout varies sequences of token numbers"),
        (("mixup",), torch.zeros(4, 3, dtype=torch.int64), "MixUp mixes real-valued features"),
        (("mixup", "mixup"), torch.zeros(4, 3), "mixes rows 2 times"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_training(augment: Any, x: Tensor, words: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(3)) if x.is_floating_point() else nn.Embedding(2, 3)
    if x.is_floating_point():
        model(x)
    else:
        model = nn.Sequential(nn.Embedding(2, 1), nn.Flatten(), nn.Linear(3, 3))
    data = Federation.from_clients([(x, torch.tensor([0, 1, 2, 0]))])
    with pytest.raises(Invalid) as caught:
        cs.train(model, data, cs.fedavg(augment=augment), rounds=1, progress=False)
    assert words in str(caught.value)


def test_targets_without_classes_are_not_mixed() -> None:
    data = Federation.from_clients([(torch.zeros(4, 3), torch.rand(4, 1))])
    with pytest.raises(Invalid, match="MixUp weighs the losses of two classes, and regression has no classes"):
        cs.train(nn.Linear(3, 1), data, cs.fedavg(augment=("mixup",)), rounds=1, progress=False)  # type: ignore[arg-type, typeddict-item]


def test_pictures_with_targets_of_pixels_are_not_moved() -> None:
    task = Task(nn.Conv2d(1, 3, 1), "dense")
    for part in (Flip(), Crop()):
        with pytest.raises(Invalid, match="moves pixels, and the targets of dense tasks"):
            cs.fedavg(augment=(part,)).client.check_against(task)  # type: ignore[attr-defined]
    cs.fedavg(augment=(Cutout(),)).client.check_against(task)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [lambda: Flip(probability=0.0), lambda: TokenDropout(probability=0.0)])
def test_a_variation_that_never_happens_is_refused(make: Any) -> None:
    with pytest.raises(Invalid, match="varies nothing: leave the augmentation out"):
        make()
