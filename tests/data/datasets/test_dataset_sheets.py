"""Tiled sheets: any folder of them, styles as groups, digits in three styles, tweets with pictures."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from data_files import real_data, write_sheet

from consilience.core.settings import Invalid
from consilience.data.datasets import load

PICTURES = np.random.default_rng(0).integers(20, 256, (20, 4, 4, 3), dtype=np.uint8)


def features(pictures):
    return torch.from_numpy(pictures.transpose(0, 3, 1, 2).astype(np.float32)) / 255


@pytest.mark.parametrize("numbered", [False, True])
def test_train_and_test_sheets(tmp_path, numbered):
    if numbered:
        write_sheet(tmp_path / "s" / "train_1.png", PICTURES[:6], 3)
        write_sheet(tmp_path / "s" / "train_2.png", PICTURES[6:10], 3)
    else:
        write_sheet(tmp_path / "s" / "train.webp", PICTURES[:10], 4)
    write_sheet(tmp_path / "s" / "test.png", PICTURES[10:13], 2)
    names = np.array(["cat", "dog", "owl"])
    np.savez(tmp_path / "s" / "labels.npz", y_train=np.arange(10) % 2, y_test=[0, 1, 0], names=names)
    data = load("sheets", data_dir=tmp_path, folder="s", side=4, normalise="unit")
    assert torch.equal(data.x, features(PICTURES[:10])) and torch.equal(data.test_x, features(PICTURES[10:13]))
    assert data.y.tolist() == [0, 1] * 5 and data.classes == 3 and data.label_names == ("cat", "dog", "owl")
    assert data.groups is None and data.name == "s"


def test_sheets_with_groups(tmp_path):
    write_sheet(tmp_path / "photo.png", PICTURES[:12], 4)
    write_sheet(tmp_path / "sketch.png", PICTURES[12:], 4)
    labels = {"photo": np.arange(12) % 3, "sketch": np.arange(8) % 3}
    np.savez(tmp_path / "labels.npz", class_names=["a", "b", "c"], **labels)
    data = load("sheets", data_dir=tmp_path, folder=".", side=4, normalise="unit", test_fraction=0.25)
    assert data.group_names == ("photo", "sketch") and data.classes == 3
    assert torch.bincount(data.groups).tolist() == [9, 6] and torch.bincount(data.test_groups).tolist() == [3, 2]
    row_of = {picture.tobytes(): row for row, picture in enumerate(features(PICTURES).numpy())}
    for x, y, groups in ((data.x, data.y, data.groups), (data.test_x, data.test_y, data.test_groups)):
        for picture, label, group in zip(x.numpy(), y.tolist(), groups.tolist()):
            row = row_of[picture.tobytes()]
            assert group == (row >= 12) and label == (row - 12 * group) % 3


def test_missing_sheet_and_wrong_counts(tmp_path):
    np.savez(tmp_path / "labels.npz", y_train=[0], y_test=[0])
    with pytest.raises(FileNotFoundError, match=r"labels for 'train' but no sheet train\.webp"):
        load("mnist_m", data_dir=tmp_path)
    write_sheet(tmp_path / "train.png", PICTURES[:2], 2)
    write_sheet(tmp_path / "test.png", PICTURES[:2], 2)
    with pytest.raises(Invalid, match="more pictures than labels"):
        load("sheets", data_dir=tmp_path, folder=".", side=4)
    with pytest.raises(FileNotFoundError, match=r"labels\.npz"):
        load("pacs64", data_dir=tmp_path / "nowhere")


def write_digit_styles(folder):
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    np.savez(folder / "mnist.npz", x_train=pixels, y_train=np.arange(30) % 10, x_test=pixels[:5], y_test=range(5))
    envelope = np.full((12, 16, 16), 1000, np.uint16)
    np.savez(folder / "usps.npz", x_train=envelope, y_train=np.arange(12) % 10, x_test=envelope[:2], y_test=[0, 1])
    colour = rng.integers(20, 256, (8, 32, 32, 3), dtype=np.uint8)
    write_sheet(folder / "mnist_m" / "train.webp", colour[:6], 3)
    write_sheet(folder / "mnist_m" / "test.webp", colour[6:], 2)
    np.savez(folder / "mnist_m" / "labels.npz", y_train=range(6), y_test=[1, 2])
    return pixels, colour


def test_digits_in_three_styles(tmp_path):
    pixels, colour = write_digit_styles(tmp_path)
    data = load("digits_domains", data_dir=tmp_path, normalise="unit", train_per_style=10, test_per_style=None)
    assert data.x.shape == (26, 3, 32, 32) and data.test_x.shape == (9, 3, 32, 32)
    assert data.group_names == ("mnist", "mnist_m", "usps")
    assert torch.bincount(data.groups).tolist() == [10, 6, 10]
    assert torch.equal(data.x[10:16], features(colour[:6])) and data.y[10:16].tolist() == list(range(6))
    assert data.y[:10].sort().values.tolist() == list(range(10))  # labels keep their shares
    usps = data.x[data.groups == 2]
    assert usps.min() == usps.max() == np.float32(128 / 255)  # 1000 of 2000 is 127.5 of 255, rounded up
    grey = data.test_x[0]
    assert torch.equal(grey[0], grey[1]) and torch.equal(grey[0], grey[2])
    small = torch.from_numpy(pixels[:1, None].astype(np.float32))
    wanted = torch.nn.functional.interpolate(small, (32, 32), mode="bilinear")[0, 0]
    assert (grey[0] * 255 - wanted).abs().max() <= 0.5 + 1e-3
    two = load("digits_domains", data_dir=tmp_path, styles=["usps", "mnist_m"])
    assert two.group_names == ("usps", "mnist_m") and torch.bincount(two.groups).tolist() == [12, 6]
    with pytest.raises(Invalid, match="none twice"):
        load("digits_domains", data_dir=tmp_path, styles=["usps", "usps"])


def test_usps_pixels_go_to_2000(tmp_path):
    pixels = np.array([[[0, 500], [1000, 2000]]], np.uint16)
    np.savez(tmp_path / "usps.npz", x_train=pixels, y_train=[3], x_test=pixels, y_test=[4])
    data = load("usps", data_dir=tmp_path, normalise="unit")
    assert data.x.flatten().tolist() == [0, 0.25, 0.5, 1] and data.x.shape == (1, 1, 2, 2)
    np.savez(tmp_path / "usps.npz", x_train=pixels + 1, y_train=[3], x_test=pixels, y_test=[4])
    with pytest.raises(Invalid, match=r"usps\.npz: x_train must hold .* 0 .. 2000"):
        load("usps", data_dir=tmp_path)


def write_crisis(folder, rows):
    pictures = np.random.default_rng(2).integers(20, 256, (9, 64, 64, 3), dtype=np.uint8)
    for part, numbers in rows.items():
        lines = ["event\tlabel\ttweet_id\timage_id\ttext"]
        lines += [f'{"flood" if k % 2 else "fire"}\t{"abc"[k % 3]}\t{k}\t{k}_0\ttext "{k}' for k in numbers]
        (folder / f"{part}.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
        write_sheet(folder / f"{part}.jpg", pictures[list(numbers)], 2)


def test_tweets_and_pictures_stay_together(tmp_path):
    pytest.importorskip("sklearn")
    write_crisis(tmp_path, {"train": range(4), "dev": range(4, 6), "test": range(6, 9)})
    data = load("crisismmd", data_dir=tmp_path, text="words", length=4)
    assert data.x["text"].shape == (4, 4) and data.x["picture"].shape == (4, 3, 64, 64)
    words = [[data.vocabulary[token] for token in row] for row in data.x["text"]]
    assert words[3] == ["text", '"', "3", "<pad>"]
    assert data.y.tolist() == [0, 1, 2, 0] and data.groups.tolist() == [0, 1, 0, 1]
    assert data.group_names == ("fire", "flood") and data.label_names == ("a", "b", "c")
    assert data.test_y.tolist() == [0, 1, 2] and data.test_groups.tolist() == [0, 1, 0]
    joined = load("crisismmd", data_dir=tmp_path, text="words", dev="train")
    assert joined.y.tolist() == [0, 1, 2, 0, 1, 2] and len(joined.test_y) == 3
    tested = load("crisismmd", data_dir=tmp_path, text="words", dev="test")
    assert len(tested.y) == 4 and tested.test_y.tolist() == [1, 2, 0, 1, 2]


def test_real_mnist_m_and_usps():
    data = load("mnist_m", data_dir=real_data("mnist_m"))
    assert data.x.shape == (7500, 3, 32, 32) and data.test_x.shape == (2000, 3, 32, 32) and data.classes == 10
    usps = load("usps", data_dir=real_data("usps"), normalise="unit")
    assert torch.bincount(usps.y).tolist() == [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]
    assert torch.bincount(usps.test_y).tolist() == [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]
    assert usps.x.min() == 0 and usps.x.max() == 1


def test_real_pacs64():
    data = load("pacs64", data_dir=real_data("pacs64"), normalise="unit")
    sizes = dict(zip(data.group_names, (torch.bincount(data.groups) + torch.bincount(data.test_groups)).tolist()))
    assert sizes == {"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929}
    sketch = data.group_names.index("sketch")
    counts = torch.bincount(data.y[data.groups == sketch]) + torch.bincount(data.test_y[data.test_groups == sketch])
    assert counts.tolist() == [772, 740, 753, 608, 816, 80, 160]
    assert data.label_names[:2] == ("dog", "elephant")
    bright = [data.x[data.groups == k].mean().item() for k in range(4)]
    assert max(bright) == bright[sketch]  # pencil on white paper


def test_real_crisismmd():
    data = load("crisismmd", data_dir=real_data("crisismmd"), text="words")
    by_event = dict(zip(data.group_names, torch.bincount(data.groups).tolist()))
    assert by_event["hurricane_maria"] == 1724 and by_event["iraq_iran_earthquake"] == 175
    by_class = dict(zip(data.label_names, torch.bincount(data.y).tolist()))
    assert by_class["not_humanitarian"] == 3252 and by_class["affected_individuals"] == 71
    assert len(data.y) == 6126 and len(data.test_y) == 955
