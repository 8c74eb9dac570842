"""Every command in the documents is run, page by page, in an empty folder: cut to a round or two, or as printed.

Commands that need files of data run where $CONSILIENCE_DATA is set; blocks that cannot run anywhere say so in the page.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from documents import DOCS, FILES, ROOT, Command, all_commands
from typer.testing import CliRunner

from consilience import cli
from consilience.engines.vectorised import tuning

EMBEDDED = (
    *("digits", "breast_cancer", "diabetes", "synthetic", "shapes"),
    *("synthetic_labels", "synthetic_regression", "synthetic_text"),
)
TRAINING = ("run", "learn", "compare", "tune")
MADE_BY_MAKE = ("consilience", "run", "recipes/quickstart.toml")
DATA = os.environ.get("CONSILIENCE_DATA", "")
AS_PRINTED = [ROOT / "README.md", *sorted((DOCS / "tutorial").glob("*.md")), DOCS / "resume.md"]
SLOW = ("ray.md", "compare.md", "diagnose.md", "report.md", "reproductions.md", "choosing.md")  # they train for seconds


def page(file: Path) -> list[Command]:
    """The commands of a page, in order, but for those whose refusal it shows (`test_docs.py` tries those)."""
    return [command for command in all_commands() if command.block.file == file and not command.refused]


def needs_data(command: Command) -> bool:
    """Whether a command reads files that somebody has to have."""
    if command.words[0] == "python":
        return "--data" in command.words or "--data-dir" in command.words
    if command.words[1] not in TRAINING:
        return "data_dir=" in " ".join(command.words)
    name: object = "digits"
    path = path_in(command.words)
    if path is not None and (ROOT / path).exists():  # else it is one that the page's own commands write
        name = tomllib.loads((ROOT / path).read_text(encoding="utf-8")).get("data", name)
        name = name["name"] if isinstance(name, dict) else name
    for word in command.words[2:]:
        name = word.partition("=")[2] if re.match(r"(data|data\.name)=", word) else name
    return name not in EMBEDDED


def path_in(words: tuple[str, ...]) -> str | None:
    """The config file that a command names."""
    return next((word for word in words[2:] if word.endswith(".toml")), None)


def cut(words: tuple[str, ...]) -> list[str]:
    """The same command with less to do; what is said last wins."""
    more: list[str] = []
    name = words[1]
    if name in TRAINING:
        more = ["rounds=1", *([] if "engine.lane=" in " ".join(words) else ["engine.lane=serial"])]
        more.append("algorithm.epochs=0.1")  # of a pass
    if name == "resume":
        more = ["rounds=2"]
    if name == "learn":
        words = (*_without(words, "--iterations"), "--iterations", "1")
    if name == "compare":
        words = _without(words, "--seeds", "--target", "--jobs")
        more += ["--seeds", "0"]  # the statistics of several have their own tests
    if name == "diagnose":
        words = _without(words, "--rounds")
    if name == "tune":
        words = (*_without(words, "--trials", "--jobs"), "--trials", "1")
    return [*words, *more]


def _without(words: tuple[str, ...], *options: str) -> tuple[str, ...]:
    return tuple(
        word for before, word in zip(("", *words), words) if not ({before, word} & set(options))
    )  # the option and its value


def runs(command: Command, words: list[str]) -> str:
    """What a command prints, once it has ended well."""
    words = [f"data_dir={DATA}" if word.startswith("data_dir=") else word for word in words]
    if words[0] == "python":
        at = next((k for k, word in enumerate(words) if word in ("--data", "--data-dir")), None)
        if at is not None:
            words[at + 1] = DATA
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        found = subprocess.run(
            [sys.executable, *words[1:]], env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert found.returncode == 0, f"{command}: {found.stderr[-2000:]}"
        return found.stdout
    assert words[0] == "consilience"
    # wide: no line of a table is broken
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, words[1:])
    assert result.exit_code == 0, f"{command}: {' '.join(words)}\n{result.output[-2000:]}"
    return result.output


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader would be: recipes and examples are there, runs are not, but for that of `make run`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "TRIAL_SECONDS", 0.01)
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    before = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(before)


def pages(files: list[Path]) -> pytest.MarkDecorator:
    """A test for each page that has commands; slow are those of single methods, which train larger models, and SLOW."""
    is_slow = {file: "methods" in file.parts or file.name in SLOW for file in files}
    slow = {file: [pytest.mark.slow] if is_slow[file] else [] for file in files}
    found = [pytest.param(file, id=str(file.relative_to(ROOT)), marks=slow[file]) for file in files if page(file)]
    return pytest.mark.parametrize("file", found)


def test_a_shell_block_holds_commands_that_can_be_run() -> None:
    for command in all_commands():
        ours = command.words[0] == "consilience" or " ".join(command.words).startswith("python examples/")
        hint = f"{command}: write <!-- not run: why --> above the block, since nothing here runs {command.words[0]!r}"
        assert ours, hint
        if command.words[0] == "python":
            assert (ROOT / command.words[1]).is_file(), str(command)


@pytest.mark.usefixtures("untraced")
@pages(FILES)
def test_commands_run(file: Path, empty_folder: Path) -> None:
    """Those that need nothing from outside, cut short."""
    _make_run(file)
    for command in page(file):
        if not needs_data(command) and command.words[0] == "consilience":
            runs(command, cut(command.words))


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
@pages([file for file in FILES if any(map(needs_data, page(file)))])
def test_commands_run_on_files(file: Path, empty_folder: Path) -> None:
    """All commands of a page that has some that need files, cut short."""
    if not DATA:
        pytest.skip("CONSILIENCE_DATA is not set: the data of this page's commands are looked for there")
    for command in page(file):
        if command.words[0] == "consilience":
            runs(command, cut(command.words))


@pytest.mark.slow
@pages(AS_PRINTED)
def test_commands_run_as_printed(file: Path, empty_folder: Path) -> None:
    """Nothing cut, and what is shown below a command is what it prints, whatever the numbers are."""
    _make_run(file)
    for command in page(file):
        if needs_data(command) and not DATA:
            continue
        printed = {_shape(line) for line in runs(command, [*command.words]).splitlines()}
        for line in command.shown:
            if line.strip() not in ("", "..."):
                assert _shape(line) in printed, f"{command} does not print {line!r} but\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in all_commands() if c.words[0] == "python"], ids=str)
def test_scripts_run_as_printed(command: Command, empty_folder: Path) -> None:
    """Examples, whole."""
    if needs_data(command) and not DATA:
        pytest.skip("CONSILIENCE_DATA is not set: the example's data are looked for there")
    runs(command, [*command.words])


def _make_run(file: Path) -> None:
    """The page says `make run` before its commands: do what that does, in one round."""
    if "make run" in file.read_text(encoding="utf-8"):
        assert " ".join(MADE_BY_MAKE) in (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(BIN)/", "")
        result = CliRunner().invoke(cli.app, [*cut(MADE_BY_MAKE)[1:], "--quiet"])
        assert result.exit_code == 0, result.output


def _shape(line: str) -> str:
    """A line without its numbers and the width of its columns."""
    with contextlib.suppress(ValueError):
        line = line[: line.index("  #")] if "  #" in line else line
    return re.sub(r"[-\d.:,]*\d", "#", re.sub(r"\s+", " ", line.strip()))
