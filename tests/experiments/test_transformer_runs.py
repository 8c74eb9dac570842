"""Transformers from a config: run, resume, test and export, with frozen weights rebuilt and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_tiny
from safetensors import safe_open

from consilience.core.settings import Invalid
from consilience.experiments import retest, runner
from consilience.experiments.config.config import Config, from_table
from consilience.models.tokenization import BYTE_VOCABULARY
from consilience.task.kinds import KINDS

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'consilience[text]'")
pytest.importorskip("peft", reason="needs peft: pip install 'consilience[text]'")


def config(folder: Path, *overrides: str, family: str = "distilbert", **model: Any) -> Config:
    table = {
        "rounds": 2,
        "runs": str(folder / "runs"),
        "data": {"name": "text_table", "train": str(transformers_tiny.text_file(folder)), "features": "raw"},
        "partition": {"name": "iid", "clients": 3},
        "model": {
            **{"name": "hugging_face", "config": transformers_tiny.CONFIGS[family], "train": "lora"},
            **({} if "train" in model else {"rank": 2}),
            **{"length": transformers_tiny.LENGTH, **model},
        },
        "algorithm": {"name": "fedavg", "lr": 0.2, "epochs": 1, "batch_size": 8},
        "engine": {"lane": "batched", "device": "cpu"},
    }
    return from_table(table, overrides)


def names_in(file: Path) -> set[str]:
    with safe_open(str(file), "pt") as opened:
        return set(opened.keys())


def test_a_run_resumes_and_is_tested_with_the_same_frozen_weights(tmp_path: Path) -> None:
    whole = runner.execute(config(tmp_path), folder=tmp_path / "whole")
    runner.execute(config(tmp_path, "rounds=1"), folder=tmp_path / "parts")
    parts = runner.proceed(tmp_path / "parts", ["rounds=2"])
    assert parts.history == whole.history
    assert all(torch.equal(a, whole.values["params"][n]) for n, a in parts.values["params"].items())
    found = retest.retest(tmp_path / "whole")
    assert found.scores.values["accuracy"] == pytest.approx(whole.history[-1]["accuracy"])
    module, learned = whole.task.module, set(whole.values["params"])
    frozen = sum(4 * p.numel() for p in module.parameters() if not p.requires_grad)
    sent = sum(4 * value.numel() for value in whole.values["params"].values())
    for file in (tmp_path / "whole").rglob("*.safetensors"):
        assert file.stat().st_size < frozen / 2  # neither checkpoints nor the model hold frozen weights
    assert names_in(tmp_path / "whole" / "model.safetensors") == learned
    assert 0 <= whole.history[-1]["bytes_up"] / 3 - sent <= 64
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "whole" / "tokenizer")
    assert len(tokenizer) == BYTE_VOCABULARY
    facts = retest.RunFolder.open(tmp_path / "whole").facts()
    assert facts["prints"]["frozen_weights"] == whole.task.frozen_digest != ""


def test_other_frozen_weights_are_refused(tmp_path: Path) -> None:
    model: Any = transformers_tiny.model("distilbert", "all")
    model.save_pretrained(tmp_path / "weights")
    given = {"config": None, "weights": str(tmp_path / "weights")}
    settings = config(tmp_path, "rounds=1", **{k: v for k, v in given.items() if v is not None} | {"config": {}})
    runner.execute(settings, folder=tmp_path / "run")
    retest.retest(tmp_path / "run")
    with torch.no_grad():
        model.core.distilbert.embeddings.word_embeddings.weight[7] += 0.5
    model.save_pretrained(tmp_path / "weights")
    with pytest.raises(Invalid, match=r"fingerprint\.frozen_weights"):
        runner.proceed(tmp_path / "run", ["rounds=2"])
    with pytest.raises(Invalid, match=r"frozen weights of .* are not those it was trained with"):
        retest.retest(tmp_path / "run")


def test_a_runs_model_is_exported_with_its_classes(tmp_path: Path) -> None:
    runner.execute(config(tmp_path, "rounds=1"), folder=tmp_path / "run")
    result, round = retest.latest(tmp_path / "run")
    result.export(tmp_path / "out", "hugging_face")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert round == 1 and sorted(again.config.label2id) == ["card", "rate", "send"]
    expected = result.model(result.example)
    assert torch.allclose(again(**result.example).logits, expected, atol=1e-4)


def test_pictures_and_token_numbers(tmp_path: Path) -> None:
    table = config(tmp_path, "rounds=1").table()
    vit = {**transformers_tiny.CONFIGS["vit"], "patch_size": 4}
    pictures = {"name": "hugging_face", "config": vit, "head": "image_classification", "train": "head"}
    settings = from_table({**table, "data": {"name": "digits"}, "model": pictures})
    history = runner.execute(settings, folder=tmp_path / "pictures").history
    assert 0 < history[-1]["accuracy"] < 1
    words = {**table["data"], "features": "words", "length": 12}
    numbers = {"name": "hugging_face", "config": transformers_tiny.CONFIGS["bert"], "train": "head"}
    result = runner.execute(from_table({**table, "data": words, "model": numbers}), folder=tmp_path / "words")
    embedding = dict(result.task.module.named_parameters())["model.bert.embeddings.word_embeddings.weight"]
    assert len(embedding) < BYTE_VOCABULARY  # as many as the data have words


@pytest.mark.skipif("next_token" not in KINDS, reason="needs the kinds of task for tokens")
@pytest.mark.parametrize(("head", "family"), [("causal_lm", "gpt2"), ("masked_lm", "bert")])
def test_language_models(tmp_path: Path, head: str, family: str) -> None:
    settings = config(tmp_path, "rounds=3", "algorithm.lr=0.5", family=family, head=head, train="all")
    history = runner.execute(settings, folder=tmp_path / "run").history
    assert history[-1]["loss"] < history[0]["loss"] < 7


def test_texts_need_a_model_that_reads_them(tmp_path: Path) -> None:
    table = config(tmp_path).table()
    with pytest.raises(Invalid, match=r"data\.features = 'raw' are texts, and model\.name = 'mlp' has no tokenizer"):
        runner.execute(from_table({**table, "model": {"name": "mlp"}}), folder=tmp_path / "run")
    labels = from_table({**table, "model": {**table["model"], "head": "token_classification"}})
    with pytest.raises(Invalid, match="has one label for a text"):
        runner.execute(labels, folder=tmp_path / "run")
