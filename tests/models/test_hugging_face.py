"""Transformers by name: heads, what is trained, texts as tokens, and what is refused before training."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_tiny as tiny
from torch.nn import functional as F

import consilience as cs
from consilience.core.settings import Invalid
from consilience.models.tokenization import BYTE_VOCABULARY, IGNORED, Tokenization
from consilience.task.task import Task

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'consilience[text]'")
pytest.importorskip("peft", reason="needs peft: pip install 'consilience[text]'")
TEXTS = ["send money", "my card is stolen", "é€ 漢字"]
SMALL = tiny.CONFIGS["bert"]
BYTES = Tokenization(source="bytes", length=tiny.LENGTH)


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2"])
def test_equals_transformers_own_forward(family: str) -> None:
    model = tiny.model(family, "all").eval()
    rows = model.tokenize(TEXTS)
    own = model.core(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    assert torch.allclose(model(rows), own, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2"])
def test_padding_changes_nothing(family: str) -> None:
    model = tiny.model(family, "lora").eval()
    alone = torch.cat([model(model.tokenize([text])) for text in TEXTS])
    assert torch.allclose(model(model.tokenize(TEXTS, pad_to=tiny.LENGTH)), alone, atol=1e-6)


CLASSIFIERS = [("bert", "head"), ("distilbert", "lora"), ("gpt2", "all"), ("vit", "lora")]


@pytest.mark.parametrize(("family", "train"), CLASSIFIERS)
def test_head_of_features_is_forward(family: str, train: str) -> None:
    model: Any = tiny.model(family, train).eval()
    x = torch.randn(3, 1, 6, 6) if family == "vit" else model.tokenize(TEXTS)
    assert torch.allclose(model.head(model.features(x)), model(x), atol=1e-6)
    assert model.features(x).shape == (3, 16)


def test_what_is_trained() -> None:
    learned = {train: list(Task(tiny.model("bert", train)).start()["params"]) for train in ("all", "head", "lora")}
    assert len(learned["all"]) == len(list(tiny.model("bert", "all").parameters()))
    assert {name.split(".")[-2] for name in learned["head"]} == {"dense", "classifier"}  # the pooler and the classifier
    adapters = [name for name in learned["lora"] if "lora_" in name]
    assert len(adapters) == 2 * 2 * 2  # A and B of queries and values in two layers
    assert all("pooler" in name or "classifier" in name for name in set(learned["lora"]) - set(adapters))


def test_lora_adds_the_scaled_product() -> None:
    model: Any = tiny.model("bert", "lora", alpha=6.0)
    layer = model.core.bert.encoder.layer[0].attention.self.query
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape == (2, 16) and torch.equal(b, torch.zeros(16, 2))  # no change at the start
    torch.nn.init.normal_(b)
    x = torch.randn(4, 16)
    expected = F.linear(x, layer.base_layer.weight + 6.0 / 2 * b @ a, layer.base_layer.bias)
    assert torch.allclose(layer.eval()(x), expected, atol=1e-5)


def test_weights_of_a_folder_and_the_seed(tmp_path: Path) -> None:
    first: Any = tiny.model("bert", "all", seed=1)
    first.core.save_pretrained(tmp_path)
    BYTES.tokenizer().save_pretrained(tmp_path)
    inputs = {"input_ids": (tiny.LENGTH,)}
    again = cs.build_model("hugging_face", inputs, 3, weights=str(tmp_path), train="head")
    assert torch.equal(again.eval()(again.tokenize(TEXTS)), first.eval()(first.tokenize(TEXTS)))
    other = [cs.build_model("hugging_face", inputs, 5, seed=s, weights=str(tmp_path), train="lora") for s in (3, 3, 4)]
    values = [dict(model.named_parameters()) for model in other]
    head = next(name for name in values[0] if "classifier.modules_to_save" in name and name.endswith("weight"))
    encoder = next(name for name in values[0] if "word_embeddings" in name)
    assert values[0][head].shape == (5, 16)
    assert torch.equal(values[0][head], values[1][head]) and not torch.equal(values[0][head], values[2][head])
    assert torch.equal(values[0][encoder], values[2][encoder])
    with pytest.raises(Invalid, match=r"lacks 'bert.*it is another model"):
        cs.build_model("hugging_face", inputs, 3, weights=str(tmp_path), config={"intermediate_size": 20})


def test_heads_for_tokens() -> None:
    for head, family in (("token_classification", "bert"), ("masked_lm", "distilbert"), ("causal_lm", "gpt2")):
        model = tiny.model(family, "all", head=head).eval()
        logits = model(model.tokenize(TEXTS))
        assert logits.shape[2] == (3 if head == "token_classification" else BYTE_VOCABULARY)
    later = model.tokenize(["send monex"])  # gpt2: what follows does not change what comes before
    assert torch.allclose(model(model.tokenize(["send money"]))[:, :9], model(later)[:, :9], atol=1e-6)
    numbers = cs.build_model("hugging_face", (9,), 7, config=tiny.CONFIGS["gpt2"], head="causal_lm", vocabulary=7)
    assert numbers(torch.randint(0, 7, (2, 9))).shape == (2, 9, 7)


def test_bytes_are_read_back() -> None:
    tokenizer = BYTES.tokenizer()
    rows = Tokenization(source="bytes", length=60)(TEXTS)
    assert len(tokenizer) == BYTE_VOCABULARY
    for text, ids, live in zip(TEXTS, rows["input_ids"], rows["attention_mask"]):
        assert int(live.sum()) == len(text.encode()) + 2
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert ids[live == 0].eq(tokenizer.pad_token_id).all()
    assert BYTES(["x" * 100])["input_ids"].shape == (1, tiny.LENGTH)  # cut


def test_language_model_targets() -> None:
    rows = BYTES(tiny.texts(40)[0])
    targets = BYTES.next_tokens(rows)
    assert torch.equal(targets != IGNORED, rows["attention_mask"] == 1)
    assert torch.equal(targets[targets != IGNORED], rows["input_ids"][targets != IGNORED])
    hidden, words = BYTES.masked_tokens(rows, seed=3)
    chosen = words != IGNORED
    assert chosen.any(1).all() and torch.equal(words[chosen], rows["input_ids"][chosen])
    assert torch.equal(hidden["input_ids"][~chosen], rows["input_ids"][~chosen])
    tokenizer = BYTES.tokenizer()
    assert not torch.isin(words[chosen], torch.tensor(tokenizer.all_special_ids)).any()
    masked = (hidden["input_ids"][chosen] == tokenizer.mask_token_id).float().mean()
    assert 0.65 < float(masked) < 0.95
    again = BYTES.masked_tokens({name: value[5:6] for name, value in rows.items()}, seed=3)[1]
    assert torch.equal(BYTES.masked_tokens(rows, seed=3)[1], words) and again.shape[0] == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"targets": ("qeury",)}, r"'qeury'.*did you mean 'query'"),
    ({"rank": 17}, r"rank = 17 is above the size of .*query \(16 x 16\).*at most 16"),
    ({"config": {**tiny.CONFIGS["bert"], "vocab_size": 100}}, r"tokenizer 'bytes' has 261 tokens.*embedding 100"),
    ({"config": {**tiny.CONFIGS["bert"], "max_position_embeddings": 8}}, r"24 tokens.*8 positions.*model\.length"),
    ({"config": {**tiny.CONFIGS["vit"]}}, r"'vit' has no head for sequence_classification"),
    ({"config": {"hidden_size": 16}}, r"model\.weights is missing"),
    ({"config": {"model_type": "brt"}}, r"no config of transformers"),
    ({"config": None, "weights": "/nowhere/model"}, r"no encoder '/nowhere/model'"),
    ({"train": "head", "head": "causal_lm", "config": tiny.CONFIGS["gpt2"]}, r"shares its weights with the embedding"),
    ({"train": "lroa"}, r"not one of all, head, lora \(did you mean 'lora'"),
    ({"tokenizer": "/nowhere"}, r"no encoder '/nowhere'"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refused_before_training(options: dict[str, Any], reason: str) -> None:
    settings: dict[str, Any] = {"config": tiny.CONFIGS["bert"], "train": "lora", **options}
    settings |= {"rank": settings.get("rank", 2)} if settings["train"] == "lora" else {}
    with pytest.raises((Invalid, FileNotFoundError), match=reason):
        cs.build_model("hugging_face", {"input_ids": (tiny.LENGTH,)}, 3, **settings)


def test_other_refusals() -> None:
    with pytest.raises(Invalid, match="text 1 is empty"):
        BYTES(["send", "  "])
    with pytest.raises(Invalid, match="1 x 8 x 8, and the data have 1 x 6 x 6"):
        config = {**tiny.CONFIGS["vit"], "image_size": 8}
        cs.build_model("hugging_face", (1, 6, 6), 3, config=config, head="image_classification")
    with pytest.raises(Invalid, match="pad_to = 5"):
        BYTES(["send money"], pad_to=5)


@pytest.mark.parametrize(("package", "train"), [("transformers", "all"), ("peft", "lora")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str, train: str) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Invalid, match=r'not installed: pip install "consilience\[text\]"'):
        tiny.model("bert", train, seed=9)


def test_a_model_of_ones_own() -> None:
    config = transformers.BertConfig(
        vocab_size=30, num_labels=2, **{k: v for k, v in SMALL.items() if k != "model_type"}
    )
    own = transformers.BertForSequenceClassification(config).eval()
    x, y = torch.randint(0, 30, (12, 9)), torch.arange(12) % 2
    mask = torch.ones(12, 9, dtype=torch.int64)
    mask[::3, 5:] = 0
    wrapped = cs.HuggingFace(own)
    assert torch.allclose(
        wrapped({"input_ids": x, "attention_mask": mask}), own(x, attention_mask=mask).logits, atol=1e-6
    )
    halves = [(x[part], y[part]) for part in (slice(0, 6), slice(6, 12))]
    result = cs.train(
        wrapped, cs.Federation.from_clients(halves, test=(x, y)), cs.fedavg(lr=0.1), rounds=1, progress=False
    )
    assert 0 <= result.history[-1]["accuracy"] <= 1
    assert not torch.equal(result.model.core.classifier.weight, own.classifier.weight)
    with pytest.raises(Invalid, match="this model has no tokenizer"):
        wrapped.tokenize(["send"])
