"""Pictures to features: the output of a frozen encoder, computed once when a data set is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from consilience.core.settings import Invalid, nearest
from consilience.data.datasets.prepare.columns import standardised


def encoded_pictures(
    train: Tensor, test: Tensor, *, encoder: str, weights: Path | None = None
) -> tuple[Tensor, Tensor]:
    """[N, features] of pictures [N, 3, height, width] in [0, 1], centred over the training rows, of length about 1.

    `encoder` is a model of the zoo, whose weights come from a file or from seed 0, or the folder or installed package
    of a vision transformer.
    """
    from consilience import models
    from consilience.models.encoders import IMAGENET_MEAN, IMAGENET_STD, encode_pictures, model_folder
    from consilience.models.weights import load_weights

    used: str | nn.Module = encoder
    if encoder in models.__all__:
        used = models.build(encoder, tuple(train.shape[1:]), 2, seed=0)
        if weights is not None:
            load_weights(used, weights, head=False)
        # weights for pictures expect them so; a transformer's own configuration says how it wants them
        train, test = (_shifted(pictures, IMAGENET_MEAN, IMAGENET_STD) for pictures in (train, test))
    else:
        try:
            model_folder(encoder)
        except FileNotFoundError as problem:
            hint = nearest(encoder, models.__all__)
            raise Invalid(f"picture_encoder = {encoder!r} is no model of the zoo{hint}, and {problem}") from problem
    values = torch.cat([encode_pictures(pictures, encoder=used) for pictures in (train, test)]).numpy()
    # a mean square row length of 1, like that of hashed n-grams, so that neither drowns the other at one learning rate
    columns = values.shape[1]
    scaled = (standardised(values.astype(np.float64), np.arange(len(train))) / columns**0.5).astype(np.float32)
    return torch.from_numpy(scaled[: len(train)]), torch.from_numpy(scaled[len(train) :])


def _shifted(pictures: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    centre, width = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, deviation))
    return (pictures - centre) / width
