"""The commands `consilience deploy init | up | keys | check` and `consilience verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilience.runs.failures import UNEXPECTED, guarded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from consilience.flower.deploy.verify import Outcome

deploy = typer.Typer(name="deploy", help="Run a federation between machines, over Flower.", no_args_is_help=True)
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]


@deploy.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The app's new folder; its last part is its name.")],
    clients: Annotated[int, typer.Option(min=1, help="Clients in the federation.")] = 4,
    debug: Debug = False,
) -> None:
    """Write a Flower app that works as it is: change federation.py to your model and data."""

    def work() -> int:
        from consilience.flower.deploy import template

        for file in template.init(folder, clients=clients):
            print(file)
        print(f"rehearse it on this machine: consilience deploy up {folder} --local {clients}")
        return 0

    guarded(work, debug)


@deploy.command()
def up(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER] [KEY=VALUE]...",
            help="The app's folder, or none for this one; settings such as rounds=10.",
            show_default=False,
        ),
    ] = None,
    local: Annotated[
        int | None, typer.Option(min=1, help="SuperNodes on this machine; one per client if left out.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no node keys.")] = False,
    host: Annotated[str, typer.Option(help="The SuperLink's address.")] = "127.0.0.1",
    debug: Debug = False,
) -> None:
    """Start SuperLink and SuperNodes here, with TLS and node keys made on the spot, run the app and follow it.

    Started again, it continues the run after its last checkpoint.
    """

    def work() -> int:
        from consilience.core.settings import Invalid
        from consilience.flower.deploy import up as deployment

        folders = [text for text in arguments or () if "=" not in text]
        if len(folders) > 1:
            raise Invalid(
                f"{folders[1]!r} is neither the app's folder ({folders[0]!r} is) nor a setting: write key=value"
            )
        overrides = tuple(text for text in arguments or () if "=" in text)
        folder = Path(folders[0] if folders else ".")
        code, place = deployment.up(folder, nodes=local, secure=not insecure, host=host, overrides=overrides, say=_say)
        print(place)
        if code == 0:
            _say(f"look at it: consilience show {place}")
        return code

    guarded(work, debug)


@deploy.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where the files go.")] = Path("keys"),
    host: Annotated[list[str] | None, typer.Option(help="Names and addresses of the SuperLink.")] = None,
    node: Annotated[bool, typer.Option("--node", help="Only a SuperNode's key pair.")] = False,
    debug: Debug = False,
) -> None:
    """Make a CA and a server certificate for the server's side, or a key pair for a SuperNode."""

    def work() -> int:
        from consilience.flower.deploy import keys as making

        if node:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            print(making.node_key(folder / "node"))
            return 0
        made = making.make(folder, hosts=tuple(host or ("127.0.0.1", "localhost")))
        print("\n".join(str(path) for path in (made.authority, made.certificate, made.certificate_key)))
        return 0

    guarded(work, debug)


@deploy.command("check")
def check_superlink(
    superlink: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The SuperLink's address.")],
    root_certificates: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="ca.crt.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="The SuperLink has no TLS.")] = False,
    debug: Debug = False,
) -> None:
    """Before a SuperNode is started here: is the SuperLink there, is it the right one, and do the clocks agree?"""

    def work() -> int:
        from consilience.core.settings import Invalid
        from consilience.flower.deploy import clock

        if (root_certificates is None) != insecure:
            raise Invalid("give --root-certificates ca.crt, or, for a SuperLink without TLS, --insecure")
        ahead = clock.difference(superlink, root_certificates)
        print(f"the SuperLink at {superlink} answers{'' if insecure else ', with a certificate of this CA'}")
        if clock.refused(ahead):
            raise Invalid(clock.explain(ahead))
        print(clock.explain(ahead))
        return 0

    guarded(work, debug)


def verify(
    config: Annotated[Path | None, typer.Argument(help="A small experiment's TOML file; none: one on digits.")] = None,
    algorithms: Annotated[str, typer.Option(help="With commas between; nine if left out.")] = "",
    engines: Annotated[str, typer.Option(help="Of vectorised, ray, flower; all if left out.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each run.")] = 2,
    nodes: Annotated[int, typer.Option(min=1, help="SuperNodes of the Flower deployment.")] = 2,
    debug: Debug = False,
) -> None:
    """Run a short experiment on every engine and compare the SHA-256 of model and metrics: they must be equal."""

    def work() -> int:
        from rich.console import Console

        from consilience.flower.deploy import verify as verification
        from consilience.runs import toml_text

        given = toml_text.read(config) if config is not None else verification.STANDARD
        outcomes = verification.verify(
            given,
            algorithms=_listed(algorithms) or verification.ALGORITHMS,
            engines=_listed(engines) or verification.ENGINES,
            rounds=rounds,
            nodes=nodes,
            say=_say,
        )
        wrong = verification.differing(outcomes)
        Console().print(_table(outcomes, wrong), highlight=False)
        for engine, why in dict.fromkeys((one.engine, one.why) for one in outcomes if one.skipped):
            print(f"{engine}: skipped, {why}")
        ran = sorted({one.engine for one in outcomes if not one.skipped})
        print(f"different: {', '.join(wrong)}" if wrong else f"equal, bit by bit: {'; '.join(ran)}")
        return UNEXPECTED if wrong else 0

    guarded(work, debug)


def _table(outcomes: Sequence[Outcome], wrong: list[str]) -> Table:
    from rich.table import Table

    table = Table(
        "algorithm", "engine", "model", "metrics", "seconds", "", header_style="bold", box=None, pad_edge=False
    )
    for column in table.columns:
        column.no_wrap = True
    ran = [one for one in outcomes if not one.skipped]
    for one in sorted(ran, key=lambda outcome: outcome.algorithm):  # stable: engines keep their order
        verdict = one.why.partition("\n")[0] or ("DIFFERENT" if one.algorithm in wrong else "equal")
        seconds = f"{one.seconds:.1f}" if one.model else ""
        table.add_row(one.algorithm, one.engine, one.model[:16], one.metrics[:16], seconds, verdict)
    return table


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _say(text: str) -> None:
    """Progress goes to the error stream, and is seen at once."""
    typer.echo(text, err=True)
