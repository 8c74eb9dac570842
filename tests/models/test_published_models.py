"""Parameter counts, names and arithmetic equal those of the published models."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience import models
from consilience.models.weights import load_weights

State = dict[str, Tensor]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "published"),
    [
        ("resnet18", {"inputs": (3, 224, 224), "classes": 1000}, 11_689_512),
        ("resnet34", {"inputs": (3, 224, 224), "classes": 1000}, 21_797_672),
        ("resnet50", {"inputs": (3, 224, 224), "classes": 1000}, 25_557_032),
        ("densenet121", {"inputs": (3, 224, 224), "classes": 1000}, 7_978_856),
        ("resnet18", {"inputs": (3, 224, 224), "classes": 1000, "norm": "group"}, 11_689_512),
        ("densenet121", {"inputs": (3, 224, 224), "classes": 1000, "norm": "group"}, 7_978_856),
        ("resnet18", {"inputs": (3, 32, 32), "classes": 10, "stem": "cifar"}, 11_173_962),
        ("resnet20", {"inputs": (3, 32, 32), "classes": 10}, 269_722),
        ("cnn", {"inputs": (1, 28, 28), "classes": 10}, 1_199_882),  # PyTorch's and Flower's MNIST example
        ("cnn", {"inputs": (1, 28, 28), "classes": 62}, 1_206_590),  # EMNIST, Reddi et al. 2021
        ("cnn", {"inputs": (3, 32, 32), "classes": 10}, 1_626_442),
        (  # McMahan et al. 2017
            "cnn",
            {
                "inputs": (1, 28, 28),
                "classes": 10,
                "kernel": 5,
                "hidden": 512,
                "padding": "same",
                "pooling": "each",
            },
            1_663_370,
        ),
        ("cnn", {"inputs": (1, 8, 8), "classes": 10}, 320 + 18_496 + (256 + 1) * 128 + 1_290),
        ("mlp", {"inputs": (1, 28, 28), "classes": 10, "hidden": (200, 200)}, 199_210),  # McMahan et al. 2017
        ("logistic", {"inputs": (1, 28, 28), "classes": 10}, 7_850),
        (  # Shakespeare, Reddi et al. 2021
            "char_lstm",
            {"inputs": (80,), "classes": 90, "vocabulary": 90, "hidden": 256},
            820_522,
        ),
    ],
)
def test_parameter_counts(name: str, options: dict[str, object], published: int) -> None:
    with torch.device("meta"):  # shapes only: nothing is allocated or drawn
        assert count(getattr(models, name)(**options)) == published


def settle(model: nn.Module) -> nn.Module:
    """Norm layers away from the identity, so that leaving one out would show."""
    draw = torch.Generator().manual_seed(5)
    for value in (*model.parameters(), *model.buffers()):
        if value.is_floating_point() and value.dim() == 1:
            value.data.copy_(torch.rand(value.shape, generator=draw) + 0.5)
    return model.double().eval()


def norm(s: State, name: str, x: Tensor) -> Tensor:
    keys = ("running_mean", "running_var", "weight", "bias")
    return F.batch_norm(x, *(s[f"{name}.{key}"] for key in keys))


def reference_resnet(s: State, x: Tensor, *, bottleneck: bool, imagenet: bool) -> Tensor:
    """ResNet v1.5 written out from torchvision's parameter names."""
    x = F.conv2d(x, s["conv1.weight"], stride=2 if imagenet else 1, padding=3 if imagenet else 1)
    x = norm(s, "bn1", x).relu()
    if imagenet:
        x = F.max_pool2d(x, 3, 2, 1)
    for layer in (1, 2, 3, 4):
        for block in range(10):
            at = f"layer{layer}.{block}"
            if f"{at}.conv1.weight" not in s:
                break
            stride = 2 if layer > 1 and block == 0 else 1
            strides = (1, stride, 1) if bottleneck else (stride, 1)
            y = x
            for i, step in enumerate(strides, start=1):
                kernel = s[f"{at}.conv{i}.weight"]
                y = norm(s, f"{at}.bn{i}", F.conv2d(y, kernel, stride=step, padding=kernel.shape[-1] // 2))
                y = y.relu() if i < len(strides) else y
            if f"{at}.downsample.0.weight" in s:
                x = norm(s, f"{at}.downsample.1", F.conv2d(x, s[f"{at}.downsample.0.weight"], stride=stride))
            x = (x + y).relu()
    return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), s["head.weight"], s["head.bias"])


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_resnets_equal_the_reference(name: str, stem: str) -> None:
    model = settle(models.build(name, (3, 37, 37), 7, stem=stem, width=4))
    x = torch.randn(2, 3, 37, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = reference_resnet(model.state_dict(), x, bottleneck=name == "resnet50", imagenet=stem == "imagenet")
    torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-10)


def reference_densenet(s: State, x: Tensor, *, imagenet: bool) -> Tensor:
    """DenseNet written out from torchvision's parameter names."""
    x = F.conv2d(x, s["conv0.weight"], stride=2 if imagenet else 1, padding=3 if imagenet else 1)
    x = norm(s, "norm0", x).relu()
    if imagenet:
        x = F.max_pool2d(x, 3, 2, 1)
    for block, depth in enumerate((6, 12, 24, 16), start=1):
        if block > 1:
            at = f"transition{block - 1}"
            x = F.avg_pool2d(F.conv2d(norm(s, f"{at}.norm", x).relu(), s[f"{at}.conv.weight"]), 2, 2)
        made = [x]
        for i in range(1, depth + 1):
            at = f"denseblock{block}.denselayer{i}"
            y = F.conv2d(norm(s, f"{at}.norm1", torch.cat(made, 1)).relu(), s[f"{at}.conv1.weight"])
            made.append(F.conv2d(norm(s, f"{at}.norm2", y).relu(), s[f"{at}.conv2.weight"], padding=1))
        x = torch.cat(made, 1)
    x = norm(s, "norm5", x).relu()
    return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), s["head.weight"], s["head.bias"])


@pytest.mark.parametrize(("stem", "side"), [("imagenet", 41), ("cifar", 9)])
def test_densenet_equals_the_reference(stem: str, side: int) -> None:
    model = settle(models.build("densenet121", (3, side, side), 7, stem=stem, growth=2))
    x = torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = reference_densenet(model.state_dict(), x, imagenet=stem == "imagenet")
    torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-10)


def test_cnn_equals_a_plain_stack_of_layers() -> None:
    model = models.build("cnn", (3, 12, 10), 5, dropout=0.5).eval()
    plain = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 4 * 3, 128), nn.ReLU(), nn.Linear(128, 5),
    )  # fmt: skip
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values())))
    x = torch.randn(4, 3, 12, 10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), plain(x))


def test_convolutions_start_with_he_variance() -> None:
    model = models.build("resnet18", (3, 32, 32), 10)
    kernel = model.layer4[1].conv2.weight.detach()  # fan out = 512 * 9
    assert float(kernel.std()) == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


@pytest.mark.parametrize("name", ["resnet18", "resnet20", "resnet50", "densenet121"])
def test_group_norm_has_no_buffers_and_keeps_two_channels_in_a_group(name: str) -> None:
    model = models.build(name, (3, 32, 32), 10, norm="group")
    layers = [layer for layer in model.modules() if isinstance(layer, nn.GroupNorm)]
    assert layers and not list(model.buffers())
    for layer in layers:
        assert layer.num_channels % layer.num_groups == 0 and layer.num_channels >= 2 * layer.num_groups
        if layer.num_channels >= 64 and name != "resnet20":
            assert layer.num_groups == 32


def test_resnet20_scores_as_published_on_cifar10() -> None:
    data = os.environ.get("CONSILIENCE_DATA")
    if not data or not (Path(data) / "resnet20_cifar10_weights").is_dir():
        pytest.skip("set CONSILIENCE_DATA to a folder with cifar10 and resnet20_cifar10_weights")
    image = pytest.importorskip("PIL.Image", reason="reading picture sheets needs pillow")
    image.MAX_IMAGE_PIXELS = None
    folder = Path(data) / "cifar10"
    sheet = np.asarray(image.open(folder / "test.webp").convert("RGB").crop((0, 0, 3200, 320)))
    tiles = sheet.reshape(10, 32, 100, 32, 3).swapaxes(1, 2).reshape(1000, 32, 32, 3)
    x = torch.from_numpy(tiles).permute(0, 3, 1, 2).float() / 255
    x = (x - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    y = torch.from_numpy(np.load(folder / "labels.npz")["y_test"][:1000]).long()
    model = models.build("resnet20", (3, 32, 32), 10).eval()
    load_weights(model, Path(data) / "resnet20_cifar10_weights" / "resnet20.npz")
    with torch.no_grad():
        right = torch.cat([model(batch).argmax(1) for batch in x.split(250)]) == y
    assert float(right.float().mean()) > 0.91
