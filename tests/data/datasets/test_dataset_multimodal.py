"""Rows of text, pictures, vectors and table cells, from files that the tests write."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import write_picture

import consilience as cs
from consilience.core.settings import Invalid
from consilience.data.datasets import load
from consilience.data.partition import Iid, MissingModality
from consilience.models.modalities import PRESENT

pytest.importorskip("PIL")
pytest.importorskip("sklearn")

ROWS = [  # label, site, text, picture, age, sex, vector
    ("sick", "north", "a red mark", "p/0.png", "40", "f", "1 2"),
    ("well", "south", "nothing seen", "p/1.png", "60", "m", "3 4"),
    ("sick", "south", "", "p/2.png", "", "", "5 6"),
    ("well", "north", "a small mark", "", "80", "f", ""),
]
TEST = [("well", "north", "red", "p/3.png", "50", "m", "0 1"), ("sick", "south", "unheard word", "", "", "f", "7 8")]
NAMES = ("label", "site", "text", "file", "age", "sex", "vector")
COLUMNS = {"text": "text", "picture": "file", "columns": ("age", "sex"), "vector": "vector"}


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(1, 256, (6, 4, 3), dtype=np.uint8)


def write_rows(path: Path, rows: list[tuple[str, ...]], names: tuple[str, ...] = NAMES) -> None:
    if path.suffix == ".jsonl":
        lines = [json.dumps({n: v for n, v in zip(names, row) if v}) for row in rows]
        path.write_text("\n".join(lines))
        return
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",", lineterminator="\n").writerows(
            [names, *rows]
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        write_picture(tmp_path / "p" / f"{number}.png", pixels(number))
    for suffix in ("csv", "tsv", "jsonl"):
        write_rows(tmp_path / f"train.{suffix}", ROWS)
        write_rows(tmp_path / f"test.{suffix}", TEST)
    return tmp_path


def loaded(top: Path, suffix: str = "csv", **options: object) -> cs.Dataset:
    usual = {"size": 4, "fit": "squash", "normalise": "unit", "client": "site", "features": "words", "length": 3}
    given = {"train": f"train.{suffix}", "test": f"test.{suffix}", **COLUMNS, **usual, **options}
    return load("multimodal", data_dir=top, **{k: v for k, v in given.items() if v is not None})


def test_parts_are_read_and_missing_ones_are_zero_and_marked(folder: Path) -> None:
    from PIL import Image

    data = loaded(folder)
    assert set(data.x) == {"text", "picture", "table", "vector", PRESENT}
    # columns of the mask: picture, table, text, vector
    assert data.x[PRESENT].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0]]
    assert data.test_x[PRESENT].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    words = [[data.vocabulary[token] for token in row] for row in data.x["text"]]
    assert words == [["a", "red", "mark"], ["nothing", "seen", "<pad>"], ["<pad>"] * 3, ["a", "small", "mark"]]
    for row in range(3):
        picture = np.asarray(Image.fromarray(pixels(row)).resize((4, 4), Image.Resampling.BILINEAR))
        np.testing.assert_allclose(data.x["picture"][row].numpy(), picture.transpose(2, 0, 1) / 255, atol=1e-6)
    assert data.x["picture"][3].abs().sum() == 0 and data.test_x["picture"][1].abs().sum() == 0
    assert data.x["vector"].tolist() == [[1, 2], [3, 4], [5, 6], [0, 0]] and data.test_x["vector"].tolist() == [
        [0, 1],
        [7, 8],
    ]
    assert data.y.tolist() == [0, 1, 0, 1] and data.test_y.tolist() == [1, 0] and data.label_names == ("sick", "well")
    assert data.groups.tolist() == [0, 1, 1, 0] and data.group_names == ("north", "south")


def test_table_columns_are_standardised_by_the_training_rows_that_have_them(folder: Path) -> None:
    data = loaded(folder)
    assert data.feature_names == ("age", "sex=f", "sex=m", "age missing", "sex missing")
    ages = np.array([40.0, 60, 80])
    wanted = (ages - ages.mean()) / ages.std()
    found = data.x["table"][:, 0].tolist()
    assert [found[0], found[1], found[3]] == pytest.approx(wanted.tolist(), abs=1e-6) and found[2] == 0
    assert data.x["table"][2].abs().sum() == 0  # no cell is filled in: no table
    assert data.test_x["table"][0, 0] == pytest.approx((50 - ages.mean()) / ages.std(), abs=1e-6)
    assert data.test_x["table"][1].tolist() == pytest.approx([0, 1, 0, 1, 0], abs=1e-6)  # the median, and marked


def test_picture_statistics_leave_missing_pictures_out(folder: Path) -> None:
    data = loaded(folder, normalise="standard")
    held = data.x["picture"][:3]
    torch.testing.assert_close(held.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(held.square().mean((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-4)


@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_every_kind_of_file_gives_the_same_rows(folder: Path, suffix: str) -> None:
    one, other = loaded(folder), loaded(folder, suffix)
    for name, leaf in one.x.items():
        assert torch.equal(leaf, other.x[name]), name
    lists = [dict(zip(NAMES, row)) for row in ROWS]
    for record in lists:
        record["vector"] = [float(v) for v in record["vector"].split()] or None
    (folder / "train.jsonl").write_text("\n".join(json.dumps(record) for record in lists))
    assert torch.equal(loaded(folder, "jsonl").x["vector"], one.x["vector"])


def test_without_a_test_file_rows_are_held_out_and_hashed_text_needs_no_vocabulary(folder: Path) -> None:
    write_rows(folder / "many.csv", ROWS * 5)
    data = loaded(folder, train="many.csv", test=None, features="ngrams", ngram_features=16, length=None, picture=None)
    assert len(data.y) == 16 and len(data.test_y) == 4 and data.x["text"].shape == (16, 16)
    assert set(data.x) == {"text", "table", "vector", PRESENT}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "txt"}, r"train\.csv has no column 'txt' \(did you mean 'text'\?\); it has label, site"),
        ({"label": "class"}, r"train\.csv has no column 'class'"),
        ({"columns": ("age", "weight")}, r"train\.csv has no column 'weight'"),
        ({"vector": "text"}, r"train\.csv, row 0: a vector must be numbers \(.*'a'\)"),
        ({"picture_weights": "w.npz"}, r"picture_weights = 'w.npz' needs picture_encoder"),
        ({"picture": None, "folder": "p"}, r"multimodal.folder, .* need picture"),
        (dict.fromkeys(("text", "picture", "vector", "columns")), r"multimodal needs at least one part"),
    ],
)
def test_what_cannot_be_read_is_refused(folder: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        loaded(folder, **change)


def test_missing_files_unknown_classes_and_empty_rows_are_refused(folder: Path) -> None:
    (folder / "p" / "1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.csv, row 1 names the picture .*1\.png, which is not there"):
        loaded(folder)
    write_rows(folder / "test.csv", [("dead", *TEST[0][1:])])
    with pytest.raises(Invalid, match=r"test\.csv: 'dead' of row 0 is not one of sick, well"):
        loaded(folder)
    write_rows(folder / "test.csv", [TEST[0], ("sick", "north", "", "", "", "", "")])
    write_picture(folder / "p" / "1.png", pixels(1))
    with pytest.raises(Invalid, match=r"test\.csv, row 1 has none of picture, table, text, vector: fill one in"):
        loaded(folder)
    write_rows(folder / "test.csv", [("", *TEST[0][1:])])
    with pytest.raises(Invalid, match=r"test\.csv, row 0 has no label"):
        loaded(folder)
    write_rows(folder / "test.csv", [(TEST[0][0], " ", *TEST[0][2:])])
    with pytest.raises(Invalid, match=r"test\.csv, row 0 names no client in the column 'site': fill it in"):
        loaded(folder)
    write_rows(folder / "one.csv", [ROWS[0], ROWS[2]])
    with pytest.raises(Invalid, match=r"one\.csv: every row has the label 'sick': there is nothing to tell apart"):
        loaded(folder, train="one.csv", test=None)
    write_rows(folder / "two.csv", [ROWS[0], ROWS[1]])
    with pytest.raises(Invalid, match=r"2 rows are too few to keep a part of 0\.2 for tests"):
        loaded(folder, train="two.csv", test=None, features="ngrams", length=None)
    write_rows(folder / "test.csv", [(*TEST[0][:-1], "1 2 3")])
    with pytest.raises(Invalid, match=r"test\.csv, row 0 has a vector of 3 numbers where row 0 has 2"):
        loaded(folder)


# --- clients without a modality --------------------------------------------------------------------------------------


def test_some_clients_have_no_pictures(folder: Path) -> None:
    write_rows(folder / "many.csv", ROWS[:2] * 12)
    data = loaded(folder, train="many.csv", test=None, columns=(), vector=None)
    federation, _ = cs.federate(data, MissingModality(inner=Iid(clients=4), modality="picture", lacking=(1, 3)), seed=0)
    whole, _ = cs.federate(data, Iid(clients=4), seed=0)
    for rows, before in ((federation.train, whole.train), (federation.test, whole.test)):
        for k in range(4):
            x, was = rows.of(k)[0], before.of(k)[0]
            assert x[PRESENT][:, 0].tolist() == [int(k not in (1, 3))] * len(x[PRESENT])
            assert torch.equal(x["text"], was["text"])
            assert torch.equal(x["picture"], was["picture"] * (k not in (1, 3)))
    shares = MissingModality(inner=Iid(clients=4), modality="picture", share=0.5)
    lacking = [k for k, shifts in enumerate(shares.assign(data.y.numpy(), groups=None, seed=1).shifts) if shifts]
    assert len(lacking) == 2


def test_a_modality_that_cannot_be_taken_away_is_refused(folder: Path) -> None:
    data = loaded(folder, vector=None, columns=())
    with pytest.raises(Invalid, match=r"without 'picture' a client would have 1 rows with no modality at all"):
        cs.federate(data, MissingModality(inner=Iid(clients=1), modality="picture", share=1.0), seed=0)
    with pytest.raises(Invalid, match=r"modality = 'sound' is not in the data: the modalities are picture, text"):
        cs.federate(data, MissingModality(inner=Iid(clients=1), modality="sound", share=1.0), seed=0)
    with pytest.raises(Invalid, match=r"modality = 'text' is not in the data: the rows have one part only"):
        cs.federate(load("digits"), MissingModality(inner=Iid(clients=2), modality="text", share=1.0), seed=0)
    with pytest.raises(Invalid, match=r"names client 5, but there are 2: 0 .. 1"):
        cs.federate(data, MissingModality(inner=Iid(clients=2), modality="text", lacking=(5,)), seed=0)


# --- public releases -------------------------------------------------------------------------------------------------


def write_crisismmd(top: Path, flat: bool) -> None:
    head = "event_name\ttweet_id\timage_id\ttweet_text\timage\tlabel\tlabel_text\tlabel_image\tlabel_text_image"
    place = top if flat else top / "crisismmd_datasplit_agreed_label"
    place.mkdir(exist_ok=True)
    for part, numbers in {"train": range(4), "dev": range(4, 6), "test": range(6, 8)}.items():
        lines = [head]
        for k in numbers:
            image = f"data_image/fire/10_10_2017/{k}_0.jpg"
            write_picture(top / image, np.full((80, 70, 3), 20 * k + 40, np.uint8))
            label = "not_humanitarian" if k % 2 else "affected_individuals"
            lines.append(
                f'{"fire" if k % 2 else "flood"}\t{k}\t{k}_0\tsaw "{k}\t{image}\t{label}\t{label}\t{label}\tPositive'
            )
        (place / f"task_humanitarian_text_img_agreed_lab_{part}.tsv").write_text("\n".join(lines))


@pytest.mark.parametrize("flat", [False, True])
def test_crisismmd_as_it_is_released(tmp_path: Path, flat: bool) -> None:
    write_crisismmd(tmp_path, flat)
    data = load("crisismmd", data_dir=tmp_path, text="words", length=3, size=8, normalise="unit", mask=True)
    assert data.x["picture"].shape == (4, 3, 8, 8)
    found = data.x["picture"].mean((1, 2, 3)) * 255
    assert found.tolist() == pytest.approx([40, 60, 80, 100], abs=3)  # JPEG
    assert data.y.tolist() == [0, 1, 0, 1] and data.label_names == ("affected_individuals", "not_humanitarian")
    assert data.group_names == ("fire", "flood") and data.groups.tolist() == [1, 0, 1, 0]
    assert [data.vocabulary[t] for t in data.x["text"][3]] == ["saw", '"', "3"]
    assert data.x[PRESENT].tolist() == [[1, 1]] * 4 and data.test_x[PRESENT].tolist() == [[1, 1]] * 2
    assert len(load("crisismmd", data_dir=tmp_path, size=8, dev="train").y) == 6
    (tmp_path / "data_image/fire/10_10_2017/7_0.jpg").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"lab_test\.tsv, row 1 names the picture .*7_0\.jpg, which is not there"
    ):
        load("crisismmd", data_dir=tmp_path, size=8)
    with pytest.raises(FileNotFoundError, match=r"task_informative_text_img_agreed_lab_train\.tsv"):
        load("crisismmd", data_dir=tmp_path, task="informative")


def test_medic_as_it_is_released(tmp_path: Path) -> None:
    head = "image_id\tevent_name\timage_path\tdamage_severity\tinformative\thumanitarian\tdisaster_types"
    for part, numbers in {"train": range(4), "dev": range(4, 6), "test": range(6, 8)}.items():
        lines = [head]
        for k in numbers:
            write_picture(tmp_path / f"data/aidr/{k}.png", np.full((9, 7, 3), 20 * k + 40, np.uint8))
            severity, kind = ("severe", "little_or_none")[k % 2], ("flood", "fire")[k % 2]
            human = ("not_humanitarian", "affected_people")[k % 2]
            lines.append(f"{k}\tevent{k % 2}\tdata/aidr/{k}.png\t{severity}\tinformative\t{human}\t{kind}")
        (tmp_path / f"MEDIC_{part}.tsv").write_text("\n".join(lines))
    data = load("medic", data_dir=tmp_path, task="disaster_types", size=4, normalise="unit")
    assert data.x.shape == (4, 3, 4, 4) and data.label_names == ("fire", "flood") and data.y.tolist() == [1, 0, 1, 0]
    assert (data.x.mean((1, 2, 3)) * 255).tolist() == pytest.approx([40, 60, 80, 100])
    assert data.group_names == ("event0", "event1") and data.test_groups.tolist() == [0, 1]
    severity = load("medic", data_dir=tmp_path, task="damage_severity", size=4, dev="test")
    assert severity.label_names == ("little_or_none", "severe") and len(severity.test_y) == 4
    assert len(load("medic", data_dir=tmp_path, size=4, dev="train").y) == 6
