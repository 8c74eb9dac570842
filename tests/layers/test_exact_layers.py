"""Batch norm that ignores padding and dropout drawn from keys, against PyTorch's own layers."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilience.core import rng
from consilience.core.settings import Invalid
from consilience.layers.exact import ExactBatchNorm, KeyedDropout, extra_inputs, make_exact

CHANNELS = 3
SHAPES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d over length": (nn.BatchNorm1d, (4,)),
    "2d": (nn.BatchNorm2d, (2, 3)),
    "3d": (nn.BatchNorm3d, (2, 1, 2)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"momentum": 0.3, "eps": 1e-3},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def pair(shape: str, options: dict[str, Any]) -> tuple[nn.Module, ExactBatchNorm]:
    """PyTorch's layer with random weights, and its exact counterpart with its own copy of the values."""
    layer = SHAPES[shape][0](CHANNELS, dtype=torch.float64, **options)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return layer, ExactBatchNorm.like(copy.deepcopy(layer))  # type: ignore[arg-type]


def inputs(shape: str, rows: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return 3 + 2 * torch.randn(rows, CHANNELS, *SHAPES[shape][1], generator=draw, dtype=torch.float64)


def assert_same_state(layer: nn.Module, exact: nn.Module) -> None:
    left, right = layer.state_dict(), exact.state_dict()
    assert list(left) == list(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        torch.testing.assert_close(right[name], value, rtol=1e-12, atol=1e-12)


def assert_same_gradients(layer: nn.Module, exact: nn.Module) -> None:
    for (name, one), (_, other) in zip(layer.named_parameters(), exact.named_parameters()):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12, msg=name)


@each_shape
@each_option
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_masked_training_equals_torch_on_the_live_rows(shape: str, options: dict[str, Any], padding: int) -> None:
    """Outputs, gradients, running mean, unbiased running variance and the counter, over several batches."""
    layer, exact = pair(shape, options)
    for batch, rows in enumerate((4, 7, 2)):
        live = inputs(shape, rows, seed=batch).requires_grad_()
        garbage = 1e3 * inputs(shape, padding, seed=99)
        padded = torch.cat([live.detach(), garbage]).requires_grad_()
        pull = inputs(shape, rows, seed=50 + batch)  # an arbitrary gradient from above
        layer.zero_grad()
        exact.zero_grad()
        expected = layer(live)
        exact.mask = torch.tensor([1.0] * rows + [0.0] * padding, dtype=torch.float64)
        got = exact(padded)
        torch.testing.assert_close(got[:rows], expected, rtol=1e-12, atol=1e-12)
        (expected * pull).sum().backward()
        (got[:rows] * pull).sum().backward()
        assert live.grad is not None and padded.grad is not None
        torch.testing.assert_close(padded.grad[:rows], live.grad, rtol=1e-11, atol=1e-12)
        assert bool((padded.grad[rows:] == 0).all()), "padding must get exactly no gradient"
        assert_same_gradients(layer, exact)
        assert_same_state(layer, exact)


@each_shape
@each_option
def test_without_a_mask_it_is_torchs_own(shape: str, options: dict[str, Any]) -> None:
    layer, exact = pair(shape, options)
    for batch in range(3):
        x = inputs(shape, 5, seed=batch)
        assert torch.equal(exact(x), layer(x))
    for (name, one), (_, other) in zip(layer.named_buffers(), exact.named_buffers()):
        assert torch.equal(one, other), name


@each_shape
@each_option
def test_evaluation_equals_torch(shape: str, options: dict[str, Any]) -> None:
    layer, exact = pair(shape, options)
    layer(inputs(shape, 6, seed=3))
    exact(inputs(shape, 6, seed=3))
    layer.eval()
    exact.eval()
    x = inputs(shape, 5)
    assert torch.equal(exact(x), layer(x))
    assert_same_state(layer, exact)


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}], ids=str)
@pytest.mark.parametrize("padding", [None, 0, 3])
def test_one_row_uses_the_running_statistics(options: dict[str, Any], padding: int | None) -> None:
    layer, exact = pair("1d", options)
    warm = inputs("1d", 6, seed=3)
    layer(warm)
    exact(warm)
    before = copy.deepcopy(exact.state_dict())
    x = inputs("1d", 1).requires_grad_()
    expected = layer.eval()(x)
    if padding is None:
        got = exact(x)
    else:
        exact.mask = torch.tensor([1.0] + [0.0] * padding, dtype=torch.float64)
        got = exact(torch.cat([x, inputs("1d", padding, seed=9)]))
    torch.testing.assert_close(got[:1], expected, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(before[name], value) for name, value in exact.state_dict().items())
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (got[:1], expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


def test_one_row_with_several_pixels_is_an_ordinary_batch() -> None:
    layer, exact = pair("2d", {})
    assert torch.equal(exact(inputs("2d", 1)), layer(inputs("2d", 1)))
    layer, exact = pair("2d", {})
    exact.mask = torch.tensor([1.0, 0.0], dtype=torch.float64)
    got = exact(torch.cat([inputs("2d", 1), inputs("2d", 1, seed=4)]))
    torch.testing.assert_close(got[:1], layer(inputs("2d", 1)), rtol=1e-12, atol=1e-12)
    assert_same_state(layer, exact)


def test_one_row_without_running_statistics_means_the_same_padded_or_not() -> None:
    outcomes: list[Any] = []
    for padding in (0, 1):
        _, exact = pair("1d", {"track_running_stats": False})
        x = inputs("1d", 1)
        if padding:
            exact.mask = torch.tensor([1.0] + [0.0] * padding, dtype=torch.float64)
            x = torch.cat([x, inputs("1d", padding, seed=9)])
        outcomes.append(exact(x)[0].tolist())
    assert outcomes[0] == outcomes[1]


def test_scale_without_shift() -> None:
    """Newer PyTorch has BatchNorm(bias=False)."""
    if "bias" not in inspect.signature(nn.BatchNorm2d).parameters:
        pytest.skip("this PyTorch has no BatchNorm(bias=...)")
    layer, exact = pair("2d", {"bias": False})
    expected = layer(inputs("2d", 4))
    exact.mask = torch.tensor([1.0] * 4 + [0.0], dtype=torch.float64)
    got = exact(torch.cat([inputs("2d", 4), inputs("2d", 1, seed=9)]))
    torch.testing.assert_close(got[:4], expected, rtol=1e-12, atol=1e-12)


def test_batch_norm_in_a_vmap_counts_each_clients_own_rows() -> None:
    layer, exact = pair("2d", {})
    stacked = torch.stack([inputs("2d", 4, seed=s) for s in range(3)])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.float64)
    start = {name: torch.stack([value] * 3) for name, value in exact.state_dict().items()}

    def run(values: dict[str, Tensor], x: Tensor, m: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values = {name: value.clone() for name, value in values.items()}
        return torch.func.functional_call(exact, {**values, "mask": m}, (x,)), values

    out, after = torch.func.vmap(run)(start, stacked, mask)
    for client in range(3):
        one, rows = copy.deepcopy(layer), int(mask[client].sum())
        torch.testing.assert_close(out[client, :rows], one(stacked[client, :rows]), rtol=1e-12, atol=1e-12)
        for name, value in one.state_dict().items():
            torch.testing.assert_close(after[name][client], value, rtol=1e-12, atol=1e-12)


# --- dropout ---------------------------------------------------------------------------------------------------------


def dropout(p: float, *, channels: bool = False, key: int = 5, layer: int = 0) -> KeyedDropout:
    made = KeyedDropout(p, layer, channels)
    made.key = torch.tensor(key)
    return made


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_rate_and_scale(p: float) -> None:
    out = dropout(p)(torch.ones(400, 250))
    kept = out != 0
    count = out.numel()
    assert abs(int((~kept).sum()) - p * count) <= 5 * math.sqrt(count * p * (1 - p))
    assert torch.unique(out[kept]).tolist() == [pytest.approx(1 / (1 - p))]


def test_dropout_off() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(dropout(0.5).eval()(x), x)
    assert torch.equal(dropout(0.0)(x), x)
    assert torch.equal(dropout(1.0)(x), torch.zeros(3, 4))


def test_dropout_of_whole_channels() -> None:
    out = dropout(0.5, channels=True)(torch.ones(40, 10, 3, 2))
    flat = out.flatten(2)
    assert bool((flat == flat[..., :1]).all())
    assert 0.3 < float((flat[..., 0] == 0).double().mean()) < 0.7


def test_dropout_pattern_depends_on_key_layer_and_position_only() -> None:
    x = torch.ones(6, 50)
    first = dropout(0.5)(x)
    assert torch.equal(first, dropout(0.5)(x))
    assert not torch.equal(first, dropout(0.5, key=6)(x))
    assert not torch.equal(first, dropout(0.5, layer=1)(x))
    assert torch.equal(first[:2], dropout(0.5)(x[:2]))  # rows behind do not matter: padding is harmless
    expected = rng.keep_mask(rng.fold(torch.tensor(5), 0), 300, 0.5).view(6, 50)
    assert torch.equal(first != 0, expected)


def test_dropout_gradient_is_the_mask() -> None:
    x = torch.ones(4, 5, dtype=torch.float64, requires_grad=True)
    out = dropout(0.5)(x)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, out.detach())


def test_dropout_without_a_key_is_refused() -> None:
    with pytest.raises(Invalid, match="trained without a key"):
        KeyedDropout(0.5, 0, False)(torch.ones(2, 2))


# --- swapping --------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Layers at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2), nn.Dropout2d(0.5)))
        self.bn = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.1)


def test_make_exact_keeps_names_and_values() -> None:
    module = Nested()
    names, buffers = list(dict(module.named_parameters())), list(dict(module.named_buffers()))
    values = {name: value.clone() for name, value in module.state_dict().items()}
    exact = make_exact(module)
    assert list(dict(exact.named_parameters())) == names
    assert list(dict(exact.named_buffers())) == buffers
    assert all(torch.equal(values[name], value) for name, value in exact.state_dict().items())
    assert extra_inputs(exact, ExactBatchNorm, "mask") == ("body.1.0.mask", "bn.mask")
    assert extra_inputs(exact, KeyedDropout, "key") == ("body.1.1.key", "drop.key")
    drops = [m for m in exact.modules() if type(m) is KeyedDropout]
    assert len({d.layer for d in drops}) == 2
    assert {(d.p, d.whole_channels) for d in drops} == {(0.5, True), (0.1, False)}


def test_a_batch_norm_by_itself_is_swapped() -> None:
    assert type(make_exact(nn.BatchNorm1d(2))) is ExactBatchNorm
    assert extra_inputs(make_exact(nn.BatchNorm1d(2)), ExactBatchNorm, "mask") == ("mask",)


def test_a_layer_used_under_two_names_is_swapped_under_both() -> None:
    drop, norm = nn.Dropout(0.5), nn.BatchNorm1d(4)
    exact = make_exact(nn.Sequential(nn.Linear(4, 4), norm, drop, nn.Linear(4, 4), norm, drop))
    kinds = [type(exact.get_submodule(str(place))) for place in range(6)]
    assert kinds == [nn.Linear, ExactBatchNorm, KeyedDropout, nn.Linear, ExactBatchNorm, KeyedDropout]


def test_layers_that_draw_inside_stay_what_they_are() -> None:
    """Their draws come from the key when they run: see tests/layers/test_randomness.py."""
    layers = [nn.LSTM(3, 4, num_layers=2, dropout=0.5), nn.MultiheadAttention(4, 2, dropout=0.1), nn.RReLU()]
    made = make_exact(nn.Sequential(*layers, OwnDropout(0.5), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1)))
    assert [type(layer) for layer in made[:4]] == [nn.LSTM, nn.MultiheadAttention, nn.RReLU, OwnDropout]
    assert type(made[4].dropout1) is nn.Dropout, "the batch may be its second dimension"


class OwnBatchNorm(nn.BatchNorm2d):
    """A user's subclass."""


class OwnDropout(nn.Dropout):
    """A user's subclass."""


@pytest.mark.parametrize(
    "layer",
    [
        OwnBatchNorm(3),
        nn.InstanceNorm2d(3, track_running_stats=True),
        nn.Embedding(3, 2, scale_grad_by_freq=True),
        nn.EmbeddingBag(3, 2, scale_grad_by_freq=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_mix_rows_and_are_not_swapped_are_refused(layer: nn.Module) -> None:
    with pytest.raises(Invalid, match=type(layer).__name__):
        make_exact(nn.Sequential(nn.Conv2d(1, 3, 1), layer))
