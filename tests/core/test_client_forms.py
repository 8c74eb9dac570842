"""Clients as people have them: arrays, data sets, loaders; what cannot be read is refused by the client's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset

from consilience.core.federation import Federation
from consilience.core.settings import Invalid

X, Y = torch.arange(24.0).reshape(8, 3), torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])


class Named(Dataset[tuple[torch.Tensor, str]]):
    """Rows with names of classes."""

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, str]:
        return X[row], ["no", "yes"][int(Y[row])]


def same(found: Federation, client: int = 0) -> bool:
    x, y = found.train.of(client)
    return torch.equal(x, X) and torch.equal(y, Y)


@pytest.mark.parametrize(
    "client",
    [
        (X.numpy().astype(np.float64), Y.numpy()),
        (X.tolist(), Y.tolist()),
        TensorDataset(X, Y),
        DataLoader(TensorDataset(X, Y), batch_size=3),
        DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True, drop_last=True),
        DataLoader([{"pixels": x, "label": y} for x, y in zip(X, Y)], batch_size=3),  # type: ignore[arg-type]
    ],
    ids=["arrays", "lists", "dataset", "loader", "shuffling loader", "loader of dicts"],
)
def test_the_same_rows_in_other_forms(client: Any) -> None:
    found = Federation.from_clients([client, (X, Y)])
    assert same(found) and same(found, 1) and found.train.x.dtype == torch.float32 and found.classes == 2


def test_a_sampler_of_ones_own_is_kept() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, sampler=SubsetRandomSampler([1, 4, 6]))
    x, y = Federation.from_clients([loader]).train.of(0)
    assert sorted(x[:, 0].tolist()) == [3.0, 12.0, 18.0] and y.tolist() == [1, 1, 1]


def test_names_of_clients_and_of_classes() -> None:
    found = Federation.from_clients(
        {"b": Named(), "a": Subset(Named(), [1, 2])}, client_tests={"a": (X[:1], ["yes"]), "b": (X[:2], ["no", "no"])}
    )
    assert found.names == ("b", "a") and found.label_names == ("no", "yes") and same(found)
    assert found.train.of(1)[1].tolist() == [1, 0]
    assert found.test is not None and found.test.of(0)[1].tolist() == [0, 0] and found.test.of(1)[1].tolist() == [1]


def test_pandas_columns_of_numbers() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X.numpy(), columns=["u", "v", "w"])
    assert same(Federation.from_clients([(frame, pandas.Series(Y.numpy()))]))
    frame["town"] = "x"
    with pytest.raises(Invalid, match="client 0, x: the column 'town' holds no numbers"):
        Federation.from_clients([(frame, Y)])
    with pytest.raises(Invalid, match=r"client 0 is a table \(DataFrame\): cs.from_frames"):
        Federation.from_clients([frame])
    with pytest.raises(
        Invalid, match=r"clients is one table \(DataFrame\): cs.from_frames\(table, label=..., client=...\)"
    ):
        Federation.from_clients(frame)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({"a": (X, Y), "b": (X, Y[:3])}, r"client b has 8 rows of features for 3 targets"),
        ({"a": (X, Y), "b": (X[:, :2], Y)}, r"client b has rows of \(2,\).*client a of \(3,\)"),
        ({"a": (X, Y), "b": ([[1, 2], [3]], [0, 1])}, "client b, x: rows have different lengths"),
        ({"a": [1, 2]}, "client a, x is a single number"),
        ({"a": X}, "client a is Tensor: it must be a pair"),
        ([(np.array([["u"], ["v"]]), [0, 1])], "client 0, x holds <U1 where numbers are needed"),
        ([TensorDataset(X)], r"client 0: a row must be a pair \(x, y\), not list of 1"),
        (X, "clients is one Tensor: give a list"),
        ((X, Y), r"clients is one pair \(x, y\): give a list of clients, \[\(x, y\), ...\]"),
        ([], "clients is empty"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(clients: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Federation.from_clients(clients)


def test_more_test_sets_than_clients_are_refused() -> None:
    with pytest.raises(Invalid, match="client_tests has 2 entries for 1 clients"):
        Federation.from_clients([(X, Y)], client_tests=[(X, Y), (X, Y)])
    with pytest.raises(Invalid, match="'c' is in one of them only"):
        Federation.from_clients({"a": (X, Y)}, client_tests={"a": (X, Y), "c": (X, Y)})


def test_reprs_fit_a_line_and_html_is_escaped() -> None:
    found = Federation.from_clients({f"<b>{k}": (X, Y) for k in range(30)}, test=(X, Y))
    assert repr(found) == "Federation(30 clients, 240 rows, 8 a client, 8 test rows, 2 classes)"
    assert repr(found.train) == "Rows(240 of x (3,), 30 clients)"
    page = found._repr_html_()
    assert "&lt;b&gt;0" in page and "<b>" not in page and "and 18 more" in page
