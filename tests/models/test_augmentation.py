"""Pictures varied in training: by the key alone, row by row, under vmap, and never in evaluation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from consilience import models
from consilience.core.settings import Invalid
from consilience.core.tree import Tree, repeat
from consilience.layers.exact import key_inputs, make_exact
from consilience.models.augmentation import Augment, _recoloured, _turned
from consilience.task.task import Task


def pictures(rows: int = 6, side: int = 8) -> Tensor:
    return torch.rand(rows, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def varied(x: Tensor, key: int = 1, **options: float) -> Tensor:
    layer = Augment(**options)
    layer.key = torch.tensor(key)
    return layer(x)


OFF = {"flip": 0.0, "jitter": 0.0, "rotation": 0.0}


def test_evaluation_and_no_options_change_nothing() -> None:
    x = pictures()
    assert torch.equal(Augment().eval()(x), x) and torch.equal(varied(x, **OFF), x)
    with pytest.raises(Invalid, match="trained without a key"):
        Augment()(x)


def test_a_function_of_the_key_alone() -> None:
    x = pictures()
    assert torch.equal(varied(x, 1), varied(x, 1)) and not torch.equal(varied(x, 1), varied(x, 2))
    assert torch.equal(varied(x, 1)[:4], varied(x[:4], 1))  # a row's draws do not depend on how many follow
    assert varied(x).shape == x.shape and varied(x.float()).dtype == torch.float32


def test_about_half_the_rows_are_mirrored_exactly() -> None:
    x = pictures(400)
    got = varied(x, **{**OFF, "flip": 0.5})
    mirrored = (got == x.flip(-1)).flatten(1).all(1)
    assert bool((mirrored | (got == x).flatten(1).all(1)).all()) and 150 < int(mirrored.sum()) < 250
    assert torch.equal(varied(x, **{**OFF, "flip": 1.0}), x.flip(-1))


def test_colours_by_hand() -> None:
    """One pixel (0.2, 0.4, 0.6) and one black: grey 0.3630, mean 0.1815; light 2 clamps nothing here but doubles."""
    x = torch.tensor([0.2, 0.4, 0.6], dtype=torch.float64).reshape(1, 3, 1, 1) * torch.tensor([1.0, 0.0])
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(_recoloured(x, 1.5 * one, one, one)[0, :, 0, 0], torch.tensor([0.3, 0.6, 0.9]).double())
    middle = (0.299 * 0.2 + 0.587 * 0.4 + 0.114 * 0.6) / 2
    got = _recoloured(x, one, 0.5 * one, one)
    torch.testing.assert_close(got[0, 0, 0], torch.tensor([0.1 + middle / 2, middle / 2], dtype=torch.float64))
    grey = _recoloured(x, one, one, 0 * one)[0, :, 0, 0]
    torch.testing.assert_close(grey, torch.full((3,), 2 * middle, dtype=torch.float64))
    assert float(_recoloured(x, 9 * one, one, one).max()) == 1.0


def test_factors_spread_over_one_plus_minus_jitter() -> None:
    flat = torch.full((2000, 3, 1, 1), 0.5, dtype=torch.float64)  # grey: contrast and saturation do nothing
    factor = varied(flat, **{**OFF, "jitter": 0.3})[:, 0, 0, 0].numpy() / 0.5
    assert 0.7 <= factor.min() < 0.71 and 1.29 < factor.max() <= 1.3
    assert factor.mean() == pytest.approx(1, abs=0.02) and factor.std() == pytest.approx(0.6 / 12**0.5, rel=0.05)


@pytest.mark.parametrize("side", [5, 8])
@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_quarter_turns_are_exact(side: int, quarters: int) -> None:
    x = pictures(3, side)
    got = _turned(x, torch.full((3,), quarters * math.pi / 2, dtype=torch.float64))
    torch.testing.assert_close(got, torch.rot90(x, quarters, (-2, -1)), rtol=0, atol=1e-9)


def test_any_angle_against_scipy() -> None:
    from scipy.ndimage import rotate

    x = torch.zeros(1, 3, 21, 21, dtype=torch.float64)
    x[..., 7:14, 6:12] = pictures(1, 7)[..., :6]
    got = _turned(x, torch.tensor([math.radians(20)], dtype=torch.float64))[0].numpy()
    expected = rotate(x[0].numpy(), 20, axes=(1, 2), reshape=False, order=1)
    np.testing.assert_allclose(got, expected, atol=1e-9)


def test_wide_pictures_turn_rigidly() -> None:
    """A quarter turn of a wide picture's square middle is that of the square alone."""
    x = torch.zeros(1, 3, 9, 31, dtype=torch.float64)
    x[..., 11:20] = pictures(1, 9)
    got = _turned(x, torch.tensor([math.pi / 2], dtype=torch.float64))
    torch.testing.assert_close(got[..., 11:20], torch.rot90(pictures(1, 9), 1, (-2, -1)), rtol=0, atol=1e-9)
    assert float(got[..., :11].abs().max()) < 1e-9


def build(**options: object) -> torch.nn.Module:
    return models.build("late_fusion", {"text": 3, "picture": (3, 8, 8)}, 4, picture_encoder="resnet20", **options)


@pytest.mark.parametrize("trained", [False, True])
def test_in_a_task_rows_draw_by_the_steps_key_under_vmap(trained: bool) -> None:
    module = build(flip=0.5, jitter=0.3, rotation=20.0, picture_trained=trained)
    task = Task(module).to(torch.device("cpu"), torch.float64)
    start = {
        part: {n: v.double() if v.is_floating_point() else v for n, v in values.items()}
        for part, values in task.start().items()
    }
    text, seen = torch.rand(2, 6, 3, dtype=torch.float64), torch.stack([pictures(), 1 - pictures()])

    def output(model: Tree, text: Tensor, seen: Tensor, key: Tensor) -> Tensor:
        return task.apply(model, {"text": text, "picture": seen}, train=True, key=key)[0]

    keys = torch.tensor([3, 4])
    alone = torch.stack([output(start, text[k], seen[k], keys[k]) for k in range(2)])
    torch.testing.assert_close(vmap(output)(repeat(start, 2), text, seen, keys), alone, rtol=0, atol=1e-12)
    assert not torch.equal(output(start, text[0], seen[0], keys[1]), alone[0])
    evaluated = [task.apply(start, {"text": text[0], "picture": seen[0]}, train=False, key=k)[0] for k in keys]
    assert torch.equal(*evaluated)


def test_frozen_encoders_are_no_state_and_trained_ones_are() -> None:
    assert all(name.startswith(("projections.", "head.")) for name, _ in build().named_parameters())
    trained = [name for name, _ in build(picture_trained=True).named_parameters()]
    assert "encoders.picture.backbone.conv1.weight" in trained
    assert not any(name.startswith("encoders.picture.backbone.head") for name in trained)  # it would learn nothing


def test_key_inputs_finds_dropout_and_declared_layers() -> None:
    module = torch.nn.Sequential(Augment(), torch.nn.Conv2d(3, 2, 1), torch.nn.Dropout(0.5))
    assert key_inputs(make_exact(module)) == ("0.key", "2.key")


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(Invalid, match="but every modality here is a feature vector already: leave them out"):
        models.build("late_fusion", {"text": 3}, 4, flip=0.5)
    with pytest.raises(Invalid, match="but every modality here is a feature vector already"):
        models.build("late_fusion", {"text": 3}, 4, picture_encoder="resnet20")
    with pytest.raises(Invalid, match="must be a colour picture"):
        models.build("late_fusion", {"picture": (1, 8, 8)}, 4, picture_encoder="resnet20")
    with pytest.raises(Invalid, match=r"picture_encoder = 'resnet21' is not a model \(did you mean"):
        models.build("late_fusion", {"picture": (3, 8, 8)}, 4, picture_encoder="resnet21")
    with pytest.raises(Invalid, match=r"data\.picture_encoder in a config.* late_fusion may train a picture_encoder"):
        models.build("late_fusion", {"picture": (3, 8, 8)}, 4)
