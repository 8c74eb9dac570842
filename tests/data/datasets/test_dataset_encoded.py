"""Pictures that become features of a frozen encoder when they are loaded."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import write_sheet
from safetensors.torch import save_file

from consilience import models
from consilience.core.settings import Invalid
from consilience.data.datasets import load
from consilience.data.datasets.prepare.encoded import encoded_pictures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A CrisisMMD of 5 + 3 tweets."""
    pixels = np.random.default_rng(2).integers(20, 256, (8, 64, 64, 3), dtype=np.uint8)
    for part, numbers in (("train", range(5)), ("test", range(5, 8))):
        lines = ["event\tlabel\ttweet_id\timage_id\ttext"]
        lines += [f"{'flood' if k % 2 else 'fire'}\t{'abc'[k % 3]}\t{k}\t{k}_0\ttext {k}" for k in numbers]
        (tmp_path / f"{part}.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
        write_sheet(tmp_path / f"{part}.png", pixels[list(numbers)], 2)
        (tmp_path / f"{part}.png").rename(tmp_path / f"{part}.jpg")  # lossless, whatever its name
    return tmp_path


def test_features_are_the_encoders_centred_over_the_training_rows(folder: Path) -> None:
    pytest.importorskip("sklearn")
    raw = load("crisismmd", data_dir=folder, normalise="unit")
    data = load("crisismmd", data_dir=folder, picture_encoder="resnet20")
    assert data.x["picture"].shape == (5, 64) and data.test_x["picture"].shape == (3, 64)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    encoder = models.build("resnet20", (3, 64, 64), 2, seed=0).eval()
    with torch.no_grad():
        rows, test_rows = (encoder.features((x["picture"] - mean) / std).double() for x in (raw.x, raw.test_x))
    centre, width = rows.mean(0), rows.std(0, correction=0)
    width = torch.where(width > 0, width, 1.0)
    for got, value in ((data.x, rows), (data.test_x, test_rows)):
        torch.testing.assert_close(got["picture"], ((value - centre) / width / 8).float(), rtol=1e-4, atol=1e-5)
    again = load("crisismmd", data_dir=folder, picture_encoder="resnet20")
    assert torch.equal(again.x["picture"], data.x["picture"])
    inputs = {name: tuple(x.shape[1:]) for name, x in data.x.items()}
    assert models.build("late_fusion", inputs, 3)(data.x).shape == (5, 3)


def test_weights_come_from_a_file_in_the_data_folder(folder: Path) -> None:
    pytest.importorskip("sklearn")
    save_file(models.build("resnet20", (3, 64, 64), 10, seed=7).state_dict(), folder / "some.safetensors")
    options = {"data_dir": folder, "picture_encoder": "resnet20"}
    other = load("crisismmd", **options, picture_weights="some.safetensors").x["picture"]
    assert not torch.allclose(other, load("crisismmd", **options).x["picture"], atol=1e-3)
    with pytest.raises(FileNotFoundError, match=r"none\.npz was not found. Weights of a picture encoder are"):
        load("crisismmd", **options, picture_weights="none.npz")
    with pytest.raises(Invalid, match=r"picture_weights = 'some\.safetensors' needs picture_encoder"):
        load("crisismmd", data_dir=folder, picture_weights="some.safetensors")
    with pytest.raises(
        Invalid, match=r"'resnet21' is no model of the zoo \(did you mean 'resnet\d+'\?\), and no encoder"
    ):
        load("crisismmd", data_dir=folder, picture_encoder="resnet21")


def test_mean_square_row_length_is_one() -> None:
    x = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    rows, _ = encoded_pictures(x[:30], x[30:], encoder="resnet20")
    assert rows.dtype == torch.float32 and float(rows.square().sum(1).mean()) == pytest.approx(1, abs=0.1)
