"""`consilience list` and `show-algorithm`: a line each in 80 columns, searched by word, with examples that run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import shlex

import pytest
from typer.testing import CliRunner, Result

from consilience import algorithms
from consilience.cli import app
from consilience.commands import listing, show_algorithm
from consilience.experiments.assembly import assemble
from consilience.experiments.config import catalogue, config
from consilience.experiments.config.families import FAMILIES, OTHERS, by_family


def call(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def test_the_whole_list_has_one_line_for_each_name_and_fits_a_terminal() -> None:
    lines = call("list", "all").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    found = listing.everything()
    for title, entries in found.items():
        at = lines.index(f"{title} ({len(entries)})")
        if title == "algorithms":
            titles = [line.strip() for line in lines if line.startswith("  ") and line.strip() in FAMILIES]
            assert titles == list(FAMILIES)
            entries = [next(e for e in entries if e.name == name) for family in FAMILIES.values() for name in family]
        own = [line for line in lines[at + 1 :] if line.strip() not in FAMILIES][: len(entries)]
        assert [line.split()[0] for line in own] == [entry.name for entry in entries]
    assert sum(map(len, lines)) < 30_000  # it was 200 kB with every option of every algorithm


def test_the_short_list_has_every_name_once_on_two_screens() -> None:
    lines = call("list").stdout.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 80
    text = " ".join(" ".join(lines).split())
    for title, entries in catalogue.listing().items():
        names = [entry.name for entry in entries]
        assert f"{title} ({len(names)})" in text
        assert title == "algorithms" or f"{title} ({len(names)}): {', '.join(names)}" in text, title
    for family, names in FAMILIES.items():
        assert f"{family}: {', '.join(names)}" in text, family
    top, *sections = listing.everything()["settings"]
    assert f"top: {', '.join(top.options)} sections: {', '.join(entry.name for entry in sections)}" in text


def test_settings_that_no_name_determines_are_those_of_a_config() -> None:
    (top, *sections) = listing.everything()["settings"]
    table = config.load(None, ["name=a", "threads=1", "data_dir=d", "log=csv", "validation.share=0.1"]).table()
    assert {key for key, value in table.items() if not isinstance(value, dict)} <= top.options.keys()
    for entry in sections:
        assert set(table.get(entry.name, {})) <= entry.options.keys()
    shown = call("list", "evaluation").stdout
    assert "every: whole number >= 0 (default 1)" in shown and "client_sample" in shown
    for word, place in (("lr", "options"), ("rounds", "top"), ("patience", "validation"), ("lambda_0", "simprox")):
        assert f"`consilience list {place}` shows it" in call("list", word).stderr


def test_the_version_is_that_of_the_package() -> None:
    assert call("--version").stdout.split() == ["consilience", importlib.metadata.version("consilience")]


def test_every_algorithm_is_in_one_family() -> None:
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(algorithms.names())
    assert by_family(["fedavg", "mine"]) == {"baselines": ["fedavg"], OTHERS: ["mine"]}


def test_a_name_shows_its_own_options_and_names_the_shared_ones() -> None:
    shown = call("list", "simprox").stdout
    assert "lambda_0: number >= 0 and <= 1 (default 0.7)" in shown and "sliding_window with fraction = 0.3" in shown
    assert "batch_size: " not in shown and "shared options: accumulate, augment, batch_size" in shown
    assert "step: number > 0 (must be given)" in call("list", "fedsplit").stdout  # bears the name of a shared one
    assert 'schedule: text (default "")' in call("list", "duw_fedavg").stdout
    shared = call("list", "options").stdout
    assert shared.count("batch_size: whole number >= 1 or none (default 32)") == 1 and "afl" not in shared
    assert "hidden: list of whole number >= 1" in call("list", "mlp").stdout


@pytest.mark.parametrize(("word", "title"), [("data", "datasets"), ("model", "models"), ("channels", "channels")])
def test_kinds_may_be_named_as_people_do(word: str, title: str) -> None:
    assert call("list", word).stdout.startswith(f"{title} (")


def test_search_looks_at_names_descriptions_and_own_options() -> None:
    found = call("list", "--search", "similarity").stdout
    assert "  simprox " in found and "  fedavg " not in found
    assert "krum" in call("list", "algorithms", "--search", "NEIGHBOURS").stdout
    lost = call("list", "--search", "zebra")
    assert lost.exit_code == 2 and "zebra" in lost.stderr


def test_show_algorithm_tells_equation_options_cost_and_results() -> None:
    shown = call("show-algorithm", "scaffold").stdout
    assert max(map(len, shown.splitlines())) <= 80
    for text in ("paper: Karimireddy et al. 2020", "equation: y_i <-", "use when:", "not when:", "shared:"):
        assert text in shown, text
    # SCAFFOLD sends a control variate along with the model both ways, and keeps one on each client
    assert "receives 2 models and sends 2 models" in shown and "a client keeps 1 model" in shown
    assert "banking77: global" in shown
    other = call("show-algorithm", "fedit", "--no-measure").stdout
    assert "none stored" in other and "\ncost: " in other
    wrong = call("show-algorithm", "scafold")
    assert wrong.exit_code == 2 and "did you mean 'scaffold'" in wrong.stderr


@pytest.mark.parametrize("name", algorithms.names())
def test_every_example_is_a_run_that_can_start(name: str) -> None:
    words = shlex.split(show_algorithm.command(name))
    assert words[:2] == ["consilience", "run"]
    settings = config.load(None, [*words[2:], "threads=1"])
    with contextlib.closing(assemble(settings)) as simulation:
        simulation.algorithm.server.init(simulation.engine.start(), len(simulation.federation))
    options = show_algorithm.python(name).partition(f"cs.{name}(")[2].removesuffix("))")
    assert eval(f"dict({options})")["lr"] == 0.1


def test_help_has_no_escapes_and_shells_complete_names() -> None:
    for words in (("compare",), ("deploy", "up"), ()):
        shown = call(*words, "--help").stdout
        assert "Usage: " in shown and "\\" not in shown
    assert "[default: 1; x>=1]" in " ".join(call("compare", "--help").stdout.split())
    for command in ("show-algorithm", "list"):
        asked = {
            "_CONSILIENCE_COMPLETE": "complete_bash",
            "COMP_WORDS": f"consilience {command} simp",
            "COMP_CWORD": "2",
        }
        found = CliRunner().invoke(app, [], prog_name="consilience", env=asked)
        assert found.stdout.split() == ["simprox", "simprox_buffered"]
