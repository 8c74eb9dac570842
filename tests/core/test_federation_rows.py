"""Clients side by side: constructors and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.federation import Federation, Rows
from consilience.core.settings import Invalid


def pair(rows: int, value: float = 0.0, features: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((rows, features), value), torch.arange(rows) % 3


def test_from_clients_lays_rows_side_by_side() -> None:
    data = Federation.from_clients([pair(3, 1.0), pair(0), pair(2, 2.0)], names=("a", "b", "c"))
    assert len(data) == 3 and data.names == ("a", "b", "c") and data.classes == 3
    assert data.train.starts.tolist() == [0, 3, 3] and data.train.sizes.tolist() == [3, 0, 2]
    assert data.train.x[:, 0].tolist() == [1, 1, 1, 2, 2]
    x, y = data.train.of(2)
    assert x.shape == (2, 2) and y.tolist() == [0, 1]
    assert len(data.train.of(1)[1]) == 0
    assert data.test is None


def test_names_default_to_numbers() -> None:
    assert Federation.from_clients([pair(1), pair(1)]).names == ("0", "1")


def test_test_rows_for_all_belong_to_nobody() -> None:
    data = Federation.from_clients([pair(2), pair(2)], test=pair(5))
    assert data.test is not None
    assert data.test.sizes.tolist() == [0, 0] and len(data.test.y) == 5


def test_test_rows_per_client() -> None:
    data = Federation.from_clients([pair(2), pair(2)], client_tests=[pair(1, 7.0), pair(3, 8.0)])
    assert data.test is not None and data.test.sizes.tolist() == [1, 3]
    assert data.test.of(1)[0][:, 0].tolist() == [8, 8, 8]


def test_features_may_be_several_tensors() -> None:
    def client(rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {"text": torch.zeros(rows, 4), "image": torch.ones(rows, 3)}, torch.zeros(rows)

    data = Federation.from_clients([client(2), client(3)])
    assert data.classes is None  # floating targets are not class numbers
    x, _ = data.train.of(1)
    assert x["text"].shape == (3, 4) and x["image"].shape == (3, 3)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 2**20), st.booleans())
def test_gather_makes_each_part_contiguous(owners: list[int], seed: int, keep_rest: bool) -> None:
    """Owner 3 stands for nobody."""
    rows = torch.arange(len(owners))
    parts = [[r for r, owner in enumerate(owners) if owner == k] for k in range(3)]
    rest = [r for r, owner in enumerate(owners) if owner == 3]
    gathered = Rows.gather(rows * 10, rows, parts, keep_rest=keep_rest)
    for k, part in enumerate(parts):
        x, y = gathered.of(k)
        assert y.tolist() == part and x.tolist() == [10 * r for r in part]
    assert gathered.y[int(gathered.sizes.sum()) :].tolist() == (rest if keep_rest else [])


def test_rows_move_floating_features_and_targets_only() -> None:
    rows = Rows(
        x={"a": torch.zeros(2, 1), "tokens": torch.zeros(2, 3, dtype=torch.int64)},
        y=torch.zeros(2),
        starts=torch.tensor([0]),
        sizes=torch.tensor([2]),
    ).to("cpu", torch.float64)
    assert rows.x["a"].dtype == rows.y.dtype == torch.float64 and rows.x["tokens"].dtype == torch.int64


@pytest.mark.parametrize("place", ["training", "test"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_features_name_the_owner(place: str, value: float) -> None:
    clean, dirty = [pair(2), pair(2)], [pair(2), pair(2, value)]
    train, test = (dirty, clean) if place == "training" else (clean, dirty)
    with pytest.raises(Invalid, match=f"{place} row 0 of client 'north' has NaN or infinite values"):
        Federation.from_clients(train, client_tests=test, names=("south", "north"))


def test_nonfinite_features_of_one_number_a_row() -> None:
    with pytest.raises(Invalid, match="training row 1 of client '0' has NaN"):
        Federation.from_clients([(torch.tensor([1.0, float("nan")]), torch.tensor([0, 1]))])


def test_refusals() -> None:
    with pytest.raises(Invalid, match="clients is empty"):
        Federation.from_clients([])
    with pytest.raises(Invalid, match="no training rows"):
        Federation.from_clients([pair(0), pair(0)])
    with pytest.raises(Invalid, match=r"client 1 has 3 rows of features for 2 targets"):
        Federation.from_clients([pair(2), (torch.zeros(3, 2), torch.zeros(2))])
    with pytest.raises(Invalid, match="client_tests has 1 entries for 2 clients: give one each"):
        Federation.from_clients([pair(2), pair(2)], client_tests=[pair(1)])


def test_too_few_or_too_many_names_are_refused() -> None:
    with pytest.raises(Invalid, match="names"):
        Federation.from_clients([pair(2), pair(2)], names=("only one",))


def test_test_rows_that_do_not_match_are_refused() -> None:
    with pytest.raises(Invalid, match="test"):
        Federation.from_clients([pair(2)], test=(torch.zeros(3, 2), torch.zeros(2)))


def test_clients_of_different_shape_are_refused() -> None:
    with pytest.raises(Invalid, match="client 1"):
        Federation.from_clients([pair(2, features=2), pair(2, features=3)])


def test_shared_and_own_test_rows_together_are_refused() -> None:
    with pytest.raises(Invalid, match="test and client_tests"):
        Federation.from_clients([pair(2)], test=pair(2), client_tests=[pair(2)])
