"""What is recorded client by client: right by hand, short, and the same however often a run was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_runs import SMALL, real

from consilience.core.exchange import Cohort, Notes
from consilience.core.federation import Federation
from consilience.core.metrics import MetricRow
from consilience.core.rounds import Round, Snapshot
from consilience.experiments import runner
from consilience.experiments.client_log import MOST_CLIENTS, MOST_COMPARED, client_row, federation_facts
from consilience.experiments.config import config
from consilience.runs.folder import RunFolder
from consilience.runs.row_log import RowLog
from consilience.task.kinds import KINDS, REGRESSION
from consilience.task.scores import ClientScores, Scores


def a_round(notes: Notes, ids: list[int], heard: list[bool] | None = None) -> Round:
    cohort = Cohort(
        reply={},
        ids=np.array(ids),
        examples=torch.ones(len(ids)),
        steps=np.ones(len(ids)),
        round=0,
        heard=None if heard is None else np.array(heard),
    )
    here = Snapshot(round=1, server={}, memory={}, losses=np.empty(0))
    return Round(
        number=1,
        model={},
        cohort=cohort,
        chosen=cohort.ids,
        notes=notes,
        bytes_down=0,
        bytes_up=0,
        clock=0.0,
        snapshot=here,
    )


ACCURACY = KINDS["classification"].metrics[0].row(main=True)


def scores(values: np.ndarray, main: MetricRow = ACCURACY) -> Scores:
    rows = np.ones(len(values), dtype=np.int64)
    clients = ClientScores(main=main, loss=2 * values, values=values)
    return Scores(rows=1, metrics=(main,), values={}, client_rows=rows, clients=clients)


def test_a_similarity_matrix_is_kept_below_its_diagonal() -> None:
    matrix = torch.tensor([[1.0, 0.12345, 0.2], [0.12345, 1.0, 0.3], [0.2, 0.3, 1.0]])
    row = client_row(a_round({"similarity": matrix}, [2, 5, 7]), None, None)
    assert row == {"round": 1, "compared": [2, 5, 7], "similarity": [pytest.approx(0.1235, abs=1e-4), 0.2, 0.3]}


def test_who_was_not_heard_was_not_compared() -> None:
    matrix = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    row = client_row(a_round({"similarity": matrix}, [2, 5, 7], [True, False, True]), None, None)
    assert row["compared"] == [2, 7] and row["similarity"] == [0.5]


def test_a_matrix_of_unknown_clients_is_left_out() -> None:
    assert client_row(a_round({"similarity": torch.eye(5)}, [2, 5, 7]), None, None) == {"round": 1}


def test_of_a_large_cohort_the_first_are_compared() -> None:
    many = MOST_COMPARED + 3
    row = client_row(a_round({"similarity": torch.eye(many)}, list(range(many))), None, None)
    assert len(row["compared"]) == MOST_COMPARED
    assert len(row["similarity"]) == MOST_COMPARED * (MOST_COMPARED - 1) // 2


def test_values_of_clients_or_their_percentiles() -> None:
    few = client_row(a_round({}, [0]), scores(np.array([0.25, np.nan, 1 / 3])), None)
    assert few["accuracy"][0] == 0.25 and np.isnan(few["accuracy"][1]) and few["accuracy"][2] == 0.3333
    many = np.linspace(0, 1, MOST_CLIENTS + 1)
    row = client_row(a_round({}, [0]), scores(many), None)
    assert "accuracy" not in row and row["accuracy_percentiles"] == pytest.approx(np.arange(101) / 100)


def test_a_regression_has_errors() -> None:
    main = REGRESSION.metrics[0].row(main=True)
    own = ClientScores(main=main, loss=np.array([3.0]), values=np.array([4.0]))
    row = client_row(a_round({}, [0]), scores(np.array([0.5, 1.0]), main), own)
    assert row == {"round": 1, "absolute_error": [0.5, 1.0], "personal_absolute_error": [4.0]}


def test_swaps_say_whose_model_everyone_holds() -> None:
    assert client_row(a_round({"model_of": torch.tensor([4, 1])}, [1, 4]), None, None)["model_of"] == [4, 1]


def test_classes_are_counted_at_each_client() -> None:
    x = torch.zeros(3, 1)
    parts = [(x, torch.tensor([0, 0, 2])), (x[:1], torch.tensor([1]))]
    facts = federation_facts(Federation.from_clients(parts, names=("a", "b")), ("x", "y", "z"))
    assert facts["class_counts"] == [[2, 0, 1], [0, 1, 0]] and facts["train_rows"] == [3, 1]
    assert facts["names"] == ["a", "b"] and facts["labels"] == ["x", "y", "z"] and facts["test_rows"] is None


def test_a_regression_has_no_class_counts() -> None:
    facts = federation_facts(Federation.from_clients([(torch.zeros(2, 1), torch.tensor([0.5, 0.1]))]), ())
    assert "class_counts" not in facts and facts["train_rows"] == [2]


def test_a_log_is_cut_at_a_round_and_behind_damage(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "rows.jsonl")
    log.keep_rounds(3)  # a run of old has none: it is there now, and empty
    for number in (1, 2, 3):
        log.append({"round": number})
    log.keep_rounds(2)
    assert [row["round"] for row in log.read().rows] == [1, 2]
    log.append({"round": 3})
    assert [row["round"] for row in log.read().rows] == [1, 2, 3]
    log.path.write_bytes(b'{"round":1}\n\0\0\0\0\n{"round":3}\n')
    RowLog(log.path).keep_rounds(3)
    assert log.path.read_bytes() == b'{"round":1}\n'
    log.path.write_bytes(b'{"round":1}\n{"rou')
    RowLog(log.path).keep_rounds(3)
    assert log.path.read_bytes() == b'{"round":1}\n'


@pytest.mark.usefixtures("untraced")
def test_a_resumed_run_has_the_same_client_rows(tmp_path: Path) -> None:
    settings = ("algorithm=simfedswap", "algorithm.h2=2", "rounds=4")
    whole = real(tmp_path / "whole", *settings)
    with runner.start(config.load(None, [*SMALL, *settings]), folder=tmp_path / "parts") as run:
        for observation in run.observations():
            if observation.round.number == 2:
                break
    parts = RunFolder.open(tmp_path / "parts")
    with parts.clients.path.open("ab") as file:
        file.write(b'{"round":3,"of a round that was not sa')  # what a crash may leave
    runner.proceed(parts.path)
    assert parts.clients.path.read_bytes() == (whole / "clients.jsonl").read_bytes()
    rows = parts.clients.read().rows
    assert [row["round"] for row in rows] == [1, 2, 3, 4] and all("model_of" in rows[n] for n in (0, 2))
    assert "model_of" not in rows[1]  # an average
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for row, measured in zip(rows, metrics):
        known = [value for value in row["accuracy"] if value is not None]
        assert np.mean(known) == pytest.approx(measured["client_accuracy_mean"], abs=1e-4)
