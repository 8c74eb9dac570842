"""Building by name: seeds, catalogue, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from consilience import models
from consilience.core.settings import Invalid, options_of


def test_catalogue_holds_factories_with_annotated_keyword_options_only() -> None:
    assert models.__all__ == sorted(models.__all__)
    for name in models.__all__:
        function = getattr(models, name)
        parameters = inspect.signature(function).parameters
        assert function.__name__ == name and inspect.getdoc(function)
        assert {"inputs", "classes"} <= set(parameters) == set(options_of(function))
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())


def test_global_random_state_is_left_untouched() -> None:
    before = torch.get_rng_state()
    models.build("mlp", (4,), 2, seed=9)
    with pytest.raises(Invalid):
        models.build("cnn", (4,), 2, seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_build_hands_options_on() -> None:
    model = models.build("mlp", [2, 2], 3, hidden=[5])
    assert [tuple(p.shape) for p in model.parameters()] == [(5, 4), (5,), (3, 5), (3,)]


@pytest.mark.parametrize(
    ("name", "inputs", "options", "message"),
    [
        ("resnet81", (3, 32, 32), {}, "model = 'resnet81' is not a model .did you mean 'resnet18'"),
        ("build", (4,), {}, "model = 'build' is not a model"),
        ("mlp", (4,), {"hiden": (3,)}, "mlp.hiden is not a setting .did you mean 'hidden'"),
        ("mlp", (4,), {"hidden": (3, 0)}, r"mlp.hidden\[1\] = 0 is out of range"),
        ("mlp", (), {}, r"mlp.inputs = \(\) has no axis"),
        ("mlp", (3, 0), {}, r"mlp.inputs\[1\] = 0 is out of range"),
        (
            "logistic",
            {"text": 4},
            {},
            "logistic.inputs = .* has several parts: logistic reads one; use early_fusion or",
        ),
        ("cnn", (64,), {}, r"cnn.inputs = \(64,\) is not a picture: cnn reads .*mlp"),
        ("cnn", (1, 8, 8), {"kernel": 5}, r"cnn.inputs = \(1, 8, 8\) is too small: .* 10 x 10 .*kernel"),
        ("cnn", (1, 8, 8), {"kernel": 4, "padding": "same"}, "cnn.kernel = 4 .* odd"),
        ("cnn", (1, 8, 8), {"dropout": 1.0}, "cnn.dropout = 1.0 is out of range"),
        ("cnn", (1, 8, 8), {"channels": (1, 2, 3)}, "cnn.channels .* must hold 2 values"),
        ("resnet18", (28, 28), {}, "resnet18.inputs = .28, 28. is not a picture"),
        ("resnet18", (3, 32, 32), {"norm": "layer"}, "resnet18.norm = 'layer' is not one of batch, group"),
        ("densenet121", (3, 28, 28), {}, '29 x 29 .*stem="cifar"'),
        ("densenet121", (3, 7, 7), {"stem": "cifar"}, "8 x 8"),
        ("char_lstm", (80,), {}, "char_lstm needs vocabulary: give vocabulary="),
        ("char_lstm", (3, 80), {"vocabulary": 5}, "char_lstm.inputs = .3, 80. is not a sequence"),
        ("late_fusion", (4,), {}, "late_fusion.inputs = .4,. must name the size of each modality"),
        ("late_fusion", {"a": (3, 4, 4)}, {}, "late_fusion.inputs.a = .3, 4, 4. is not a feature vector"),
        (
            "late_fusion",
            {"a": 3, "present": (2,)},
            {},
            r"late_fusion.inputs.present = \(2,\) must be a mask of the 1 mod",
        ),
        ("late_fusion", {"a": 3}, {"tokens": 9}, "late_fusion.tokens = 9 is for a modality named 'text'"),
        ("early_fusion", (4,), {}, "early_fusion.inputs = .4,. must name the size of each modality"),
        ("early_fusion", {"a": 3}, {"hidden": ()}, "early_fusion.hidden = .. has no layer"),
        ("late_fusion", {"a.b": 3}, {}, "late_fusion.inputs has a modality named 'a.b'"),
        ("late_fusion", {"keys": 3}, {}, "late_fusion.inputs has a modality named 'keys'"),
        ("late_fusion", {"a": 0}, {}, r"late_fusion.inputs.a\[0\] = 0 is out of range"),
        ("siamese", (4,), {"backbone": "mpl"}, "siamese.backbone = 'mpl' is not a model .did you mean 'mlp'"),
        (
            "siamese",
            (4,),
            {"backbone": "mlp", "backbone_options": {"hiden": 3}},
            "mlp.hiden is not a setting",
        ),
        ("siamese", (4,), {"backbone": "mlp", "backbone_options": 3}, "siamese.backbone_options = 3 must be"),
        ("linear_head", (4,), {"encoder": "resnet18"}, "resnet18.inputs = .4,. is not a picture"),
        (
            "linear_head",
            (4,),
            {"encoder": "mlp", "weights": "x.pth"},
            "x.pth.* must end in .safetensors or .npz",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_could(
    name: str, inputs: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        models.build(name, inputs, 3, **options)


def test_classes_below_one_and_positional_options_are_refused() -> None:
    with pytest.raises(Invalid, match=r"mlp.classes = 0 is out of range: it must be >= 1"):
        models.build("mlp", (4,), 0)
    with pytest.raises(Invalid, match="mlp takes its options by name"):
        models.mlp((4,), 2)  # type: ignore[misc]
    with pytest.raises(Invalid, match="mlp needs inputs and classes"):
        models.mlp()  # type: ignore[call-arg]


@pytest.mark.parametrize(("kernel", "least"), [(1, 2), (3, 6), (5, 10)])
def test_smallest_picture_a_cnn_takes(kernel: int, least: int) -> None:
    model = models.build("cnn", (1, least, least), 2, kernel=kernel)
    assert model(torch.zeros(1, 1, least, least)).shape == (1, 2)
    with pytest.raises(Invalid, match=f"{least} x {least}"):
        models.build("cnn", (1, least - 1, least), 2, kernel=kernel)


@pytest.mark.parametrize(("stem", "least"), [("imagenet", 29), ("cifar", 8)])
def test_smallest_picture_a_densenet_takes(stem: str, least: int) -> None:
    model = models.build("densenet121", (1, least, least), 2, stem=stem, growth=2).eval()
    assert model(torch.zeros(1, 1, least, least)).shape == (1, 2)
