"""Pictures to features: the output of a frozen encoder, computed once when a data set is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from consilience.core.settings import Invalid, nearest
from consilience.data.datasets.prepare.columns import standardised
from consilience.models.encoders import Pooling


def encoded_pictures(
    train: Tensor, test: Tensor, *, encoder: str, weights: Path | None = None
) -> tuple[Tensor, Tensor]:
    """[N, features] of pictures [N, 3, height, width] in [0, 1], centred over the training rows, of length about 1.

    `encoder` is a model of the zoo, whose weights come from a file or from seed 0, or the folder or installed package
    of a vision transformer.
    """
    from consilience import models
    from consilience.models.encoders import IMAGENET_MEAN, IMAGENET_STD, encode_pictures
    from consilience.models.weights import load_weights

    used: str | nn.Module = encoder
    if encoder in models.__all__:
        used = models.build(encoder, tuple(train.shape[1:]), 2, seed=0)
        if weights is not None:
            load_weights(used, weights, head=False)
        # pretrained weights expect ImageNet's scaling; a transformer's own configuration has its scaling
        train, test = (_shifted(pictures, IMAGENET_MEAN, IMAGENET_STD) for pictures in (train, test))
    else:
        refuse_unknown_encoder("picture_encoder", encoder)
    values = torch.cat([encode_pictures(pictures, encoder=used) for pictures in (train, test)]).numpy()
    # a mean square row length of 1, as hashed n-grams have, so that one learning rate suits both
    columns = values.shape[1]
    scaled = (standardised(values.astype(np.float64), np.arange(len(train))) / columns**0.5).astype(np.float32)
    return torch.from_numpy(scaled[: len(train)]), torch.from_numpy(scaled[len(train) :])


def features_of(pictures: np.ndarray, *, encoder: str, pooling: Pooling, block: int = 256) -> np.ndarray:
    """[N, features] of byte pictures [N, 3, height, width], as the encoder gives them; a block at a time is decoded."""
    from consilience import models
    from consilience.models.encoders import IMAGENET_MEAN, IMAGENET_STD, encode_pictures

    used: str | nn.Module = encoder
    ours = encoder in models.__all__
    if ours:
        used = models.build(encoder, tuple(pictures.shape[1:]), 2, seed=0)
    found = []
    for start in range(0, len(pictures), block):
        values = torch.from_numpy(pictures[start : start + block]).float() / 255
        values = _shifted(values, IMAGENET_MEAN, IMAGENET_STD) if ours else values
        found.append(encode_pictures(values, encoder=used, pooling=pooling).numpy())
    return np.concatenate(found).astype(np.float32)


def refuse_unknown_encoder(key: str, encoder: str) -> None:
    """Refuse, before pictures are read, what is neither a model of the zoo nor a saved vision transformer."""
    from consilience import models
    from consilience.models.encoders import model_folder

    if encoder in models.__all__:
        return
    try:
        model_folder(encoder)
    except FileNotFoundError as problem:
        hint = nearest(encoder, models.__all__)
        raise Invalid(f"{key} = {encoder!r} is no model of the zoo{hint}, and {problem}") from problem


def refuse_idle_pooling(pooling: Pooling, encoder: str) -> None:
    """Refuse a choice of tokens for a model of the zoo, which gives one vector for each picture."""
    from consilience import models

    if encoder in models.__all__:
        raise Invalid(
            f"pooling = {pooling!r} has no effect with encoder = {encoder!r}, a model of the zoo, which has no tokens: "
            "leave it out"
        )


def _shifted(pictures: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    centre, width = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, deviation))
    return (pictures - centre) / width
