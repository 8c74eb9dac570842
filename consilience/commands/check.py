"""The command `consilience check`: describes the run of a config without training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from consilience.runs.failures import guarded

if TYPE_CHECKING:
    from consilience.experiments.assembly import Simulation
    from consilience.experiments.config.config import Config
    from consilience.experiments.preview import Cost, Size


def check(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A TOML file, or none for the default run; settings such as algorithm.lr=0.05.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    measure: Annotated[bool, typer.Option(help="Time a few steps to estimate time and memory.")] = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Say what a config would run: clients, rows, parameters, bytes, time, memory, and what looks wrong.

    Nothing is trained or written. Exit code 0, or 2 where the run could not start.
    """

    def work() -> int:
        import contextlib

        from consilience.compare.command import split
        from consilience.experiments.assembly import assemble
        from consilience.experiments.config import config

        try:
            path, overrides = split(arguments or [])
            settings = config.load(Path(path) if path is not None else None, overrides)
            with contextlib.closing(assemble(settings)) as simulation:
                found = checked(settings, simulation, measure=measure)
        except Exception as problem:
            if json:
                print_json({"ok": False, **refused(problem)})
                return 2 if debug else refused(problem)["code"]
            raise
        if json:
            print_json({"ok": True, **found})
        else:
            for line in lines(found):
                print(line)
        return 0

    guarded(work, debug)


def refused(problem: Exception) -> dict[str, Any]:
    """Print why the run cannot start, and return the exit code."""
    from consilience.runs.failures import explained

    message, code = explained(problem)
    return {"error": message, "code": code}


def print_json(found: dict[str, Any]) -> None:
    """One JSON object on the standard output."""
    from consilience.runs import canonical

    sys.stdout.write(canonical.encode(canonical.to_json_types(found, "check"), pretty=True).decode())


def checked(settings: Config, simulation: Simulation, *, measure: bool) -> dict[str, Any]:
    """Everything known about the run, in plain values; `cost` gives the reason if nothing was measured."""
    import dataclasses

    from consilience.core.settings import Invalid
    from consilience.experiments import preview

    size = preview.size(simulation)
    found: dict[str, Any] = {
        "name": settings.label,
        "algorithm": settings.algorithm.name,
        "data": settings.data.name,
        "partition": settings.partition.name,
        "model": settings.model.name,
        "task": simulation.task.kind.name,
        "device": str(simulation.engine.resolved_settings.get("device", "cpu")),
        "engine": settings.engine.get("name", "vectorised"),
        "size": dataclasses.asdict(size),
        "warnings": preview.warnings(simulation),
    }
    if not measure:
        return {**found, "cost": {"not_measured": "--no-measure was given"}}
    try:
        return {**found, "cost": dataclasses.asdict(preview.cost(simulation, size))}
    except (Invalid, RuntimeError, ValueError) as problem:
        return {**found, "cost": {"not_measured": str(problem)}}


def lines(found: dict[str, Any]) -> list[str]:
    """The same as text of 80 columns."""
    from consilience.experiments.preview import Cost, Size

    size = Size(**found["size"])
    rows = [
        ("run", f"{found['algorithm']} on {found['data']} ({found['partition']}), {size.rounds} rounds"),
        ("clients", f"{size.clients:,}, of which {size.clients_a_round:g} in a round (mean of the first 20)"),
        ("rows", _rows(size)),
        ("task", _task(found["task"], size)),
        ("model", f"{found['model']}, {size.parameters:,} parameters ({amount(size.model_bytes)})"),
        ("work", f"{size.steps_a_round:,.0f} local steps in a round, of all chosen clients"),
        ("kept", f"{amount(size.memory_bytes_a_client)} by each client, {amount(size.server_bytes)} by the server"),
        ("data", f"{amount(size.data_bytes)} in memory"),
    ]
    cost = found["cost"]
    if "not_measured" in cost:
        rows.append(("cost", f"not measured: {cost['not_measured']}"))
    else:
        rows += _cost(Cost(**cost), size)
    rows += [("warning", text) for text in found["warnings"]]
    return _wrapped([*rows, ("", "nothing looks wrong" if not found["warnings"] else "")])


def _rows(size: Size) -> str:
    least, median, most = size.rows_a_client
    spread = f"{least:,} to {most:,} a client, median {median:,}" if least < most else f"{least:,} a client"
    return f"{size.rows:,} to train ({spread}), {size.test_rows:,} to test"


def _task(kind: str, size: Size) -> str:
    if not size.classes:
        return kind
    names = f": {', '.join(size.label_names[:6])}{' ...' if len(size.label_names) > 6 else ''}"
    return f"{kind}, {size.classes} classes{names if size.label_names else ''}"


def _cost(cost: Cost, size: Size) -> list[tuple[str, str]]:
    from consilience.runs.text import duration

    both = (cost.bytes_down + cost.bytes_up) * size.clients_a_round
    return [
        (
            "network",
            f"{amount(cost.bytes_down)} to and {amount(cost.bytes_up)} from each chosen client, {amount(both)} a "
            f"round, {amount(both * size.rounds)} in all",
        ),
        (
            "time",
            f"about {duration(cost.run_seconds)} here: {cost.round_seconds:.3g} s a round "
            f"({1000 * cost.step_seconds:.3g} ms a step), {cost.test_seconds:.3g} s a test",
        ),
        ("memory", f"{amount(cost.peak_bytes)} at most while it was measured"),
        ("how", cost.how),
    ]


def amount(count: float) -> str:
    """'3.1 MB'."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def _wrapped(rows: list[tuple[str, str]]) -> list[str]:
    import textwrap

    found = []
    for title, text in rows:
        if text:
            first = f"{title:<9}"
            found += textwrap.wrap(text, 79, initial_indent=first, subsequent_indent=" " * 9, break_on_hyphens=False)
    return found
