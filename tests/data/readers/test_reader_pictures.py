"""Picture files and sheets: every pixel in its place, and errors that name the file."""

from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import pytest

from consilience.core.settings import Invalid
from consilience.data.readers.picture_trees import list_tree
from consilience.data.readers.pictures import read_pictures, read_sheet, read_sheets

Image = pytest.importorskip("PIL.Image")


def tile(pictures: np.ndarray, columns: int) -> np.ndarray:
    """Pictures [N, h, h, 3] on one sheet, one by one: the plain reading of the format."""
    side = pictures.shape[1]
    rows = -(-len(pictures) // columns)
    sheet = np.zeros((rows * side, columns * side, 3), np.uint8)
    for number, picture in enumerate(pictures):
        top, left = number // columns * side, number % columns * side
        sheet[top : top + side, left : left + side] = picture
    return sheet


def write(path: Path, pixels: np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture
def pictures():
    return np.random.default_rng(0).integers(20, 256, (7, 4, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_sheet_comes_back_picture_by_picture(tmp_path, pictures, suffix):
    options = {"lossless": True, "exact": True} if suffix == "webp" else {}
    path = write(tmp_path / f"train.{suffix}", tile(pictures, 3), **options)
    assert np.array_equal(read_sheets([path], side=4, count=7), pictures.transpose(0, 3, 1, 2))


def test_grey_sheet_has_one_channel(tmp_path, pictures):
    path = write(tmp_path / "train.png", tile(pictures, 3)[:, :, 0])
    cells, columns = read_sheet(path, side=4, grey=True)
    assert columns == 3 and np.array_equal(cells[:7, 0], pictures[..., 0])


def test_sheets_follow_one_another(tmp_path, pictures):
    paths = [
        write(tmp_path / "a.png", tile(pictures[:3], 3)),
        write(tmp_path / "b.png", tile(pictures[3:6], 3)),
        write(tmp_path / "c.png", tile(pictures[6:], 3)),
    ]
    assert np.array_equal(read_sheets(paths, side=4, count=7), pictures.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(("count", "defect"), [(10, "9 cells"), (6, "9 cells"), (1, "9 cells")])
def test_counts_that_cannot_be_right_are_refused(tmp_path, pictures, count, defect):
    path = write(tmp_path / "train.png", tile(pictures, 3))
    with pytest.raises(Invalid, match=defect) as problem:
        read_sheets([path], side=4, count=count)
    assert str(path) in str(problem.value) and f"{count} labels" in str(problem.value)


def test_a_picture_behind_the_last_label_is_noticed(tmp_path, pictures):
    path = write(tmp_path / "train.png", tile(pictures, 4))
    with pytest.raises(Invalid, match="more pictures than labels"):
        read_sheets([path], side=4, count=6)


def test_wrong_side_is_refused(tmp_path, pictures):
    path = write(tmp_path / "train.png", tile(pictures, 3))
    with pytest.raises(Invalid, match="not whole pictures of 5x5"):
        read_sheet(path, side=5)


@pytest.mark.parametrize("content", [b"", b"not a picture", None])
def test_corrupt_picture_is_named(tmp_path, pictures, content):
    good = write(tmp_path / "good.png", pictures[0])
    bad = tmp_path / "bad.png"
    bad.write_bytes(good.read_bytes()[:-30] if content is None else content)
    with pytest.raises(Invalid, match=r"bad\.png is not a readable picture"):
        read_pictures([good, bad], size=None, fit="crop", grey=False)


def test_pictures_of_two_sizes_need_a_size(tmp_path, pictures):
    paths = [write(tmp_path / "a.png", pictures[0]), write(tmp_path / "b.png", pictures[0][:2])]
    with pytest.raises(Invalid, match=r"b\.png is 4x2 but .*a\.png is 4x4"):
        read_pictures(paths, size=None, fit="crop", grey=False)
    assert read_pictures(paths, size=4, fit="crop", grey=False).shape == (2, 3, 4, 4)


def test_crop_squash_and_pad_treat_a_wide_picture_differently(tmp_path):
    halves = np.zeros((4, 8, 3), np.uint8)
    halves[:, :2] = 255  # white in the left quarter only
    path = write(tmp_path / "wide.png", halves)
    read = {fit: read_pictures([path], size=4, fit=fit, grey=True)[0, 0] for fit in ("crop", "squash", "pad")}
    assert read["crop"].max() == 0  # the middle half is black
    assert read["squash"][0, 0] > 200 and read["squash"][0, 2] == 0
    assert read["pad"][0].max() == 0 and read["pad"][1, 0] > 200  # black bands above and below


def test_many_pictures_keep_their_order(tmp_path):
    paths = [write(tmp_path / f"{k:03}.png", np.full((2, 2, 3), k, np.uint8)) for k in range(60)]
    read = read_pictures(paths, size=None, fit="crop", grey=False)
    assert read[:, 0, 0, 0].tolist() == list(range(60))


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    whole = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "PIL":
            raise ImportError("no PIL")
        return whole(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"consilience\[pictures\]"):
        read_sheet(tmp_path / "a.png", side=2)


def test_unlabelled_tree_says_what_it_should_hold(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="no pictures were found"):
        list_tree(tmp_path, "auto", use_validation=False)
