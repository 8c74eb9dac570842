"""Tables with a client column, one file per client, the four hospitals, and the accelerometers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_files import real_data

from consilience.core.settings import Invalid
from consilience.data.datasets import load

TABLE = "hospital,age,sex,sick\nb,30,f,yes\na,40,m,no\nb,50,f,no\na,60,m,yes\n"


def test_table_with_a_test_table(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE)
    (tmp_path / "u.csv").write_text("hospital,age,sex,sick\na,,x,yes\n")
    data = load("table", data_dir=tmp_path, file="t.csv", test="u.csv", client="hospital", label="sick")
    spread = np.sqrt(125)
    wanted = [[-15 / spread, 1, 0, 0], [-5 / spread, 0, 1, 0], [5 / spread, 1, 0, 0], [15 / spread, 0, 1, 0]]
    assert np.allclose(data.x.numpy(), wanted, atol=1e-6)
    assert data.feature_names == ("age", "sex=f", "sex=m", "age missing")
    assert data.test_x.tolist() == [[0, 0, 0, 1]]
    assert data.group_names == ("a", "b") and data.groups.tolist() == [1, 0, 1, 0] and data.test_groups.tolist() == [0]
    assert data.label_names == ("no", "yes") and data.y.tolist() == [1, 0, 0, 1]


def test_table_draws_test_rows_from_every_client(tmp_path):
    rows = "".join(f"{'abc'[k % 3]},{k},{k % 2}\n" for k in range(60))
    (tmp_path / "t.tsv").write_text(("client,x,y\n" + rows).replace(",", "\t"))
    data = load("table", data_dir=tmp_path, file="t.tsv", client="client", label="y", standardise=False)
    assert torch.bincount(data.test_groups).tolist() == [4, 4, 4]
    for x, y, groups in ((data.x, data.y, data.groups), (data.test_x, data.test_y, data.test_groups)):
        assert (x[:, 0] % 3).tolist() == groups.tolist() and (x[:, 0] % 2).tolist() == y.tolist()


def test_table_options(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE + "c,70,m,no\n")
    options = {"data_dir": tmp_path, "file": "t.csv", "client": "hospital"}
    numbers = load("table", **options, label="age", target="number", columns=["sex"], test_fraction=0.5)
    assert numbers.classes is None and numbers.y.dtype == torch.float32 and numbers.feature_names[0].startswith("sex=")
    two = load("table", **options, label="sick", min_client_rows=2, test_fraction=0.5)
    assert two.group_names == ("a", "b")
    with pytest.raises(Invalid, match="no column 'ages'"):
        load("table", **options, label="ages")
    with pytest.raises(Invalid, match="not a number"):
        load("table", **options, label="sick", target="number")


def test_table_from_an_archive(tmp_path):
    x = np.array([[1.5, np.nan], [2.5, 4.0], [3.5, 5.0], [4.5, 6.0]])
    np.savez(tmp_path / "t.npz", x=x, client=["p", "q", "p", "q"], y=[0, 1, 1, 0])
    data = load("table", data_dir=tmp_path, file="t.npz", client="client", label="y", standardise=False)
    assert data.feature_names == ("x_0", "x_1", "x_1 missing") and data.group_names == ("p", "q")
    rows = torch.cat([data.x, data.test_x])
    assert sorted(rows[:, 0].tolist()) == [1.5, 2.5, 3.5, 4.5] and rows[:, 2].sum() == 1
    np.savez(tmp_path / "t.npz", x=x, client=["p"], y=[0])
    with pytest.raises(Invalid, match="equal lengths"):
        load("table", data_dir=tmp_path, file="t.npz", client="client", label="y")


def test_one_csv_per_client(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "README.md").write_text("about")
    (tmp_path / "c" / "york.csv").write_text("x,label\n" + "".join(f"{k},{k % 2}\n" for k in range(10)))
    (tmp_path / "c" / "bath.csv").write_text("label,x\n" + "".join(f"{k % 2},{100 + k}\n" for k in range(20)))
    data = load("client_files", data_dir=tmp_path, folder="c", normalise="none")
    assert data.group_names == ("bath", "york") and data.name == "c"
    assert torch.bincount(data.groups).tolist() == [16, 8] and torch.bincount(data.test_groups).tolist() == [4, 2]
    assert ((data.x[:, 0] < 100).long()).tolist() == data.groups.tolist()
    assert (data.x[:, 0] % 2).tolist() == data.y.tolist()
    (tmp_path / "c" / "rome.csv").write_text("z,label\n1,0\n")
    with pytest.raises(Invalid, match=r"rome\.csv and .*bath\.csv differ in the columns x, z"):
        load("client_files", data_dir=tmp_path, folder="c")


def test_client_folders_for_training_and_test(tmp_path):
    for part, rows in (("train", "1,a\n3,b\n"), ("test", "5,a\n7,b\n9,a\n")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "york.csv").write_text("x,label\n" + rows)
    data = load("client_files", data_dir=tmp_path, folder=".")
    assert data.x.flatten().tolist() == [-1, 1] and data.test_x.flatten().tolist() == [3, 5, 7]
    (tmp_path / "test" / "bath.csv").write_text("x,label\n1,a\n")
    with pytest.raises(Invalid, match=r"'bath', for which .*train has no file"):
        load("client_files", data_dir=tmp_path, folder=".")


def test_one_archive_per_client(tmp_path):
    pixels = np.arange(8 * 4, dtype=np.uint8).reshape(8, 2, 2)
    np.savez(tmp_path / "a.npz", x=pixels[:5], y=[0, 1, 0, 1, 0])
    np.savez(tmp_path / "b.npz", x=pixels[5:], y=[2, 2, 2])
    data = load("client_files", data_dir=tmp_path, folder=".", normalise="unit", test_fraction=0.34)
    assert data.x.shape == (5, 1, 2, 2) and data.classes == 3 and data.group_names == ("a", "b")
    rows = (data.x[:, 0, 0, 0] * 255 / 4).round().long()
    assert (rows >= 5).long().tolist() == data.groups.tolist()
    np.savez(tmp_path / "a.npz", x_train=pixels[:2], y_train=[0, 1], x_test=pixels[2:4], y_test=[1, 1])
    np.savez(tmp_path / "b.npz", x_train=pixels[4:5], y_train=[0], x_test=pixels[5:6], y_test=[1])
    data = load("client_files", data_dir=tmp_path, folder=".", normalise="unit")
    assert data.groups.tolist() == [0, 0, 1] and data.test_groups.tolist() == [0, 0, 1]
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 3)), y=[0, 1])
    with pytest.raises(Invalid, match=r"b\.npz has rows of float64 \(3,\) where other clients have uint8 \(2, 2\)"):
        load("client_files", data_dir=tmp_path, folder=".")


def test_client_folder_problems(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no client files"):
        load("client_files", data_dir=tmp_path, folder=".")
    (tmp_path / "a.csv").write_text("x,label\n1,0\n")
    (tmp_path / "a.tsv").write_text("x\tlabel\n1\t0\n")
    with pytest.raises(Invalid, match="are both client 'a'"):
        load("client_files", data_dir=tmp_path, folder=".")
    (tmp_path / "a.tsv").unlink()
    np.savez(tmp_path / "b.npz", x=[[1.0]], y=[0])
    with pytest.raises(Invalid, match="mixes"):
        load("client_files", data_dir=tmp_path, folder=".")
    (tmp_path / "b.npz").unlink()
    with pytest.raises(Invalid, match="no column 'sick'"):
        load("client_files", data_dir=tmp_path, folder=".", label="sick")


HEART = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num\n"


def write_hospitals(folder, rows=6):
    for number, hospital in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        lines = [
            f"{50 + k},{k % 2},4,120,{0 if number == 2 else 200 + k},0,0,150,0,1.5,2,{'' if k else 1},3,{k % 5}\n"
            for k in range(rows)
        ]
        (folder / f"{hospital}.csv").write_text(HEART + "".join(lines))


def test_heart_disease_gaps_and_target(tmp_path):
    write_hospitals(tmp_path)
    data = load("heart_disease", data_dir=tmp_path, test_fraction=0.34)
    assert data.group_names == ("cleveland", "hungarian", "switzerland", "va")
    assert torch.bincount(data.groups).tolist() == [4] * 4 and torch.bincount(data.test_groups).tolist() == [2] * 4
    assert data.feature_names[13:] == ("chol missing", "ca missing") and data.x.shape[1] == 15
    assert (data.x[:, 13] == (data.groups == 2)).all()  # Swiss cholesterol of 0 was not measured
    assert int(data.y.sum() + data.test_y.sum()) == 4 * 4  # num 0, 1, 2, 3, 4, 0: four of six are sick
    assert torch.allclose(data.x[:, 0].mean(), torch.zeros(()), atol=1e-6)
    kept = load("heart_disease", data_dir=tmp_path, zero_is_missing=False)
    assert kept.feature_names[13:] == ("ca missing",)
    (tmp_path / "va.csv").write_text(HEART + "50,1,4,120,0,0,0,150,0,1.5,2,,3,7\n")
    with pytest.raises(Invalid, match=r"va\.csv, row 0: num is '7', not 0 .. 4"):
        load("heart_disease", data_dir=tmp_path)


def test_heart_disease_as_released(tmp_path):
    (tmp_path / "csv").mkdir()
    (tmp_path / "release").mkdir()
    write_hospitals(tmp_path / "csv")
    for path in (tmp_path / "csv").iterdir():
        rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
        decimals = [[f"{float(cell)}" if cell else "?" for cell in row[:-1]] + row[-1:] for row in rows]
        text = "".join(",".join(row) + "\n" for row in decimals)
        (tmp_path / "release" / f"processed.{path.stem}.data").write_text(text)
    released, tidy = (load("heart_disease", data_dir=tmp_path / form) for form in ("release", "csv"))
    assert torch.equal(released.x, tidy.x) and torch.equal(released.y, tidy.y)


def write_har(path, **changes):
    x = np.stack([np.arange(700.0), np.arange(700.0) * 2, np.ones(700)], axis=1).astype(np.float32)
    x[::2, 2] = 0
    arrays = {
        "x": x,
        "start": [0, 400],
        "length": [400, 300],
        "subject": [7, 3],
        "activity": [1, 0],
        "is_test": [False, True],
        "activity_names": ["SIT", "WALK"],
    }
    np.savez(path, **{**arrays, **changes})


def test_accelerometer_windows(tmp_path):
    write_har(tmp_path / "uci_har_acc.npz")
    data = load("uci_har_acc", data_dir=tmp_path, split="release")
    assert data.x.shape == (5, 3, 128) and data.test_x.shape == (3, 3, 128)  # starts 0, 64 .. 256; 0, 64, 128
    assert data.y.tolist() == [1] * 5 and data.test_y.tolist() == [0] * 3
    assert data.group_names == ("person_3", "person_7") and set(data.groups.tolist()) == {1}
    steps = data.x[:, 0, 0].diff() / data.x[0, 0].diff()[0]
    assert torch.allclose(steps, torch.full((4,), 64.0), rtol=1e-4)
    assert torch.allclose(data.x.mean((0, 2)), torch.zeros(3), atol=1e-5)
    within = load("uci_har_acc", data_dir=tmp_path, test_fraction=0.5)
    # series halves of 200 and 150 samples: windows at 0, 64 and at 0
    assert torch.bincount(within.groups).tolist() == [1, 2] and torch.bincount(within.test_groups).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("changes", "defect"),
    [
        ({"length": [400, 301]}, "a series ends at 701 but x has 700"),
        ({"length": [400]}, "one entry for each series"),
        ({"x": np.full((700, 3), np.nan, np.float32)}, "NaN"),
        ({"x": np.zeros(700, np.float32)}, "must be decimals"),
        ({"length": [100, 100]}, "no series is long enough"),
    ],
)
def test_wrong_accelerometer_files(tmp_path, changes, defect):
    write_har(tmp_path / "uci_har_acc.npz", **changes)
    with pytest.raises(Invalid, match=defect):
        load("uci_har_acc", data_dir=tmp_path)


def test_real_heart_disease():
    data = load("heart_disease", data_dir=real_data("heart_disease"))
    sizes = torch.bincount(data.groups) + torch.bincount(data.test_groups)
    assert sizes.tolist() == [303, 294, 123, 200] and len(data.feature_names) == 23
    sick = [int(data.y[data.groups == k].sum() + data.test_y[data.test_groups == k].sum()) for k in range(4)]
    assert sick == [303 - 164, 294 - 188, 123 - 8, 200 - 51]
    missing = data.feature_names.index("ca missing")
    gaps = [
        int(data.x[data.groups == k, missing].sum() + data.test_x[data.test_groups == k, missing].sum()) for k in (0, 3)
    ]
    assert gaps == [4, 198]


def test_heart_disease_can_be_learnt():
    from sklearn.linear_model import LogisticRegression

    data = load("heart_disease", data_dir=real_data("heart_disease"))
    model = LogisticRegression(max_iter=1000).fit(data.x.numpy(), data.y.numpy())
    assert model.score(data.test_x.numpy(), data.test_y.numpy()) > 0.75


def test_real_uci_har():
    folder = real_data("uci_har_acc")
    release = load("uci_har_acc", data_dir=folder, split="release")
    assert len(release.y) + len(release.test_y) == 10119 and release.classes == 6
    assert {release.group_names[g] for g in release.test_groups.unique()} == {
        f"person_{number}" for number in (2, 4, 9, 10, 12, 13, 18, 20, 24)
    }
    within = load("uci_har_acc", data_dir=folder)
    assert len(within.groups.unique()) == len(within.test_groups.unique()) == 30
