"""Class-per-folder trees in the layouts of CINIC-10, DomainNet, Stanford Dogs and Tiny-ImageNet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_files import write_picture

from consilience import models
from consilience.core.settings import Invalid
from consilience.data.datasets import load

pytest.importorskip("PIL")


def grey(value, side=4):
    return np.full((side, side, 3), value, np.uint8)


def values(x):
    """The grey level of each one-coloured picture."""
    return [round(level * 255) for level in x[:, 0, 0, 0].tolist()]


def test_cinic_layout_keeps_its_parts(tmp_path):
    for number, part in enumerate(("train", "valid", "test")):
        for label, name in enumerate(("bird", "cat")):
            write_picture(tmp_path / "cinic" / part / name / "1.png", grey(100 * label + 10 * number))
    data = load("picture_folders", data_dir=tmp_path, folder="cinic", normalise="unit")
    assert values(data.x) == [0, 100] and values(data.test_x) == [20, 120]
    assert data.label_names == ("bird", "cat") and data.y.tolist() == [0, 1] and data.groups is None
    more = load("picture_folders", data_dir=tmp_path, folder="cinic", normalise="unit", validation="train")
    assert values(more.x) == [0, 100, 10, 110] and values(more.test_x) == [20, 120]


def test_validation_folder_is_the_test_when_there_is_no_other(tmp_path):
    write_picture(tmp_path / "train" / "a" / "1.png", grey(1))
    write_picture(tmp_path / "val" / "a" / "1.png", grey(2))
    data = load("picture_folders", data_dir=tmp_path, folder=".", normalise="unit", validation="train")
    assert values(data.x) == [1] and values(data.test_x) == [2]


def write_domains(folder):
    for g, domain in enumerate(("clipart", "sketch")):
        for c, name in enumerate(("ant", "bee", "cow")):
            for k in range(5):
                write_picture(folder / domain / name / f"{k}.jpg", grey(100 * g + 20 * c + 4 * k + 2))


def test_domains_are_groups_and_test_rows_are_drawn_from_each(tmp_path):
    write_domains(tmp_path)
    data = load("picture_folders", data_dir=tmp_path, folder=".", normalise="unit")
    assert data.group_names == ("clipart", "sketch") and data.label_names == ("ant", "bee", "cow")
    for x, y, groups in ((data.x, data.y, data.groups), (data.test_x, data.test_y, data.test_groups)):
        levels = np.array(values(x))
        assert (levels // 100).tolist() == groups.tolist() and (levels % 100 // 20).tolist() == y.tolist()
    assert torch.bincount(data.test_groups).tolist() == [3, 3]
    assert torch.bincount(data.test_y).tolist() == [2, 2, 2]


def test_domainnet_lists_decide_the_parts(tmp_path):
    write_domains(tmp_path)
    for domain in ("clipart", "sketch"):
        (tmp_path / f"{domain}_train.txt").write_text("".join(f"{domain}/bee/{k}.jpg 1\n" for k in range(3)))
        (tmp_path / f"{domain}_test.txt").write_text(f"{domain}/bee/4.jpg 1\n")
    data = load("picture_folders", data_dir=tmp_path, folder=".", normalise="unit")
    assert values(data.x) == [22, 26, 30, 122, 126, 130] and values(data.test_x) == [38, 138]
    assert data.label_names == ("bee",)
    (tmp_path / "sketch_test.txt").write_text("sketch/bee/99.jpg 1\n")
    with pytest.raises(FileNotFoundError, match=r"names .*99\.jpg, which is not there"):
        load("picture_folders", data_dir=tmp_path, folder=".")


def test_some_classes_groups_and_a_limit(tmp_path):
    write_domains(tmp_path)
    options = {"data_dir": tmp_path, "folder": ".", "normalise": "unit"}
    data = load("picture_folders", **options, classes=["cow"], groups=["sketch"])
    assert data.groups is None and sorted(values(data.x) + values(data.test_x)) == [142, 146, 150, 154, 158]
    few = load("picture_folders", **options, max_per_class=2, test_fraction=0.5)
    both = torch.cat([few.y, few.test_y])
    assert torch.bincount(both).tolist() == [4, 4, 4]
    with pytest.raises(Invalid, match=r"no class 'cov' \(did you mean 'cow'\?\)"):
        load("picture_folders", **options, classes=["cov"])
    with pytest.raises(Invalid, match="no group 'real'"):
        load("picture_folders", **options, groups=["real"])


def test_stanford_dogs_have_annotations_beside_the_pictures(tmp_path):
    for k in range(4):
        write_picture(tmp_path / "dogs" / "Images" / "n02085620-Chihuahua" / f"{k}.jpg", grey(10 * k, side=8))
        write_picture(tmp_path / "dogs" / "Images" / "n02085782-Japanese_spaniel" / f"{k}.jpg", grey(10 * k, side=6))
    (tmp_path / "dogs" / "Annotation" / "n02085620-Chihuahua").mkdir(parents=True)
    (tmp_path / "dogs" / "Annotation" / "n02085620-Chihuahua" / "0").write_text("<annotation/>")
    data = load("picture_folders", data_dir=tmp_path, folder="dogs", size=4, test_fraction=0.5)
    assert data.x.shape == (4, 3, 4, 4) and data.groups is None and data.classes == 2
    assert torch.bincount(data.test_y).tolist() == [2, 2]


def write_tiny_imagenet(folder, annotations):
    for label, name in enumerate(("n01", "n02")):
        write_picture(folder / "train" / name / "images" / f"{name}_0.JPEG", grey(100 + label))
        (folder / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t62\t62\n")
    for k in range(2):
        write_picture(folder / "val" / "images" / f"val_{k}.JPEG", grey(200 + 20 * k))
    write_picture(folder / "test" / "images" / "test_0.JPEG", grey(7))
    (folder / "val" / "val_annotations.txt").write_text(annotations)


def test_tiny_imagenet_takes_its_test_from_the_annotations(tmp_path):
    write_tiny_imagenet(tmp_path, "val_1.JPEG\tn01\t0\t0\t62\t62\nval_0.JPEG\tn02\t0\t0\t62\t62\n")
    data = load("picture_folders", data_dir=tmp_path, folder=".", normalise="unit")
    assert values(data.x) == [100, 101] and data.y.tolist() == [0, 1]
    assert values(data.test_x) == [220, 200] and data.test_y.tolist() == [0, 1]
    assert data.label_names == ("n01", "n02")


@pytest.mark.parametrize(
    ("annotations", "problem", "defect"),
    [
        ("val_9.JPEG\tn01\t0\t0\t1\t1\n", FileNotFoundError, r"val_9\.JPEG, which is not there"),
        ("val_0.JPEG\tn77\t0\t0\t1\t1\n", Invalid, "class 'n77', for which"),
        ("val_0.JPEG\tn01\n", Invalid, "line 1: 2 fields"),
    ],
)
def test_tiny_imagenet_with_wrong_annotations(tmp_path, annotations, problem, defect):
    write_tiny_imagenet(tmp_path, annotations)
    with pytest.raises(problem, match=defect):
        load("picture_folders", data_dir=tmp_path, folder=".")


def test_layout_can_be_forced_and_a_corrupt_file_is_named(tmp_path):
    write_domains(tmp_path)
    (tmp_path / "sketch" / "ant" / "0.jpg").write_bytes(b"broken")
    with pytest.raises(Invalid, match=r"sketch/ant/0\.jpg is not a readable picture"):
        load("picture_folders", data_dir=tmp_path, folder=".", layout="groups")
    data = load("picture_folders", data_dir=tmp_path, folder="clipart", layout="classes")
    assert data.classes == 3 and len(data.y) == 12
    with pytest.raises(FileNotFoundError, match="neither test nor val"):
        load("picture_folders", data_dir=tmp_path, folder=".", layout="splits")


def test_missing_tree_points_at_the_homes(tmp_path):
    with pytest.raises(FileNotFoundError, match="DomainNet: https"):
        load("picture_folders", data_dir=tmp_path, folder="nowhere")


def two_classes(folder, side=8):
    for k in range(4):
        write_picture(folder / "cats" / f"{k}.png", grey(10 * k + 5, side=side))
        write_picture(folder / "dogs" / f"{k}.png", grey(255 - 10 * k, side=side))


def test_pictures_as_the_features_of_a_frozen_encoder(tmp_path):
    """As DUW's Environments A and B: the encoder runs once, and clients train one layer on what it gives."""
    two_classes(tmp_path / "tree")
    plain = load("picture_folders", data_dir=tmp_path, folder="tree", normalise="unit", test_fraction=0.5)
    data = load("picture_folders", data_dir=tmp_path, folder="tree", encoder="cnn", test_fraction=0.5)
    mean, deviation = (torch.tensor(row).reshape(3, 1, 1) for row in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    encoder = models.build("cnn", (3, 8, 8), 2, seed=0).eval()
    for found, pictures in ((data.x, plain.x), (data.test_x, plain.test_x)):
        with torch.no_grad():
            torch.testing.assert_close(found, encoder.features((pictures - mean) / deviation))
    assert torch.equal(data.y, plain.y)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"encoder": "vit-base"}, r"encoder = 'vit-base' is no model of the zoo.*no encoder 'vit-base'"),
        ({"encoder": "cnn", "grey": True}, "encoders expect colour pictures"),
        (
            {"encoder": "cnn", "pooling": "cls"},
            "pooling = 'cls' has no effect with encoder = 'cnn', a model of the zoo",
        ),
        ({"encoder": "cnn", "normalise": "unit"}, "normalise = 'unit' has no effect with encoder = 'cnn'"),
    ],
)
def test_what_an_encoder_cannot_take_is_refused_before_pictures_are_read(tmp_path, options, problem):
    two_classes(tmp_path / "tree")
    with pytest.raises(Invalid, match=problem):
        load("picture_folders", data_dir=tmp_path, folder="tree", **options)
