"""Frames and Hugging Face data sets become the federation that the same rows in files would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import consilience as cs
from consilience.core.settings import Invalid

pandas = pytest.importorskip("pandas")


def patients(rows: int = 60) -> Any:
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "age": rng.integers(20, 90, rows),
            "pressure": rng.normal(120, 15, rows),
            "sex": rng.choice(["f", "m"], rows),
            "hospital": [f"h{k % 3}" for k in range(rows)],
        }
    )
    frame["outcome"] = np.where(frame["age"] > 50, "ill", "well")
    frame.loc[3, "pressure"] = np.nan
    return frame


def test_a_frame_is_read_as_its_file(tmp_path: Path) -> None:
    frame = patients()
    frame.to_csv(tmp_path / "p.csv", index=False)
    options = {"file": "p.csv", "client": "hospital", "label": "outcome"}
    wanted, _ = cs.federate(cs.load_data("table", data_dir=tmp_path, **options), cs.partition("natural"), seed=0)
    found = cs.from_frames(frame, "outcome", client="hospital")
    assert found.names == wanted.names == ("h0", "h1", "h2") and found.label_names == ("ill", "well")
    for ours, theirs in ((found.train, wanted.train), (found.test, wanted.test)):
        assert ours is not None and theirs is not None
        assert torch.equal(ours.x, theirs.x) and torch.equal(ours.y, theirs.y)
    apart = {name: part.drop(columns="hospital") for name, part in frame.groupby("hospital")}
    ordered = cs.from_frames(frame.sort_values("hospital", kind="stable"), "outcome", client="hospital")
    assert torch.equal(cs.from_frames(apart, "outcome").train.x, ordered.train.x)


def test_test_frames_and_real_valued_targets() -> None:
    frame = patients()
    train, test = frame[:45], frame[45:]
    with pytest.raises(Invalid, match=r"row 1 of client 'h0' has no value in the column 'pressure'"):
        cs.from_frames(train, "pressure", client="hospital")
    whole = train.dropna()
    found = cs.from_frames(whole, "pressure", client="hospital", test=test, columns=["age"])
    assert found.classes is None and found.test is not None and len(found.test.y) == 15 and len(found.train.y) == 44
    age = whole["age"].to_numpy(np.float64)
    mine = whole["hospital"] == "h1"
    scaled = (whole["age"][mine].to_numpy() - age.mean()) / age.std()
    np.testing.assert_allclose(found.train.of(1)[0][:, 0].numpy(), scaled, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: {"n": f[:30], "s": f[30:].drop(columns="sex")}, "client 's' has no column 'sex'"),
        (lambda f: {"n": f[:30], "s": f[30:].assign(pressure=np.inf)}, "column 'pressure', row 0 of client 's' is inf"),
        (lambda f: {"n": f[:30], "s": f[30:].assign(outcome=None)}, "row 0 of client 's' has no value in .* 'outcome'"),
        (lambda f: {"n": f[:30], "s": f[:0]}, "client 's' has no rows"),
        (lambda f: {"n": f[:30], "s": [1, 2]}, "client 's' is list"),
        (lambda f: f, "name the column of clients, client="),
        (lambda f: {"n": f.assign(sex=[[1]] * 60)}, "client 'n': the column 'sex' holds list"),
    ],
)
def test_problems_name_the_client_and_the_column(change: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        cs.from_frames(change(patients()), "outcome")


def test_parquet_files_are_read_as_csv_files(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = patients()[["age", "pressure", "sex", "hospital", "outcome"]]
    frame[frame["age"] > 30].to_parquet(tmp_path / "p.parquet")  # with an index of its own, which is no column
    frame[frame["age"] > 30].to_csv(tmp_path / "p.csv", index=False)
    options = {"client": "hospital", "label": "outcome"}
    one, two = (cs.load_data("table", data_dir=tmp_path, file=name, **options) for name in ("p.csv", "p.parquet"))
    assert torch.equal(one.x, two.x) and torch.equal(one.y, two.y) and one.feature_names == two.feature_names
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(Invalid, match=r"broken\.parquet is not a readable Parquet file"):
        cs.load_data("table", data_dir=tmp_path, file="broken.parquet", **options)


def test_hugging_face_data_in_memory_and_on_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    texts = [["good fine nice", "bad awful poor"][k % 2] for k in range(40)]
    columns = {"text": texts, "label": [k % 2 for k in range(40)], "shop": [f"s{k // 10}" for k in range(40)]}
    rows = datasets.Dataset.from_dict(columns).cast_column("label", datasets.ClassLabel(names=["up", "down"]))
    options: dict[str, Any] = {"client": "shop", "text": "ngrams", "ngram_features": 32}
    found = cs.from_hugging_face(rows, **options)
    assert found.names == ("s0", "s1", "s2", "s3") and found.label_names == ("up", "down")
    assert found.train.x.shape == (32, 32)
    rows.save_to_disk(tmp_path / "whole")
    again = cs.from_hugging_face(tmp_path / "whole", **options)
    assert torch.equal(again.train.x, found.train.x) and torch.equal(again.train.y, found.train.y)
    split = rows.train_test_split(0.25, seed=0)
    split.save_to_disk(tmp_path / "split")
    given = cs.from_hugging_face(str(tmp_path / "split"), **options)
    assert len(given.train.y) == 30 and given.test is not None and len(given.test.y) == 10
    assert given.test.y.sum() == sum(split["test"]["label"])
    data = cs.load_data("hugging_face", path=str(tmp_path / "split"), group="shop", text="ngrams", ngram_features=32)
    assert len(data.y) == 30 and data.group_names == ("s0", "s1", "s2", "s3")

    def holed(name: str) -> Any:
        gap = {name: [value if k != 1 else None for k, value in enumerate(columns[name])]}
        return datasets.Dataset.from_dict({**columns, **gap})

    apart = {"n": rows.select(range(20)), "s": rows.select(range(20, 40))}
    assert cs.from_hugging_face(apart, text="ngrams").names == ("n", "s")
    table = datasets.Dataset.from_pandas(patients())
    wanted = cs.from_frames(patients(), "outcome", client="hospital")
    assert torch.equal(cs.from_hugging_face(table, label="outcome", client="hospital").train.x, wanted.train.x)
    for bad, message in (
        (lambda: cs.from_hugging_face(rows), "no clients"),
        (lambda: cs.from_hugging_face(rows, client="shp"), "did you mean 'shop'"),
        (lambda: cs.from_hugging_face(rows.select([]), client="shop"), "data has no rows"),
        (lambda: cs.from_hugging_face(holed("label"), client="shop"), "row 1 has no label in the column 'label'"),
        (lambda: cs.from_hugging_face(holed("shop"), client="shop"), "row 1 names no client in the column 'shop'"),
        (lambda: cs.from_hugging_face({"n": rows, "s": table}), "clients 'n' and 's' differ in the columns"),
    ):
        with pytest.raises(Invalid, match=message):
            bad()
