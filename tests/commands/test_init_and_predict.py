"""From a user's files to a config, a run and predictions: `init`, `run`, `predict`."""

from __future__ import annotations

import csv
import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from consilience.cli import app
from consilience.experiments import retest
from consilience.runs import toml_text

HEAD = ["key", "age", "sex", "hospital", "outcome"]
SMALL = ("rounds=2", "engine.lane=serial", "threads=1", "--quiet", "--no-report")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def rows(count: int, seed: int = 0) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    found = []
    for k in range(count):
        age, sex = int(rng.integers(20, 90)), str(rng.choice(["f", "m"]))
        ill = "ill" if age + 10 * (sex == "m") > 60 else "well"
        found.append([f"p{k}", str(age), sex, f"h{k % 3}", ill])
    return found


def write(path: Path, head: list[str], lines: list[list[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *lines])


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "patients.csv", HEAD, rows(120))
    return tmp_path


def settings(path: str = "consilience.toml") -> dict[str, dict[str, object]]:
    return toml_text.read(Path(path))


def test_a_table_is_understood_trained_and_predicted(patients: Path) -> None:
    done = call("init", "patients.csv")
    assert done.exit_code == 0, done.output
    data = settings()["data"]
    assert data == {
        "name": "table",
        "file": "patients.csv",
        "label": "outcome",
        "client": "hospital",
        "columns": ["age", "sex"],  # `key` differs in every row
        "target": "classes",
    }
    assert settings()["partition"] == {"name": "natural"} and "clients  3" in done.stdout
    assert call("run", "consilience.toml", *SMALL, "--folder", "run").exit_code == 0
    write(patients / "new.csv", ["sex", "age", "note"], [["m", "80", "x"], ["f", "", "y"], ["?", "25", "z"]])
    done = call("predict", "run", "--data", "new.csv")
    assert done.exit_code == 0 and "not read: note" in done.stderr, done.output
    found = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [set(row) for row in found] == [{"row", "prediction", "probability of ill", "probability of well"}] * 3
    # by hand: age standardised by the training rows' mean and deviation, the gap filled with their median
    result, _, dataset = retest.latest_simulation(Path("run"))
    assert dataset.feature_names == ("age", "sex=f", "sex=m")
    column = dataset.read_rows.encoding.columns[0]  # type: ignore[union-attr]
    x = [[(80 - column.mean) / column.deviation, 0, 1], [(column.median - column.mean) / column.deviation, 1, 0]]
    x.append([(25 - column.mean) / column.deviation, 0, 0])
    import torch

    wanted = result.model(torch.tensor(x)).softmax(1)[:, 0].tolist()
    assert [float(row["probability of ill"]) for row in found] == pytest.approx(wanted, abs=2e-6)
    assert [row["prediction"] for row in found] == ["ill" if chance > 0.5 else "well" for chance in wanted]


def test_predictions_refuse_columns_that_do_not_fit(patients: Path) -> None:
    assert call("init", "patients.csv", "--no-check").exit_code == 0
    assert call("run", "consilience.toml", *SMALL, "--folder", "run").exit_code == 0
    write(patients / "lacking.csv", ["sex", "agee"], [["m", "80"]])
    lacking = call("predict", "run", "--data", "lacking.csv", "--out", "p.csv")
    assert lacking.exit_code == 2 and "lacks the column 'age'" in lacking.stderr and "'agee'" in lacking.stderr
    assert not Path("p.csv").exists()
    write(patients / "text.csv", ["sex", "age"], [["m", "80"], ["f", "old"]])
    wrong = call("predict", "run", "--data", "text.csv")
    assert wrong.exit_code == 2 and "'old' in column 'age', row 1" in wrong.stderr
    assert call("predict", "run", "--data", "absent.csv").exit_code == 2
    assert call("run", *SMALL, "model=logistic", "--folder", "digits").exit_code == 0
    refused = call("predict", "digits", "--data", "text.csv")
    assert refused.exit_code == 2 and "cannot read rows from a file" in refused.stderr


def test_one_file_per_client_and_numbers_to_predict(patients: Path) -> None:
    Path("clients").mkdir()
    for name in ("north", "south"):
        numbers = [
            [f"{name} {n}", *row[1:3], f"{int(row[1]) / 7:.3f}"] for n, row in enumerate(rows(30, seed=len(name)))
        ]
        write(Path("clients") / f"{name}.csv", ["patient", "age", "sex", "pressure"], numbers)
    done = call("init", "clients", "--out", "c.toml")
    assert done.exit_code == 0, done.output
    assert settings("c.toml")["data"] == {
        "name": "client_files",
        "folder": "clients",
        "label": "pressure",
        "columns": ["age", "sex"],  # an input for each patient would be learned by heart
        "target": "number",
    }
    assert "regression" in done.stdout and "clients  2" in done.stdout
    assert "one for each client: north.csv, south.csv\n" in done.stdout


def test_texts_arrays_pictures_and_leaf_are_recognised(patients: Path) -> None:
    from PIL import Image

    texts = [[["good nice thing", "bad awful mess"][k % 2] + f" {k}", ["pos", "neg"][k % 2]] for k in range(40)]
    write(patients / "reviews.csv", ["review", "sentiment"], texts)
    np.savez("arrays.npz", x=np.zeros((30, 4)), y=np.arange(30) % 2)
    for name in ("cat", "dog"):
        Path("pets", name).mkdir(parents=True)
        for k in range(6):
            Image.fromarray(np.full((9, 9, 3), 20 * k, np.uint8)).save(Path("pets", name, f"{k}.png"))
    for part in ("train", "test"):
        Path("leaf", part).mkdir(parents=True)
        user = {"x": [[0.1, 0.2], [0.3, 0.4]], "y": [0, 1]}
        text = json.dumps({"users": ["u"], "num_samples": [2], "user_data": {"u": user}})
        Path("leaf", part, "a.json").write_text(text)
    found = {}
    for path in ("reviews.csv", "arrays.npz", "pets", "leaf"):
        done = call("init", path, "--out", f"{path}.toml", "--clients", "2", "--no-check")
        assert done.exit_code == 0, done.output
        found[path] = settings(f"{path}.toml")
    assert found["reviews.csv"]["data"]["name"] == "text_table" and found["reviews.csv"]["data"]["text"] == "review"
    assert found["reviews.csv"]["partition"] == {"name": "dirichlet", "clients": 2, "alpha": 0.5}
    assert found["arrays.npz"]["data"] == {"name": "npz", "file": "arrays.npz"}
    assert found["pets"]["data"]["name"] == "picture_folders" and found["pets"]["model"]["name"] == "cnn"
    assert found["leaf"]["data"] == {"name": "leaf", "folder": "leaf", "task": "features"}
    for path in found:
        assert call("check", f"{path}.toml", "--no-measure").exit_code == 0, path


def test_init_refuses_what_it_cannot_read_and_keeps_what_is_there(patients: Path) -> None:
    Path("empty").mkdir()
    Path("excel.csv").write_text("age;outcome\n1,5;ill\n")
    Path("wide.csv").write_text("age,outcome\n1,ill\n", encoding="utf-16")
    np.savez("named.npz", x=np.zeros((2, 3)), y=np.array(["ill", "well"]))
    for arguments, word in (
        (("excel.csv",), "sep=';'"),
        (("wide.csv",), "save it as UTF-8"),
        (("named.npz",), "np.unique(y, return_inverse=True)"),
        (("absent",), "absent was not found"),
        (("empty",), "nothing that is recognised"),
        (("patients.csv", "--label", "outcom"), "did you mean 'outcome'"),
        (("patients.csv", "--target", "words"), "classes, number"),
    ):
        done = call("init", *arguments)
        assert done.exit_code == 2 and word in done.stderr, done.output
    assert not Path("consilience.toml").exists()
    Path("consilience.toml").write_text("rounds = 7\n")
    assert "--force" in call("init", "patients.csv").stderr
    assert Path("consilience.toml").read_text() == "rounds = 7\n"


def test_a_terminal_is_asked_until_the_answer_fits(patients: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from consilience.commands import init

    answers = iter(["nonsense", "sex", "", "classes"])
    monkeypatch.setattr(init.typer, "prompt", lambda *_, **__: next(answers))
    assert init._asked("Column to predict", "outcome", ["age", "sex"]) == "sex"
    assert init._asked("Clients", "", ["", "age"]) == ""
    answers = iter(["hospitl", "none"])
    assert init._asked("Column that names the clients", "hospital", ["hospital", "age", ""]) == ""


def test_a_question_can_be_left(patients: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from consilience.commands import init

    def leave(question: str, default: str, allowed: object) -> str:
        raise init.typer.Abort

    monkeypatch.setattr(init, "_guessed", leave)
    done = call("init", "patients.csv")
    assert done.exit_code == 130 and done.stderr.split() == ["error:", "stopped;", "nothing", "was", "written"]
    assert not Path("consilience.toml").exists()


def test_dates_and_notes_are_left_out_and_said(patients: Path) -> None:
    table = [
        [*line, f"2024-{1 + k // 28:02d}-{1 + k % 28:02d}", f"note number {k}!"] for k, line in enumerate(rows(120))
    ]
    repeated = [*table, *table]  # so that neither column identifies a row
    write(patients / "visits.csv", [*HEAD, "seen", "note"], repeated)
    done = call("init", "visits.csv", "--no-check")
    assert done.exit_code == 0, done.output
    assert "left out: 'seen' holds dates ('2024-01-01' ...)" in done.stdout
    assert settings()["data"]["columns"] == ["key", "age", "sex", "note"]  # as many repeats as categories have
    write(patients / "visits.csv", [*HEAD, "seen", "note"], [*table, *table[:60]])
    done = call("init", "visits.csv", "--no-check", "--force")
    assert "left out: 'note' holds 120 different texts in 180 rows" in done.stdout
    assert settings()["data"]["columns"] == ["age", "sex"]


def test_a_terminal_gets_lines_broken_between_words_and_a_pipe_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from consilience.runs.failures import fitted

    text, stream = "consilience run a_config.toml shows which methods fit", io.StringIO()
    assert fitted(text, stream) == text
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert fitted(text, stream) == "consilience run a_config.toml\nshows which methods fit"


def test_a_closed_pipe_is_no_error() -> None:
    shown = f"{sys.executable} -m consilience check --no-measure | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.splitlines()[1] in ("0", "141")


def test_completion_scripts_are_there() -> None:
    asked = {"_CONSILIENCE_COMPLETE": "complete_bash", "COMP_WORDS": "consilience sh", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], env=asked, prog_name="consilience")
    assert done.stdout.split() == ["show", "show-algorithm"] and "--install-completion" in call("--help").stdout


@pytest.mark.parametrize(
    "problem, said, code",
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "out/.new.csv.tmp-123"),
            "out/new.csv cannot be read or written: No space left on device",
            4,
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/.q.tmp-6"),
            "/proc/q cannot be read or written: No such file or directory",
            4,
        ),
        (PermissionError(errno.EACCES, "Permission denied", "a.csv"), "a.csv cannot be read or written: Permission", 4),
        (FileNotFoundError("the file x.csv was not found"), "the file x.csv was not found", 2),
        (OSError("run/metrics.jsonl is torn"), "run/metrics.jsonl is torn", 4),
    ],
)
def test_errors_of_the_system_name_the_file_that_was_meant(problem: Exception, said: str, code: int) -> None:
    from consilience.runs.failures import explained

    text, found = explained(problem)
    assert text.startswith(said) and found == code and "Errno" not in text


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_options_of_a_command_given_as_settings(command: str) -> None:
    done = call(command, "algorithms=fedavg")
    assert done.exit_code == 2 and "algorithms is not a setting of a run: write --algorithms" in done.stderr
