"""Models made of models: frozen encoders, siamese heads, late fusion."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from consilience import models
from consilience.core.settings import Invalid
from consilience.models.frozen import frozen
from consilience.models.siamese import siamese_heads
from consilience.models.weights import load_weights


def pictures(rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_only_the_head_of_a_frozen_encoder_is_state() -> None:
    encoder = models.build("resnet20", (3, 8, 8), 10)
    model = frozen(encoder, nn.Linear(64, 2))
    assert sorted(model.state_dict()) == ["head.bias", "head.weight"]
    assert [n for n, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    assert not list(model.buffers())


def test_a_frozen_encoder_stays_put_in_training() -> None:
    encoder = models.build("resnet20", (3, 8, 8), 10)
    before = copy.deepcopy(encoder.state_dict())
    model = frozen(encoder, nn.Linear(64, 2)).train()
    step = torch.optim.SGD(model.parameters(), lr=0.5)
    features = model.features(pictures())
    for _ in range(3):
        step.zero_grad()
        F.cross_entropy(model(pictures()), torch.tensor([0, 1, 0, 1])).backward()
        step.step()
    assert torch.equal(model.features(pictures()), features), "batch statistics or weights moved"
    assert torch.equal(features, encoder.eval().features(pictures()))
    assert all(torch.equal(before[k], v) for k, v in encoder.state_dict().items())
    assert encoder.conv1.weight.requires_grad, "the caller's module must not be changed"


def test_a_frozen_encoder_follows_moves_and_copies() -> None:
    model = frozen(models.build("resnet20", (3, 8, 8), 10), nn.Linear(64, 2))
    single = model(pictures())
    assert model.double()(pictures().double()).dtype == torch.float64
    torch.testing.assert_close(model(pictures().double()).float(), single, rtol=1e-4, atol=1e-4)
    assert torch.equal(copy.deepcopy(model)(pictures()), model(pictures()))


def test_a_frozen_encoder_serves_a_head_of_another_precision() -> None:
    model = frozen(models.build("mlp", (4,), 2, hidden=(3,)), nn.Linear(3, 2))
    head = {name: value.double() for name, value in model.named_parameters()}
    x = torch.randn(5, 4, dtype=torch.float64)
    assert functional_call(model, head, (x,)).dtype == torch.float64


def test_any_module_can_be_frozen_and_text_too() -> None:
    table = nn.EmbeddingBag(10, 4)
    model = frozen(table, nn.Linear(4, 2))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(model(tokens), model.head(table(tokens)))


def test_linear_head_reads_its_encoder_from_a_file(tmp_path: Path) -> None:
    trained = models.build("resnet20", (3, 8, 8), 10, seed=4).eval()
    save_file(trained.state_dict(), tmp_path / "encoder.safetensors")
    model = models.build("linear_head", (3, 8, 8), 5, encoder="resnet20", weights=str(tmp_path / "encoder.safetensors"))
    assert torch.equal(model.features(pictures()), trained.features(pictures()))
    assert model(pictures()).shape == (4, 5)


def test_linear_head_without_weights_is_the_same_at_every_party() -> None:
    one, two = (models.build("linear_head", (3, 8, 8), 5, encoder="resnet20", seed=3) for _ in range(2))
    assert torch.equal(one(pictures()), two(pictures()))


def test_siamese_is_projection_prediction_and_classifier_on_the_backbone() -> None:
    backbone = models.build("resnet20", (3, 8, 8), 10).eval()
    model = siamese_heads(backbone).eval()
    x = pictures()
    first, _, second = model.projection
    z = second(first(backbone.features(x)).relu())
    assert z.shape == (4, 256) and torch.equal(model.features(x), z)
    assert torch.equal(model(x), model.head(z)) and model(x).shape == (4, 10)
    inner, norm, _, outer = model.prediction
    assert isinstance(norm, nn.BatchNorm1d) and inner.bias is None
    assert (inner.out_features, outer.out_features) == (64, 256)
    assert torch.equal(model.predict(z), outer(norm(inner(z)).relu()))


def test_every_siamese_parameter_is_used_and_the_backbone_is_a_copy() -> None:
    backbone = models.build("cnn", (1, 8, 8), 10)
    model = siamese_heads(backbone, projection=8)
    z = model.features(torch.randn(4, 1, 8, 8))
    (model.predict(z).square().sum() + model.head(z).square().sum()).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(name.startswith("backbone.head") for name in model.state_dict())
    assert isinstance(backbone.head, nn.Linear) and backbone.conv1.weight.grad is None


def test_siamese_sizes_can_be_given_for_a_backbone_without_a_head() -> None:
    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 6)

        def features(self, x: Tensor) -> Tensor:
            return self.layer(x)

    model = siamese_heads(Backbone(), 6, classes=4, projection=5, prediction_hidden=2)
    assert model(torch.zeros(2, 3)).shape == (2, 4) and model.prediction[0].out_features == 2
    with pytest.raises(Invalid, match=r"Backbone cannot be wrapped: .*features.*head"):
        siamese_heads(Backbone())


def test_fedsiam_model_is_resnet50_with_256_outputs() -> None:
    with torch.device("meta"):
        model = models.siamese(inputs=(3, 32, 32), classes=10, backbone="resnet50")
    heads = (2048 * 2048 + 2048) + (2048 * 256 + 256) + (256 * 64 + 2 * 64) + (64 * 256 + 256) + (256 * 10 + 10)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032 - (2048 * 1000 + 1000) + heads


def test_late_fusion_projects_each_modality_and_ignores_order() -> None:
    one = models.build("late_fusion", {"text": 3, "picture": (2,)}, 4, projection=5)
    two = models.build("late_fusion", {"picture": 2, "text": (3,)}, 4, projection=5)
    x = {"text": torch.randn(6, 3), "picture": torch.randn(6, 2)}
    picture, text = one.projections["picture"], one.projections["text"]
    parts = torch.cat([picture(x["picture"]).relu(), text(x["text"]).relu()], 1)
    assert torch.equal(one(x), one.head(parts))
    assert torch.equal(one(x), two(dict(reversed(x.items()))))


def test_a_missing_modality_adds_nothing_and_is_not_trained() -> None:
    """Late fusion: its features are 0, whatever its values, and its projection has no gradient."""
    model = models.build("late_fusion", {"text": 3, "picture": (2,), "present": (2,)}, 4, projection=5)
    x = {"text": torch.randn(6, 3), "picture": torch.randn(6, 2), "present": torch.tensor([[0, 1]] * 6)}
    other = {**x, "picture": torch.randn(6, 2)}
    assert torch.equal(model(x), model(other)) and model.features(x)[:, :5].abs().sum() == 0
    model(x).square().sum().backward()
    assert model.projections["picture"].weight.grad.abs().sum() == 0
    assert model.projections["text"].weight.grad.abs().sum() > 0
    whole = models.build("late_fusion", {"text": 3, "picture": (2,)}, 4, projection=5)
    everything = {**x, "present": torch.ones(6, 2, dtype=torch.int64)}
    assert torch.equal(model(everything), whole({"text": x["text"], "picture": x["picture"]}))


def test_early_fusion_reads_everything_at_once_and_marks_what_is_missing() -> None:
    model = models.build("early_fusion", {"text": 3, "picture": (1, 2, 2), "present": (2,)}, 4, hidden=(5,))
    x = {"text": torch.randn(6, 3), "picture": torch.randn(6, 1, 2, 2), "present": torch.tensor([[1, 1], [0, 1]] * 3)}
    here = x["present"][:, :1].float()
    row = torch.cat([x["picture"].flatten(1) * here, x["text"], x["present"].float()], 1)
    torch.testing.assert_close(model(x), model.head(model.layers[0](row).relu()))
    bare = models.build("early_fusion", {"text": 3, "picture": (1, 2, 2)}, 4, hidden=(5,))
    row = torch.cat([x["picture"].flatten(1), x["text"]], 1)
    torch.testing.assert_close(bare(x), bare.head(bare.layers[0](row).relu()))


def test_token_numbers_in_fusion_are_averaged_over_the_tokens_that_are_there() -> None:
    model = models.build("early_fusion", {"text": (4,), "table": 2}, 3, hidden=(5,), tokens=9, embedding=6)
    x = {"text": torch.tensor([[3, 4, 0, 0], [0, 0, 0, 0]]), "table": torch.randn(2, 2)}
    table = model.encoders["text"].embedding.weight
    means = torch.stack([(table[3] + table[4]) / 2, torch.zeros(6)])
    row = torch.cat([x["table"], means], 1)
    torch.testing.assert_close(model(x), model.head(model.layers[0](row).relu()))


def test_a_weights_file_may_use_other_libraries_names(tmp_path: Path) -> None:
    source = models.build("densenet121", (3, 8, 8), 5, stem="cifar", growth=2, seed=1)
    renamed = {}
    for name, value in source.state_dict().items():
        name = re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)\.", r"\1.\2.", name)
        name = name.replace("head.", "classifier.") if name.startswith("head.") else f"features.{name}"
        if not name.endswith("num_batches_tracked"):
            renamed[f"module.{name}"] = value
    save_file(renamed, tmp_path / "w.safetensors")
    model = models.build("densenet121", (3, 8, 8), 5, stem="cifar", growth=2)
    load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = models.build("mlp", (4,), 2, hidden=(3,))
    before = copy.deepcopy(model.state_dict())
    state = {name: torch.zeros_like(value) for name, value in before.items()}

    def refused(changed: dict[str, Tensor], message: str) -> None:
        save_file(changed, tmp_path / "w.safetensors")
        with pytest.raises(Invalid, match=message):
            load_weights(model, tmp_path / "w.safetensors")
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    refused(state | {"head.bias": torch.zeros(3)}, r"'head.bias' of shape \(3,\), but Perceptron needs \(2,\)")
    refused(
        state | {"hidden.1.wait": torch.zeros(1)},
        "'hidden.1.wait', which .*did you mean 'hidden.1.weight'",
    )
    refused({k: v for k, v in state.items() if k != "head.bias"}, "lacks 'head.bias' and 0 more")
    with pytest.raises(FileNotFoundError, match=r"no weights file .*absent.npz"):
        load_weights(model, tmp_path / "absent.npz")
    save_file(state | {"head.bias": torch.zeros(3)}, tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors", head=False)
    assert torch.equal(model.head.weight, before["head.weight"]) and not model.hidden[1].weight.any()
