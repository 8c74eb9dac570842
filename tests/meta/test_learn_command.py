"""`consilience learn`: the command that it prints runs with the learned weights, for whatever they were learned for."""

from __future__ import annotations

import itertools
import json
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from consilience.cli import app
from consilience.experiments import learn, learn_file
from consilience.experiments.assembly import assemble
from consilience.meta import Schedule
from consilience.runs import toml_text
from consilience.server.averaging.weighting.transferred import FEATURES

SMALL = ["rounds=2", "model=logistic", "partition.clients=3", "engine.lane=serial", "algorithm.epochs=0.2"]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def learned(*arguments: str) -> Any:
    done = call("learn", *SMALL, *arguments, "--iterations", "1", "--lr", "0.01")
    assert done.exit_code == 0, done.output
    return done


def advised(done: Any, what: str = "use it: ") -> list[str]:
    """The words of the command after `use it:`, or after other words."""
    (line,) = [text for text in done.output.splitlines() if text.startswith(what)]
    words = shlex.split(line.removeprefix(what))
    assert words[0] == "consilience"
    return words[1:]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("duw_fedavg", []),
        ("duw_fednova", []),
        ("fedavg", []),
        ("fednova", []),
        ("fedprox", ["algorithm.mu=0.1"]),
        ("simfedswap", []),
        ("fedadam", []),
        ("feddyn", []),
        ("dr_fedavg", ["algorithm.q=2.0"]),
        ("simprox", ["algorithm.lambda_0=0.3"]),
        ("scaffold", ["algorithm.weighting.name=simprox", "algorithm.weighting.lambda_0=0.3"]),
    ],
)
def test_the_advice_runs_and_uses_the_weights(name: str, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    done = learned(f"algorithm={name}", *options, "--out", str(out))
    words = advised(done)
    assert words[0] == "run" and f"algorithm={name}" in words
    ran = call(*words, "--folder", str(tmp_path / "run"), "--quiet")
    assert ran.exit_code == 0, ran.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = Schedule.load(out).weights.tolist()
    assert len(rows) == 2
    for row in rows:
        there = [expected[row["round"] - 1][client] for client in row["cohort"]]
        assert row["weights"] == pytest.approx([weight / sum(there) for weight in there], rel=1e-6)
    saved = toml_text.read(tmp_path / "run" / "config.toml")["algorithm"]
    assert saved["name"] == name


def test_nothing_is_learned_where_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "rule.json").write_text("{}")
    files = ["--out", str(tmp_path / "w.safetensors"), "--rule", str(tmp_path / "rule.json")]
    done = call("learn", *SMALL, *files, "--iterations", "1")
    assert done.exit_code == 2 and "rule.json is there already" in done.output
    assert not (tmp_path / "w.safetensors").exists()


def test_a_rule_for_other_clients_and_rounds(tmp_path: Path) -> None:
    rule = tmp_path / "rule.json"
    done = learned("algorithm=duw_fedavg", "--out", str(tmp_path / "w.safetensors"), "--rule", str(rule))
    assert "nats from the learned ones" in done.output
    assert advised(done, "use the rule: ")[-2:] == ["algorithm=duw_fedavg", f"algorithm.rule={rule}"]
    other = ["rounds=3", "model=logistic", "partition.clients=6", "engine.lane=serial", "algorithm.epochs=0.2"]
    settings = ["algorithm=duw_fedavg", f"algorithm.rule={rule}", "algorithm.rule_rounds=3"]
    ran = call("run", *other, *settings, "--folder", str(tmp_path / "run"), "--quiet")
    assert ran.exit_code == 0, ran.output
    held = json.loads(rule.read_text())
    assert held["clients"] == 3 and held["rounds"] == 2 and held["divergence"] <= held["divergence_by_examples"]


@pytest.mark.parametrize(
    ("name", "options", "features"),
    [
        ("fedavg", [], ""),
        ("duw_fednova", [], ""),
        ("fednova", [], "size,loss"),
        ("fedprox", ["algorithm.mu=0.1"], ""),
        ("scaffold", ["algorithm.weighting.name=simprox", "algorithm.weighting.lambda_0=0.3"], "arrival"),
        ("dr_fedavg", ["algorithm.q=2.0"], ""),
    ],
)
def test_the_advice_for_a_rule_runs_with_more_clients(
    name: str, options: list[str], features: str, tmp_path: Path
) -> None:
    rule = tmp_path / "rule.json"
    files = ["--out", str(tmp_path / "w.safetensors"), "--rule", str(rule), "--features", features]
    words = advised(learned(f"algorithm={name}", *options, *files), "use the rule: ")
    ran = call(*words, "partition.clients=6", "--folder", str(tmp_path / "run"), "--quiet")
    assert ran.exit_code == 0, ran.output
    saved = toml_text.read(tmp_path / "run" / "config.toml")["algorithm"]
    assert saved["name"] == ("duw_fedavg" if name == "fedavg" else name)
    held = json.loads(rule.read_text())["features"]
    assert held == (features.split(",") if features else [*FEATURES][: 6 if name == "fedavg" else 5])


def test_features_that_a_rule_cannot_read_are_refused_before_learning(tmp_path: Path) -> None:
    files = ["--out", str(tmp_path / "w.safetensors"), "--rule", str(tmp_path / "rule.json")]
    done = call("learn", *SMALL, "algorithm=fedprox", *files, "--features", "size,label_entropy")
    assert done.exit_code == 2 and "'label_entropy' is not a feature; known for fedprox: size, steps" in done.output
    done = call("learn", *SMALL, *files[:2], "--features", "size")
    assert done.exit_code == 2 and "--features has no effect without --rule" in done.output
    assert not (tmp_path / "w.safetensors").exists()


def test_first_weights_by_name_and_from_a_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    options = ["algorithm=simprox", "algorithm.selection=everyone", "--loss", "squared_error"]
    learned(*options, "--initial", "own", "--out", str(first), "--results", str(tmp_path / "results.json"))
    learned("--initial", str(first), "--out", str(second))
    moved = (Schedule.load(first).weights - Schedule.load(second).weights).abs().max()
    assert 0 < float(moved) < 0.05  # one step of Adam
    (row,) = json.loads((tmp_path / "results.json").read_text())
    assert row["algorithm"] == "simprox" and row["rounds"] == 2 and row["iterations"] == 1
    wrong = call("learn", *SMALL, "--initial", "similar", "--out", str(tmp_path / "x.safetensors"))
    assert wrong.exit_code == 2 and "initial = 'similar' is not one of" in wrong.output


def test_the_study_of_variance(tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    done = learned("--variance", "3,1", "--out", str(out), "--results", str(tmp_path / "results.json"))
    lines = done.output.splitlines()
    at = lines.index("rounds  mean variance  1/sqrt(T)")
    assert [line.split()[0] for line in lines[at + 1 : at + 3]] == ["1", "3"]
    assert [row["rounds"] for row in json.loads((tmp_path / "results.json").read_text())] == [1, 3]
    assert Schedule.load(tmp_path / "w_3.safetensors").weights.shape == (3, 3)
    wrong = call("learn", *SMALL, "--variance", "2,x", "--out", str(out))
    assert wrong.exit_code == 2 and "is not a list of numbers of rounds" in wrong.output


def test_rounds_that_only_swap_are_noted(tmp_path: Path) -> None:
    done = learned("algorithm=fedswap", "--out", str(tmp_path / "w.safetensors"))
    assert "note: round 1: no loss depends on these weights" in done.output


def test_learning_goes_on_exactly_after_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = tmp_path / "whole.safetensors", tmp_path / "part.safetensors"
    common = [*SMALL, "algorithm=scaffold", "--iterations", "4", "--lr", "0.05"]
    assert call("learn", *common, "--out", str(whole)).exit_code == 0

    class Signal:
        """Asks to stop once two iterations are done."""

        asked = property(lambda self: 2 if next(self.looked) == 2 else 0)

        def __init__(self) -> None:
            self.looked = itertools.count(1)

        def __enter__(self) -> Signal:
            return self

        def __exit__(self, *problem: object) -> None:
            pass

    with monkeypatch.context() as patched:
        patched.setattr(learn_file, "Interrupts", Signal)
        stopped = call("learn", *common, "--out", str(part))
    assert stopped.exit_code == 130 and "stopped after run 2" in stopped.output and "--resume" in stopped.output
    assert len(Schedule.load(part).losses) == 2
    rest = call("learn", *common, "--out", str(part), "--resume")
    assert rest.exit_code == 0 and "run 3/4" in rest.output and "run 2/4" not in rest.output, rest.output
    assert part.read_bytes() == whole.read_bytes()
    assert call("learn", *common, "--out", str(part), "--resume").exit_code == 0  # nothing is left to do
    assert part.read_bytes() == whole.read_bytes()


def test_learning_goes_on_in_the_lane_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = [*SMALL, "engine.lane=auto", "--lr", "0.05", "--out", str(tmp_path / "w.safetensors")]
    assert call("learn", *common, "--iterations", "1").exit_code == 0
    lane = learn_file.read(tmp_path / "w.safetensors").facts["engine"]["lane"]
    seen: list[Any] = []
    monkeypatch.setattr(learn, "assemble", lambda config: seen.append(config.engine["lane"]) or assemble(config))
    done = call("learn", *common, "--iterations", "2", "--resume")
    assert done.exit_code == 0 and lane != "auto" and seen == [lane], done.output


def test_iterations_are_added_and_changes_refused(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "w.safetensors")]
    learned(*out)
    again = call("learn", *SMALL, *out, "--iterations", "1", "--lr", "0.01")
    assert again.exit_code == 2 and "--resume" in again.output
    more = call("learn", *SMALL, *out, "--iterations", "3", "--lr", "0.01", "--resume")
    assert more.exit_code == 0, more.output
    assert len(Schedule.load(tmp_path / "w.safetensors").losses) == 3
    for changed, words in (
        (["algorithm.lr=0.3"], "algorithm.lr: 0.2 -> 0.3"),
        (["--constraint", "softmax"], "learn.constraint: 'square' -> 'softmax'"),
        (["data.seed=3"], "data.seed"),
    ):
        refused = call("learn", *SMALL, "--lr", "0.01", *changed, *out, "--iterations", "5", "--resume")
        assert refused.exit_code == 2 and words in refused.output, refused.output
    absent = call("learn", *SMALL, "--out", str(tmp_path / "none.safetensors"), "--resume")
    assert absent.exit_code == 2 and "there is no schedule" in absent.output
    Schedule.load(tmp_path / "w.safetensors").save(tmp_path / "bare.safetensors")
    bare = call("learn", *SMALL, "--out", str(tmp_path / "bare.safetensors"), "--resume")
    assert bare.exit_code == 2 and "no state to continue from" in bare.output


def test_rows_of_the_environments_replace_the_same_measurement_only(tmp_path: Path) -> None:
    """What examples/duw_environment.py writes to `--results`."""
    path = Path(__file__).parents[2] / "examples" / "duw_environment.py"
    store = runpy.run_path(str(path))["store"]
    file = tmp_path / "results" / "duw_4.json"
    duw = {"environment": 4, "start": 0, "algorithm": "duw_fedavg", "iterations": 1000, "lr": 0.001, "accuracy": [0.5]}
    store([{"environment": 4, "start": 0, "algorithm": "fedavg", "accuracy": [0.3]}, duw], file)
    store([{**duw, "iterations": 40, "lr": 0.01, "accuracy": [0.4]}, {**duw, "start": 1}], file)
    store([{**duw, "accuracy": [0.6]}], file)
    found = [(row["start"], row["algorithm"], row["accuracy"]) for row in json.loads(file.read_text())]
    assert sorted(found) == [
        (0, "duw_fedavg", [0.4]),
        (0, "duw_fedavg", [0.6]),
        (0, "fedavg", [0.3]),
        (1, "duw_fedavg", [0.5]),
    ]


def test_settings_of_learning_stand_in_the_config_and_options_come_first(tmp_path: Path) -> None:
    """The table [learn], `learn.KEY=VALUE` and options give the same file; other commands do not read the table."""
    run = "rounds = 2\nmodel = 'logistic'\n[partition]\nclients = 3\n[engine]\nlane = 'serial'\n"
    run += "[algorithm]\nepochs = 0.2\n"
    config = tmp_path / "run.toml"
    config.write_text(run + "[learn]\niterations = 2\nlr = 0.01\nloss = 'squared_error'\nconstraint = 'softmax'\n")
    plain = tmp_path / "plain.toml"
    plain.write_text(run)
    ways = {
        "table": [str(config)],
        "keys": [str(plain), *(f"learn.{key}" for key in ("iterations=2", "lr=0.01", "loss=squared_error"))],
        "options": [str(config), "learn.loss=task", "--loss", "squared_error", "--constraint", "softmax"],
    }
    ways["keys"].append("learn.constraint=softmax")
    found = {}
    for way, arguments in ways.items():
        done = call("learn", *arguments, "--out", str(tmp_path / way))
        assert done.exit_code == 0, done.output
        assert "learn." not in " ".join(advised(done))
        found[way] = Schedule.load(tmp_path / way)
    assert len(found["table"].losses) == 2
    for other in ("keys", "options"):
        assert found[other].weights.equal(found["table"].weights) and found[other].losses.equal(found["table"].losses)
    usual = call("learn", str(plain), "learn.iterations=2", "learn.lr=0.01", "--out", str(tmp_path / "usual"))
    assert usual.exit_code == 0
    assert not Schedule.load(tmp_path / "usual").weights.equal(found["table"].weights)
    ran = call("run", str(config), f"runs={tmp_path}")
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("learn.los=task", "learn.los is not a setting (did you mean 'loss'?)"),
        ("learn.loss=mse", "learn.loss = 'mse' is not one of task, squared_error"),
        ("learn.iterations=0", "learn.iterations = 0 is out of range"),
        ("learn.lr=0", "learn.lr = 0"),
        ("learn=5", "learn = 5 must be a table"),
    ],
)
def test_wrong_settings_of_learning_are_refused_by_name(given: str, said: str, tmp_path: Path) -> None:
    done = call("learn", *SMALL, given, "--out", str(tmp_path / "none"))
    assert done.exit_code == 2 and said in done.output, done.output
    assert not (tmp_path / "none").exists()
