"""The command `consilience init`: looks at the user's files, writes a commented config and checks it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from consilience.commands.help_text import algorithm_names
from consilience.runs.failures import fitted, guarded

if TYPE_CHECKING:
    from consilience.commands.files_found import FileSettings


def init(
    path: Annotated[Path, typer.Argument(help="Your data: a table, an .npz, or a folder; see docs/command_line.md.")],
    out: Annotated[Path, typer.Option(help="The config to write.")] = Path("consilience.toml"),
    label: Annotated[str, typer.Option(help="The column to predict.")] = "",
    client: Annotated[str | None, typer.Option(help="The column that names the clients; '' for none.")] = None,
    target: Annotated[str, typer.Option(help="Kind of the column to predict: classes or number.")] = "",
    test: Annotated[str, typer.Option(help="A second table with the test rows, beside the first.")] = "",
    clients: Annotated[int, typer.Option(min=1, help="Clients to spread rows over, where no column names them.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = 20,
    algorithm: Annotated[str, typer.Option(help="The method.", autocompletion=algorithm_names)] = "fedavg",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take what was guessed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a config that is there.")] = False,
    check: Annotated[bool, typer.Option(help="Check the config by reading the data and timing a few steps.")] = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Look at your files, write a commented config for them, and check it.

    Without a terminal nothing is asked; every answer is an option, too.
    """

    def work() -> int:
        from consilience.commands.files_found import GivenSettings, look
        from consilience.core.settings import Invalid
        from consilience.experiments.config import config
        from consilience.runs.disk import make_folder, replace_file

        if path.exists() and out.exists() and not force:  # missing data are reported first
            raise Invalid(f"{out} is there already: --force replaces it, --out names another file")
        if target not in ("", "classes", "number"):
            raise Invalid(f"--target {target!r} is not one of classes, number")
        asks = not yes and sys.stdin.isatty() and sys.stdout.isatty()
        found = look(
            path, GivenSettings(label=label, client=client, target=target, test=test), _asked if asks else _guessed
        )
        for line in found.said:
            print(fitted(line, sys.stdout))
        text = config_text(found, clients=clients, rounds=rounds, algorithm=algorithm)
        make_folder(out.parent)
        replace_file(out, text.encode())
        print(f"written: {out}")
        settings = config.load(out)
        if check:
            _check(settings)
        print(
            fitted(f"next: consilience run {out}, or consilience diagnose {out} to see which methods fit", sys.stdout)
        )
        return 0

    guarded(work, debug)


def _check(settings: Any) -> None:
    import contextlib

    from consilience.commands.check import checked, lines
    from consilience.experiments.assembly import assemble

    print()
    with contextlib.closing(assemble(settings)) as simulation:
        for line in lines(checked(settings, simulation, measure=True)):
            print(line)
    print()


def _guessed(question: str, default: str, allowed: Sequence[str]) -> str:
    print(f"{question}: {default or 'none'}")
    return default


def _asked(question: str, default: str, allowed: Sequence[str]) -> str:
    """Ask until the answer is one of those allowed."""
    from consilience.core.settings import nearest

    shown = [answer for answer in allowed if answer]
    if len(shown) > 2:
        print(
            fitted(f"({', '.join(shown)})", sys.stdout)
        )  # on lines of its own: a terminal breaks a prompt within words
    hint = f" ({', '.join(shown)})" if len(shown) == 2 else ""
    while True:
        answer = str(typer.prompt(f"{question}{hint}", default=default, show_default=bool(default))).strip()
        if answer == "none" and "" in allowed and answer not in allowed:
            return ""
        if answer in allowed:
            return answer
        problem = f"{answer!r} is not one of {', '.join(shown)}{nearest(answer, shown)}"
        print(fitted(problem, sys.stdout))


def config_text(found: FileSettings, *, clients: int, rounds: int, algorithm: str) -> str:
    """The config, with the reason for every chosen setting as a comment."""
    partition: dict[str, Any]
    if found.has_clients:
        partition, why = {"name": "natural"}, "one client for each file, group or name in the data"
    elif found.regression:
        partition, why = {"name": "iid", "clients": clients}, "no clients in the data: rows are shuffled and cut"
    else:
        partition = {"name": "dirichlet", "clients": clients, "alpha": 0.5}
        why = "no clients in the data: each class is cut unevenly; a smaller alpha makes clients differ more"
    place = found.data_dir if str(found.data_dir) else Path(".")
    parts = [
        "# Written by `consilience init`; every key is explained in docs/experiments.md, `consilience list NAME` shows "
        "options.\n#   consilience check CONFIG     what it would run\n#   consilience run CONFIG rounds=50",
        f"rounds = {rounds}  # of training; `evaluation.every` says how often the model is tested\nseed = 0",
        f"data_dir = {_value(str(place))}  # file names below are relative to it",
        _section("data", found.data, "; ".join(found.said[:1])),
        _section("partition", partition, why),
        _section("model", found.model, "`consilience list models` shows the others"),
        _section(
            "algorithm", {"name": algorithm}, "`consilience diagnose CONFIG` says which methods fit these clients"
        ),
        "lr = 0.05  # of each local step; `consilience tune` searches it\n"
        "epochs = 1  # passes over its rows that a client does in a round\nbatch_size = 32",
        "# [validation]  # rows held back from training choose the best round\n# share = 0.1",
    ]
    return "\n\n".join(parts).replace("\n\nlr = ", "\nlr = ") + "\n"


def _section(name: str, options: Mapping[str, Any], why: str) -> str:
    lines = [f"[{name}]  # {why}" if why else f"[{name}]"]
    return "\n".join([*lines, *(f"{key} = {_value(value)}" for key, value in options.items())])


def _value(value: Any) -> str:
    """A string, number or list as TOML writes it, which for these is JSON."""
    return json.dumps(value, ensure_ascii=False)
