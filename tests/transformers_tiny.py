"""Transformers of a few thousand random weights, and texts with labels, for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import consilience as cs
from consilience.core.federation import Federation

WORDS = (("send", "pay", "transfer"), ("card", "pin", "stolen"), ("rate", "euro", "dollar"))
COMMON = ("my", "the", "please", "now", "what", "is", "a", "to")
# larger weights than usual, so that the output depends on every token; BERT has dropout in its attention as well
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        **{"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 24, "max_position_embeddings": 40, "initializer_range": 0.3},
    },
    "distilbert": {
        **{"model_type": "distilbert", "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
        **{"max_position_embeddings": 40, "attention_dropout": 0.0, "initializer_range": 0.3},
    },
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40},
        **{"attn_pdrop": 0.0, "initializer_range": 0.3},
    },
    "vit": {
        **{"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 24, "patch_size": 3, "initializer_range": 0.3},
    },
}
LENGTH = 24


def texts(rows: int, seed: int = 0) -> tuple[list[str], torch.Tensor]:
    """Sentences of common words and one that says the class, of unequal length."""
    draw = torch.Generator().manual_seed(seed)

    def pick(most: int) -> int:
        return int(torch.randint(0, most, (), generator=draw))

    labels = [pick(3) for _ in range(rows)]
    made = []
    for label in labels:
        sentence = [COMMON[pick(len(COMMON))] for _ in range(1 + pick(3))]
        sentence.insert(pick(len(sentence) + 1), WORDS[label][pick(3)])
        made.append(" ".join(sentence))
    return made, torch.tensor(labels)


def model(family: str = "bert", train: str = "lora", *, seed: int = 0, **options: Any) -> nn.Module:
    """A small transformer for these texts, or of type "vit" for the pictures of `tiny.federation`."""
    options = {"config": CONFIGS[family], **({"rank": 2} if train == "lora" else {}), **options}
    if family == "vit":
        options = {"head": "image_classification", **options}
        return cs.build_model("hugging_face", (1, 6, 6), 3, seed=seed, train=train, **options)
    inputs = {"input_ids": (LENGTH,), "attention_mask": (LENGTH,)}
    options = {"length": LENGTH, **options}
    return cs.build_model("hugging_face", inputs, 3, seed=seed, train=train, **options)


def federation(of: Any, sizes: tuple[int, ...] = (7, 3, 5)) -> Federation:
    """Clients with texts as this model reads them."""
    clients = []
    for number, rows in enumerate((*sizes, 8)):
        sentences, labels = texts(rows, seed=number)
        clients.append((of.tokenize(sentences, pad_to=LENGTH), labels))
    return Federation.from_clients(clients[:-1], test=clients[-1], classes=3)


def text_file(folder: Path, rows: int = 60) -> Path:
    """A csv of texts and labels."""
    sentences, labels = texts(rows)
    file = folder / "texts.csv"
    lines = [f"{text},{('send', 'card', 'rate')[label]}" for text, label in zip(sentences, labels.tolist())]
    file.write_text("\n".join(["text,label", *lines]) + "\n")
    return file
