"""The documents cannot go stale: their code runs, their configs load, their commands parse, nothing is left out."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from documents import DOCS, FILES, MARK, ROOT, Block, Command, all_commands, blocks, of_kind
from typer.testing import CliRunner

import consilience as cs
from consilience import cli
from consilience.commands import listing
from consilience.commands.arguments import split
from consilience.compare import plan
from consilience.engines.vectorised import tuning
from consilience.experiments.assembly import assemble
from consilience.experiments.config import catalogue, config
from consilience.runs import identity

COMMANDS = typer.main.get_command(cli.app)


def everything() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in FILES)


@pytest.fixture
def same_threads() -> Iterator[None]:
    """A config may set the number of threads for the whole process: put it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Ray starts; the accountant composes; every public name is used; models train for seconds
SLOW = ("ray.md", "privacy.md", "names.md", "python.md", "3_heterogeneous_clients.md", "5_transformer.md")
DOCUMENTS = [
    pytest.param(file, id=str(file.relative_to(ROOT)), marks=[pytest.mark.slow] if file.name in SLOW else [])
    for file in FILES
]


@pytest.mark.usefixtures("untraced", "same_threads")
@pytest.mark.parametrize("file", DOCUMENTS)
def test_python_runs_and_prints_what_is_shown(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document is one namespace; a `text` block directly below a Python block is what that one prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "TRIAL_SECONDS", 0.01)
    names: dict[str, Any] = {"__name__": "document"}
    printed: str | None = ""  # None: by a block that was not run
    for block in blocks(file):
        if block.kind == "python" and not block.not_run:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                exec(compile("\n" * block.line + block.text, str(file), "exec", dont_inherit=True), names)
            printed = out.getvalue()
        elif block.kind == "python":
            printed = None
        elif block.kind == "text" and block.follows and printed is not None:
            assert printed == block.text, f"{block}: it prints\n{printed}"


@pytest.mark.parametrize("block", of_kind("toml"), ids=str)
def test_configs_load(block: Block, tmp_path: Path) -> None:
    """As files, since a file may hold a comparison as well."""
    path = tmp_path / "config.toml"
    path.write_text(block.text, encoding="utf-8")
    config.load(path, [])
    if "compare" in tomllib.loads(block.text):
        options = {"algorithms": [], "grids": [], "seeds": [], "baseline": "", "target": None, "metric": ""}
        assert plan.plan(str(path), [], folder=tmp_path / "out", **options).cells


@pytest.mark.parametrize(
    "command", [command for command in all_commands() if command.words[0] == "consilience"], ids=str
)
def test_commands_parse(command: Command) -> None:
    """Subcommand and options exist; what `run` is given is a valid config, unless the document shows its refusal."""
    name, found, rest = COMMANDS.resolve_command(typer.Context(COMMANDS), [*command.words[1:]])  # type: ignore[attr-defined]
    context = found.make_context(name, rest)
    if name == "run":
        path, overrides = split(context.params["arguments"] or [])
        if any(text.startswith(("algorithm.schedule=", "algorithm.rule=")) for text in overrides):
            return  # a file that the command above it writes
        with pytest.raises(ValueError) if command.refused else contextlib.nullcontext():
            settings = config.load(ROOT / path if path else None, overrides)
            if command.refused:  # not a setting alone: what the settings make together
                assemble(settings)
    elif name == "list":
        catalogue.narrowed(listing.everything(), context.params["what"] or [])


def test_refusals_are_printed_as_shown() -> None:
    """In a console block, an `error:` line is what the command above it says."""
    refused = [command for command in all_commands() if command.refused]
    for command in refused:
        found = CliRunner().invoke(cli.app, [*command.words[1:]])
        assert found.exit_code == 2 and found.stderr.splitlines() == [command.shown[0]], (str(command), found.stderr)
    assert len(refused) >= 3


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    """Python, configs and commands are run; `text` and plain blocks are shown; `{...}` is the site's own business."""
    wrong = []
    for file in FILES:
        for block in blocks(file):
            known = block.kind in ("python", "toml", "bash", "console", "text", "") or block.kind.startswith("{")
            if not (known or block.not_run):
                wrong.append(f"{block}: nothing checks a block of the kind {block.kind!r}")
        lines = file.read_text(encoding="utf-8").splitlines()
        marks = [mark[1] for mark in map(MARK.fullmatch, lines) if mark]
        if len(marks) != sum(block.not_run in marks for block in blocks(file)):
            wrong.append(f"{file.name}: a mark without a block")
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("untraced", "same_threads")
def test_a_session_as_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's commands in their order, on a smaller model."""
    monkeypatch.chdir(tmp_path)
    small = ("rounds=2", "model.hidden=[8]", "algorithm.epochs=1", "engine.lane=serial", "--quiet")
    session = (
        ("run", str(ROOT / "recipes" / "quickstart.toml"), *small),
        ("show", "runs/quickstart"),
        ("eval", "runs/quickstart"),
        ("resume", "runs/quickstart", "rounds=3", "--quiet"),
        ("show",),
        ("list", "simprox"),
    )
    for arguments in session:
        found = CliRunner().invoke(cli.app, list(arguments))
        assert found.exit_code == 0, (arguments, found.output)
    assert len((tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()) == 3
    everywhere = r"^\| `([\w.]+)` \| (?!in \[deployments\])"
    for file in re.findall(everywhere, _section("docs/experiments.md", "## The run folder"), re.M):
        assert (tmp_path / "runs" / "quickstart" / file).exists(), f"docs/experiments.md names {file}"


def test_everything_in_the_catalogue_is_mentioned() -> None:
    text = everything()
    for kind, entries in catalogue.listing().items():
        missing = [entry.name for entry in entries if f"`{entry.name}`" not in text and kind != "engines"]
        assert not missing, f"{kind} not in any document: {', '.join(missing)}"


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        *(("algorithms", "algorithms"), ("datasets", "data"), ("partitions", "data"), ("environments", "data")),
        *(("models", "data"), ("selections", "algorithms"), ("weightings", "algorithms"), ("engines", "experiments")),
    ],
)
def test_every_option_is_mentioned(kind: str, document: str) -> None:
    text = (DOCS / f"{document}.md").read_text(encoding="utf-8")
    options = {key for entry in catalogue.listing()[kind] for key in entry.options}
    missing = sorted(key for key in options if f"`{key}`" not in text and f"`engine.{key}`" not in text)
    assert not missing, f"options of {kind} not in docs/{document}.md: {', '.join(missing)}"


def test_every_setting_and_every_metric_is_mentioned() -> None:
    text = (DOCS / "experiments.md").read_text(encoding="utf-8")
    table = config.load(None, ["threads=1", "data_dir=data", "name=x"]).table()
    keys = {key for key, value in table.items() if not isinstance(value, dict)}
    sections = {**config.FIXED, "task": config.TaskSettings}
    keys |= {f"{section}.{each.name}" for section, kind in sections.items() for each in dataclasses.fields(kind)}
    missing = sorted(key for key in (*keys, *identity.HARMLESS, *_rows_of_metrics()) if f"`{key}`" not in text)
    assert not missing, missing


def test_every_public_name_has_an_entry_and_an_example_in_the_reference() -> None:
    page = DOCS / "api" / "names.md"
    entries = set(re.findall(r"^\.\. auto\w+:: (?:[\w.]+\.)?(\w+)$", page.read_text(encoding="utf-8"), re.M))
    code = "\n".join(block.text for block in blocks(page) if block.kind == "python")
    used = set(re.findall(r"\bcs\.(\w+)", code))
    assert set(cs.__all__) <= entries, f"without an entry: {set(cs.__all__) - entries}"
    assert set(cs.__all__) <= used, f"without an example: {set(cs.__all__) - used}"


def test_what_is_referred_to_exists() -> None:
    """Links, source files and tests, the tests by function name too."""
    wrong = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        wrong += [f"{file.name} links to {target}" for target in links if not (file.parent / target).exists()]
        named = re.findall(r"`((?:consilience|tests|recipes|examples|benchmarks)/[\w/.]+)", text)
        wrong += [f"{file.name} names {path}" for path in named if not (ROOT / path.split("::")[0]).exists()]
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
            if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8"):
                wrong.append(f"{file.name}: {path} has no {name}")
    assert not wrong, "not there:\n" + "\n".join(wrong)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 100


def _section(document: str, heading: str) -> str:
    _, _, rest = (ROOT / document).read_text(encoding="utf-8").partition(heading + "\n")
    return rest.partition("\n#")[0]


def _rows_of_metrics() -> set[str]:
    """The fields of a metrics row: of a classification, and of a regression."""
    fields: set[str] = set()
    for y in (torch.tensor([0, 1, 0, 1]), torch.tensor([0.0, 1.0, 0.5, 0.2])):
        x = torch.arange(8.0).reshape(4, 2)
        federation = cs.Federation.from_clients([(x, y)], client_tests=[(x, y)])
        module = torch.nn.Linear(2, 2 if federation.classes else 1)
        fields |= set(cs.train(module, federation, cs.fedavg(), rounds=1, progress=False, lane="serial").history[0])
    return fields
