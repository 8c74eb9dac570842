"""Every renamed setting is refused with its new name, wherever it is written, and `migrate` rewrites it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from consilience import algorithms
from consilience.cli import app
from consilience.core import renamed
from consilience.core.settings import Invalid
from consilience.experiments.config import config
from consilience.experiments.config.migrate import migrate
from consilience.runs import toml_text

CASES: list[tuple[str, str, str]] = [  # an old setting by its key, its value, and its key now
    ("algorithm.home", '"head"', "algorithm.personal_layers"),
    ("algorithm.of", '"updates"', "algorithm.compare_on"),
    ("algorithm.prev", '"own"', "algorithm.previous_model"),
    ("algorithm.weighting={name='simprox'}.of", '"updates"', "algorithm.weighting.compare_on"),
    ("algorithm.weighting={name='simprox'}.prev", '"own"', "algorithm.weighting.previous_model"),
    ("algorithm.weighting={name='dual'}.first", '"examples"', "algorithm.weighting.first_stage"),
    ("algorithm.weighting={name='dual'}.of", '"updates"', "algorithm.weighting.compare_on"),
    ("algorithm.weighting={name='hierarchical'}.by", '"direction"', "algorithm.weighting.metric"),
    ("algorithm.weighting={name='schedule'}.beyond", '"last"', "algorithm.weighting.after_last"),
    ("algorithm.weighting={name='capped'}.client", "0.5", "algorithm.weighting.max_client"),
    ("algorithm.weighting={name='capped'}.group", "0.5", "algorithm.weighting.max_group"),
    ("algorithm.weighting={name='capped'}.near", "0.5", "algorithm.weighting.min_cosine"),
    ("algorithm.weighting={name='capped'}.otherwise", '"loosen"', "algorithm.weighting.if_infeasible"),
    ("algorithm.selection={name='by_loss', count=2}.by", '"total"', "algorithm.selection.proportional_to"),
    ("algorithm.selection={name='by_loss', count=2}.fresh", "false", "algorithm.selection.fresh_losses"),
    ("algorithm.channel={name='radio', fading='rayleigh'}.floor", "0.2", "algorithm.channel.min_gain"),
    ("algorithm=fedsiam_da.of", '"updates"', "algorithm.compare_on"),
    ("algorithm=fedsiam_da.first", '"examples"', "algorithm.first_stage"),
    ("algorithm=clustered_averaging.by", '"direction"', "algorithm.metric"),
    ("algorithm=hierarchical_averaging.by", '"direction"', "algorithm.metric"),
    ("algorithm=clustered_fl.most", "4", "algorithm.max_clusters"),
    ("algorithm.weighting={name='agreement'}.most", "4.0", "algorithm.weighting.max_weight"),
    ("algorithm=fedgen.noise", "16", "algorithm.noise_size"),
    ("limits.beyond", '"cap"', "limits.on_excess"),
    ("environment.first", "3", "environment.enough_replies"),
]
NAMES = [
    ("selection", "held", "fixed_for_rounds"),
    ("selection", "together", "pooled"),
    ("weighting", "vouched", "agreement"),
]


def table_of(key: str, value: str) -> tuple[dict[str, Any], list[str]]:
    """A config with the setting, and the path to it; `section={...}` and `section=name` say what the section is."""
    place, _, last = key.rpartition(".")
    path, _, inside = place.partition("=")
    steps = path.split(".")
    node = toml_text.value(path, inside) if inside else {}
    table: dict[str, Any] = {"name": node} if isinstance(node, str) else node
    table[last] = toml_text.value(last, value)
    for step in reversed(steps):
        table = {step: table}
    return table, [*steps, last]


def test_every_entry_of_the_table_has_a_case() -> None:
    covered = {(key.rpartition(".")[2], new.rpartition(".")[2]) for key, _, new in CASES}
    assert covered == {(old, new) for old, choices in renamed.OPTIONS.items() for new in choices}
    assert {old: new for _, old, new in NAMES} == renamed.PARTS


@pytest.mark.parametrize(("key", "value", "new"), CASES)
def test_an_old_key_is_refused_with_the_new_one(key: str, value: str, new: str) -> None:
    table, path = table_of(key, value)
    words = f"{'.'.join(path)} is now called {new.rpartition('.')[2]}"
    with pytest.raises(Invalid, match=words):
        config.from_table(table)
    without = toml_text.loads(toml_text.dumps(table))
    node = without
    for step in path[:-1]:
        node = node[step]
    del node[path[-1]]
    with pytest.raises(Invalid, match=words):
        config.from_table(without, [f"{'.'.join(path)}={value}"])
    if path[0] == "algorithm":
        given = dict(table["algorithm"])
        with pytest.raises(Invalid, match=words.removeprefix("algorithm")):
            algorithms.recipe(given.pop("name", "simprox"))(**given)


@pytest.mark.parametrize(("key", "value", "new"), CASES)
def test_migrate_rewrites_an_old_key(key: str, value: str, new: str) -> None:
    table, path = table_of(key, value)
    text = "# what this is\n" + toml_text.dumps(table) + "# the end\n"
    found, changes = migrate(text)
    assert [str(change) for change in changes] == [f"{'.'.join(path)} -> {new.rpartition('.')[2]}"]
    assert found.startswith("# what this is\n") and found.endswith("# the end\n")
    node = toml_text.loads(found)
    for step in new.split(".")[:-1]:
        node = node[step]
    assert node[new.rpartition(".")[2]] == toml_text.value("", value) and path[-1] not in node
    assert migrate(found) == (found, [])


@pytest.mark.parametrize(("kind", "old", "new"), NAMES)
def test_old_names_of_parts(kind: str, old: str, new: str) -> None:
    with pytest.raises(Invalid, match=f"algorithm.{kind} = '{old}' is now called '{new}'"):
        config.from_table({"algorithm": {"name": "fedavg", kind: old}})
    assert migrate(f'algorithm = {{name = "fedavg", {kind} = "{old}"}}')[0] == (
        f'algorithm = {{name = "fedavg", {kind} = "{new}"}}'
    )


OLD = """\
# of = "updates" stays as it is in a comment
rounds = 3            # few
runs = \"\"\"
of = 1\"\"\"
[algorithm]           # which
name = "simprox"
of = "updates"        # what is compared
"home" = 'head'
selection = {name = "held", inner = {name = "by-loss", fraction = 0.5, by = "loss"}, rounds = 2}

[limits]
beyond="cap"
max_examples = [ # not valid, but not our business
  10, ]
[compare]
seeds = [1, 2]
[[compare.methods]]
algorithm = "clustered_fl"
options.most = 4
options.home.name = "head"
options.home.layers = 2
[[compare.methods]]
algorithm = "fedsiam_da"
options = { of = ["weights", "updates"], first = "examples", weighting = [{name="dual", first="uniform"}, "uniform"] }
[compare.methods.settings.environment]
first = 2
[deploy]
clients = 4
"""
NEW = """\
# of = "updates" stays as it is in a comment
rounds = 3            # few
runs = \"\"\"
of = 1\"\"\"
[algorithm]           # which
name = "simprox"
compare_on = "updates"        # what is compared
personal_layers = 'head'
selection = {name = "fixed_for_rounds", inner = {name = "by-loss", fraction = 0.5, proportional_to = "loss"}, rounds = 2}

[limits]
on_excess="cap"
max_examples = [ # not valid, but not our business
  10, ]
[compare]
seeds = [1, 2]
[[compare.methods]]
algorithm = "clustered_fl"
options.max_clusters = 4
options.personal_layers.name = "head"
options.personal_layers.layers = 2
[[compare.methods]]
algorithm = "fedsiam_da"
options = { compare_on = ["weights", "updates"], first_stage = "examples", weighting = [{name="dual", first_stage="uniform"}, "uniform"] }
[compare.methods.settings.environment]
enough_replies = 2
[deploy]
clients = 4
"""  # noqa: E501


def test_an_old_value_is_refused_with_the_new_one_and_rewritten() -> None:
    assert renamed.VALUES == {"stand_in": "broadcast_model"}, "a case for every entry"
    with pytest.raises(Invalid, match=r"silent = 'stand_in' is now called 'broadcast_model' \(`consilience migrate`"):
        config.load(None, ["environment.silent=stand_in"])
    text, found = migrate('[environment]\nsilent = "stand_in"  # as in the paper\n')
    assert text == '[environment]\nsilent = "broadcast_model"  # as in the paper\n'
    assert [str(one) for one in found] == ["environment.silent = 'broadcast_model'"]


def test_comments_order_and_layout_stay(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_bytes(OLD.replace("\n", "\r\n", 1).encode())
    outcome = CliRunner().invoke(app, ["migrate", str(file)])
    assert outcome.exit_code == 0, outcome.output
    assert file.read_bytes() == NEW.replace("\n", "\r\n", 1).encode()
    assert "compare.methods.1.settings.environment.first -> enough_replies" in outcome.stdout
    again = CliRunner().invoke(app, ["migrate", str(file)])
    assert again.exit_code == 0 and "every name is up to date" in again.stdout


def test_a_file_that_cannot_be_rewritten_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "both.toml"
    text = '[algorithm]\nname = "simprox"\nof = "updates"\ncompare_on = "weights"\n'
    file.write_text(text)
    outcome = CliRunner().invoke(app, ["migrate", str(file)])
    assert outcome.exit_code == 2 and "change by hand: algorithm.of -> compare_on" in outcome.stderr
    assert file.read_text() == text


def test_every_recipe_in_the_repository_is_up_to_date() -> None:
    files = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
    assert len(files) > 5
    for file in files:
        assert migrate(file.read_text(encoding="utf-8"))[1] == [], file
