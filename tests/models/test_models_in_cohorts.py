"""Every model trains a whole cohort at once: vmap over stacked clients equals one client after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from consilience import models
from consilience.core import tree

CLIENTS, ROWS = 3, 4
CLASSES = 3
PICTURE = (3, 8, 8)

TINY: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "logistic": ("logistic", (5,), {}),
    "mlp": ("mlp", (2, 3), {"hidden": (4, 5)}),
    "cnn": ("cnn", (1, 8, 8), {"channels": (2, 3), "hidden": 4}),
    "cnn, McMahan's": (
        "cnn",
        (1, 8, 8),
        {"channels": (2, 3), "hidden": 4, "kernel": 5, "padding": "same", "pooling": "each"},
    ),
    "resnet18": ("resnet18", PICTURE, {"width": 4, "stem": "cifar"}),
    "resnet18, ImageNet stem": ("resnet18", (3, 33, 33), {"width": 4}),
    "resnet18, group norm": ("resnet18", (3, 33, 33), {"width": 4, "norm": "group"}),
    "resnet34": ("resnet34", PICTURE, {"width": 2, "stem": "cifar"}),
    "resnet50": ("resnet50", PICTURE, {"width": 4, "stem": "cifar"}),
    "resnet50, group norm": (
        "resnet50",
        PICTURE,
        {"width": 4, "stem": "cifar", "norm": "group", "groups": 4},
    ),
    "resnet20": ("resnet20", PICTURE, {}),
    "resnet20, group norm": ("resnet20", PICTURE, {"norm": "group"}),
    "densenet121": ("densenet121", PICTURE, {"stem": "cifar", "growth": 2}),
    "densenet121, group norm": ("densenet121", (3, 32, 32), {"growth": 2, "norm": "group"}),
    "char_lstm": ("char_lstm", (6,), {"vocabulary": 7, "hidden": 5}),
    "text_lstm": ("text_lstm", (6,), {"vocabulary": 7, "hidden": 5, "embedding": 4}),
    "text_lstm, constant embedding": (
        "text_lstm",
        (6,),
        {"vocabulary": 7, "hidden": 5, "embedding": 4, "train_embedding": False},
    ),
    "lora_mlp": ("lora_mlp", (1, 4, 4), {"hidden": (6, 6), "rank": 2}),
    "linear_head": ("linear_head", PICTURE, {"encoder": "resnet20"}),
    "late_fusion": ("late_fusion", {"text": 3, "picture": (2,)}, {"projection": 4}),
    "late_fusion, parts missing": (
        "late_fusion",
        {"text": (5,), "picture": (2,), "present": (2,)},
        {"projection": 4, "tokens": 7},
    ),
    "early_fusion": ("early_fusion", {"text": 3, "picture": (2,)}, {"hidden": (4,)}),
    "early_fusion, parts missing": (
        "early_fusion",
        {"text": (5,), "picture": (2,), "present": (2,)},
        {"hidden": (4,), "tokens": 7, "embedding": 3},
    ),
    "siamese": ("siamese", (1, 8, 8), {"backbone": "cnn", "projection": 8}),
    "siamese, ResNet": (
        "siamese",
        PICTURE,
        {"backbone": "resnet18", "backbone_options": {"width": 2, "stem": "cifar"}, "projection": 8},
    ),
}


def tiny(label: str, seed: int = 0) -> nn.Module:
    """The tiny model of that label, in float64."""
    name, inputs, options = TINY[label]
    return models.build(name, inputs, CLASSES, seed=seed, **options).double()


def examples(label: str, *lead: int) -> Any:
    """Examples of shape `[*lead, *inputs]` for the tiny model of that label."""
    name, inputs, _ = TINY[label]
    draw = torch.Generator().manual_seed(7)
    if name.endswith("lstm"):
        return torch.randint(0, 7, (*lead, *inputs), generator=draw)
    if isinstance(inputs, dict):
        sizes = {"text": 3, "picture": 2}
        parts = {k: torch.randn(*lead, d, generator=draw, dtype=torch.float64) for k, d in sizes.items()}
        if "present" in inputs:  # its text is token numbers
            parts["text"] = torch.randint(0, 7, (*lead, 5), generator=draw)
            parts["present"] = torch.randint(0, 2, (*lead, 2), generator=draw)
        return parts
    return torch.randn(*lead, *inputs, generator=draw, dtype=torch.float64)


@pytest.fixture(autouse=True)
def no_slow_fallback() -> Iterator[None]:
    """Let vmap raise where it would otherwise loop over clients in Python's stead."""
    before = torch._C._functorch._is_vmap_fallback_enabled()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(before)


def cohort(label: str) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """One module to call, and stacked parameters and buffers of differently seeded clients."""
    clients = [tiny(label, seed) for seed in range(CLIENTS)]
    params = tree.stack([{k: p.detach() for k, p in c.named_parameters()} for c in clients])
    buffers = tree.stack([dict(c.named_buffers()) for c in clients])
    return clients[0], params, buffers


def loss(model: nn.Module, params: Any, buffers: Any, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional_call(model, (params, buffers), (x,))
    return F.cross_entropy(logits, y), logits


def assert_close(got: Tensor, wanted: Tensor, label: str) -> None:
    """Within 1e-12 of the largest entry."""
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12 * scale, msg=lambda m: f"{label}: {m}")


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("label", TINY)
def test_stacked_clients_equal_single_clients(label: str, training: bool) -> None:
    model, params, buffers = cohort(label)
    model.train(training)
    x, y = examples(label, CLIENTS, ROWS), torch.arange(CLIENTS * ROWS).reshape(CLIENTS, ROWS) % CLASSES
    together = tree.clone(buffers)
    gradients, logits = vmap(grad(lambda *a: loss(model, *a), has_aux=True))(params, together, x, y)
    assert logits.shape == (CLIENTS, ROWS, CLASSES) and logits.dtype == torch.float64
    for k in range(CLIENTS):
        alone = tree.clone(tree.rows(buffers, k))
        gradient, single = grad(lambda *a: loss(model, *a), has_aux=True)(
            tree.rows(params, k), alone, tree.rows(x, k), y[k]
        )
        assert_close(logits[k], single, "logits")
        for name, value in gradient.items():
            assert_close(gradients[name][k], value, name)
        for name, value in alone.items():
            assert_close(together[name][k], value, name)
            if training and name.endswith("running_mean") and not name.startswith("prediction"):
                assert not torch.equal(value, buffers[name][k]), "batch statistics were not taken"


@pytest.mark.parametrize("label", TINY)
def test_functional_call_equals_the_module(label: str) -> None:
    model = tiny(label, seed=3).eval()
    x = examples(label, ROWS)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    with torch.no_grad():
        assert torch.equal(functional_call(model, (params, buffers), (x,)), model(x))


@pytest.mark.parametrize("label", TINY)
def test_logits_are_the_head_of_the_features(label: str) -> None:
    model = tiny(label).eval()
    x = examples(label, ROWS)
    with torch.no_grad():
        assert isinstance(model.head, nn.Linear)
        assert model.features(x).shape == (ROWS, model.head.in_features)
        assert torch.equal(model.head(model.features(x)), model(x))


@pytest.mark.parametrize("label", TINY)
def test_rows_do_not_mix_in_eval_mode(label: str) -> None:
    model = tiny(label).eval()
    x = examples(label, ROWS)
    with torch.no_grad():
        whole = model(x)
        for i in range(ROWS):
            one = tree.rows(x, slice(i, i + 1))
            torch.testing.assert_close(model(one), whole[i : i + 1], rtol=1e-12, atol=1e-12)


def test_prediction_head_under_vmap() -> None:
    model, params, buffers = cohort("siamese")
    z = torch.randn(CLIENTS, ROWS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    head = model.prediction
    own = {k.removeprefix("prediction."): v for k, v in (params | buffers).items() if k.startswith("prediction.")}
    state = tree.clone(own)
    together = vmap(lambda s, rows: functional_call(head, s, (rows,)))(state, z)
    for k in range(CLIENTS):
        alone = tree.clone(tree.rows(own, k))
        assert_close(together[k], functional_call(head, alone, (z[k],)), "p")
        assert_close(state["1.running_var"][k], alone["1.running_var"], "running_var")
        assert int(state["1.num_batches_tracked"][k]) == 1


def test_no_layer_works_in_place_and_every_catalogue_entry_is_tried() -> None:
    others = {"hugging_face", "timm", "torchvision"}  # of other libraries, which have tests of their own
    others |= {"small_unet", "token_transformer"}  # with an output for every pixel or token: see kind_tasks
    assert {name for name, _, _ in TINY.values()} == set(models.__all__) - others
    for label in TINY:
        assert not any(getattr(layer, "inplace", False) for layer in tiny(label).modules()), label


def test_dropout_is_a_module_and_only_where_asked_for() -> None:
    def rates(model: nn.Module) -> list[float]:
        return [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)]

    assert rates(models.cnn(inputs=(1, 28, 28), classes=10)) == []
    assert rates(models.cnn(inputs=(1, 28, 28), classes=10, dropout=0.5)) == [0.25, 0.5]
    assert rates(models.mlp(inputs=(4,), classes=2, hidden=(3, 3), dropout=0.1)) == [0.1, 0.1]
    assert rates(models.text_lstm(inputs=(4,), classes=2, vocabulary=5, dropout=0.1)) == [0.1]
    assert rates(models.late_fusion(inputs={"a": 2, "b": 2}, classes=2, dropout=0.1)) == [0.1]


@pytest.mark.parametrize("label", TINY)
def test_parameters_depend_on_the_seed_alone(label: str) -> None:
    torch.manual_seed(1)
    first = tiny(label, seed=5).state_dict()
    torch.manual_seed(2)
    again, other = tiny(label, seed=5).state_dict(), tiny(label, seed=6).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
