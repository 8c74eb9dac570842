"""A config is read, checked, written back and read again without loss; overrides mean what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Invalid
from consilience.data.partition import Dirichlet, Iid, Mixture
from consilience.experiments.config import catalogue, config
from consilience.experiments.config.catalogue import KINDS, engine_options, listing
from consilience.options import parts
from consilience.runs import toml_text
from consilience.selection import Everyone, SlidingWindow, Uniform
from consilience.server.protocols import Weighting

ROOT = Path(__file__).parents[2]


def refusal(*overrides: str, table: dict[str, Any] | None = None) -> str:
    with pytest.raises(Invalid) as caught:
        config.from_table(table or {}, overrides, source="a file")
    return str(caught.value)


def test_no_file_is_simprox_on_digits_over_twenty_dirichlet_clients() -> None:
    found = config.load()
    assert (found.algorithm.name, found.data.name, found.partition.name) == ("simprox", "digits", "dirichlet")
    assert found.partition.options["clients"] == 20 and found.partition.options["alpha"] == 0.5
    assert found.label == "simprox-digits"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm.selection={name='uniform', fraction=0.3}", "algorithm.batch_size=none", "threads=3", "name=mine"),
        ("partition={name='mixture', parts=[[0.25, {name='iid', clients=3}], [0.75, {name='natural', min_size=2}]]}",),
        ("environment=duw-4", "environment.dropout=0.1", "data=mnist", "model=cnn", "model.channels=[4, 8]"),
        ("algorithm=fedprox", "algorithm.mu=1e-05", "algorithm.weighting=simprox", "data_dir=/some/where else"),
        ("model=siamese", "model.backbone_options={width=8, stem='cifar'}", "engine.lane=serial", "loss=squared_error"),
        ("data=digits-domains", "data.train_per_style=none", "evaluation.every=0", "checkpoint.keep=5"),
        ('data_dir="quoted \\"name\\" \\\\ \\u00e9 \\n tab\\t"',),
    ],
)
def test_written_and_read_back_it_is_equal(overrides: tuple[str, ...]) -> None:
    first = config.load(None, overrides)
    again = config.from_table(toml_text.loads(first.toml()))
    assert again == first
    assert again.toml() == first.toml() and again.digest() == first.digest()


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("lr", 0.1, r"lr is a setting of \[algorithm\], not of the top of a config: write algorithm.lr=..."),
        ("learning_rate", 0.1, "write algorithm.lr=..."),
        ("alpha", 0.1, "write partition.alpha=..."),
        ("hidden", [8], "write model.hidden=..."),
        ("device", "cpu", "write engine.device=..."),
        ("num_rounds", 3, "it is called 'rounds' here"),
        ("loss", "mse", "loss = 'mse' is called 'squared_error' here"),
        ("threads", 9999, "threads = 9999 is out of range: it must be >= 1 and <= 1024"),
    ],
)
def test_a_setting_in_the_wrong_place_is_refused_with_its_section(key: str, value: Any, said: str) -> None:
    assert re.search(said, refusal(table={key: value}))


def test_files_of_other_editors_are_read_or_refused_by_name(tmp_path: Path) -> None:
    text = b'rounds = 5\r\n[data]\r\nname = "digits"\r\n'
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + text)
    assert config.load(tmp_path / "marked.toml").rounds == 5
    (tmp_path / "wide.toml").write_bytes(text.decode().encode("utf-16"))
    (tmp_path / "run.yaml").write_text("rounds: 5\n")
    for name, said in (("wide.toml", "not UTF-8 text: save it as UTF-8"), ("run.yaml", "no TOML file, which a config")):
        with pytest.raises(Invalid, match=said):
            config.load(tmp_path / name)


def test_what_is_written_holds_the_defaults_too() -> None:
    table = config.load(None, ["algorithm=fedprox"]).table()
    assert table["algorithm"]["mu"] == 0.1 and table["algorithm"]["momentum"] == 0.0
    assert table["partition"]["min_size"] == 0 and table["model"]["hidden"] == [128, 128]
    assert table["engine"]["dtype"] == "float32"


def test_an_override_beats_the_file_and_a_later_one_the_earlier(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('rounds = 5\n[algorithm]\nname = "fedprox"\nlr = 0.3\nselection = "everyone"\n')
    found = config.load(file, ["rounds=6", "rounds=7", "algorithm.selection={name='uniform', count=2}"])
    assert found.rounds == 7 and found.algorithm.options["lr"] == 0.3
    assert found.algorithm.options["selection"] == Uniform(count=2)


def test_values_are_toml_and_bare_words_are_text() -> None:
    found = config.load(None, ["algorithm.optimiser=adam", "algorithm.softmax=false", "seed=0x10", "data_dir=/a/b c"])
    assert found.algorithm.options["optimiser"] == "adam" and found.algorithm.options["softmax"] is False
    assert found.seed == 16 and found.data_dir == "/a/b c"
    assert config.load(None, ["data_dir=$HOME"]).data_dir == "$HOME"  # nothing is expanded


def test_an_empty_value_goes_back_to_the_default() -> None:
    table = {"rounds": 9, "algorithm": {"name": "fedprox", "mu": 3.0}}
    found = config.from_table(table, ["rounds=", "algorithm.mu="])
    assert found.rounds == config.load().rounds and found.algorithm.options["mu"] == 0.1


def test_default_options_follow_to_another_name_where_they_belong() -> None:
    assert config.load(None, ["partition=iid"]).partition.options == {"clients": 20}
    assert config.load(None, ["algorithm=fedavg"]).algorithm.options["epochs"] == 3.0
    assert config.load(None, ["data=synthetic", "partition=natural"]).partition.options == {"min_size": 0}


def test_options_of_another_name_in_the_file_are_refused_with_the_fix() -> None:
    table = {"algorithm": {"name": "fedprox", "mu": 0.5, "lr": 0.1}}
    message = refusal("algorithm=fedavg", table=table)
    assert "algorithm.mu = 0.5 in a file belongs to 'fedprox'" in message and "`algorithm.mu=`" in message
    found = config.from_table(table, ["algorithm=fedavg", "algorithm.mu="])
    assert found.algorithm.name == "fedavg" and found.algorithm.options["lr"] == 0.1


def test_part_options_alone_change_the_part_the_recipe_has() -> None:
    found = config.load(None, ["algorithm.selection.fraction=0.5"])
    assert found.algorithm.options["selection"] == SlidingWindow(fraction=0.5)
    assert "algorithm.selection.fraction" in refusal("algorithm=fedavg", "algorithm.selection.fraction=0.5")


@pytest.mark.parametrize(
    ("name", "weighting"),
    [
        ("uniform", "UniformWeights"),
        ("UniformWeights", "UniformWeights"),
        ("uniform_weights", "UniformWeights"),
        ("by-examples", "ByExamples"),
        ("simprox", "SimProxWeights"),
        ("sim_prox", "SimProxWeights"),
    ],
)
def test_parts_are_found_by_any_usual_spelling(name: str, weighting: str) -> None:
    assert type(parts.build("key", name, Weighting)).__name__ == weighting


def test_nested_partitions_are_built() -> None:
    inner = "[0.5, {name='iid', clients=2}], [0.5, {name='dirichlet', clients=3, alpha=1}]"
    text = f"partition={{name='mixture', parts=[{inner}]}}"
    chosen = config.load(None, [text]).partition
    built = KINDS["partition"].build(chosen.name, chosen.options)
    assert built == Mixture(parts=((0.5, Iid(clients=2)), (0.5, Dirichlet(clients=3, alpha=1.0))))
    assert "partition.parts[1][1].alpha" in refusal(text.replace("alpha=1", "alpha=-1"))


def test_the_algorithm_is_what_the_recipe_builds_from_python() -> None:
    from consilience.algorithms.fedprox import fedprox

    chosen = config.load(None, ["algorithm=fedprox", "algorithm.mu=0.7", "algorithm.selection=everyone"]).algorithm
    built = KINDS["algorithm"].build(chosen.name, chosen.options)
    assert built == fedprox(mu=0.7, lr=0.2, epochs=3, batch_size=16, selection=Everyone())


@recipe
def eager(**common: Unpack[Common]) -> Algorithm:
    """A recipe with a default of its own for an option that all recipes share."""
    common.setdefault("lr", 0.5)
    return averaged(**common)


def test_defaults_that_a_recipe_sets_itself_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the shared default down would change the algorithm."""
    monkeypatch.setattr(catalogue.algorithms, "names", lambda: ["eager"])
    monkeypatch.setattr(catalogue.algorithms, "recipe", lambda name: eager)
    filled = catalogue.with_defaults("algorithm", "eager", {})
    assert "lr" not in filled and filled["momentum"] == 0.0


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda file: file.name)
def test_every_recipe_is_valid(file: Path) -> None:
    found = config.load(file)
    assert config.from_table(toml_text.loads(found.toml())) == found


def test_the_catalogue_lists_every_kind_with_its_options() -> None:
    found = listing()
    assert {"algorithms", "datasets", "models", "partitions", "environments", "selections", "weightings"} <= set(found)
    names = {title: [entry.name for entry in entries] for title, entries in found.items()}
    assert {"fedavg", "fedprox", "simprox"} <= set(names["algorithms"])
    assert {"everyone", "sliding_window", "uniform"} <= set(names["selections"])
    simprox = next(entry for entry in found["algorithms"] if entry.name == "simprox")
    assert simprox.options["selection"].default == SlidingWindow(fraction=0.3)
    assert simprox.options["lr"].default == 0.01 and parts.describe(simprox.options["lr"].annotation) == "number > 0"
    duw = next(entry for entry in found["environments"] if entry.name == "duw_4")
    assert duw.options["silent"].default == "broadcast_model"


def test_every_engine_setting_is_an_option() -> None:
    assert {"device", "dtype", "lane", "clients_at_once"} <= set(engine_options())
    assert not {"task", "federation", "environment"} & set(engine_options())


plain_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), plain_values | st.dictionaries(st.text(), plain_values, max_size=3), max_size=4))
def test_whatever_is_written_as_toml_reads_back_equal(table: dict[str, Any]) -> None:
    assert toml_text.loads(toml_text.dumps(table)) == table


def test_text_that_is_no_unicode_is_not_written_as_toml() -> None:
    with pytest.raises(Invalid, match="note is not valid Unicode: TOML cannot hold it"):
        toml_text.dumps({"note": "half a pair: \ud800"})
