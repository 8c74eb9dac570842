"""The commands `consilience deploy init | up | keys | digest | link | node | check` and `consilience verify`."""

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
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FOLDER] [KEY=VALUE]...",
        help="The app's folder, or none for this one; settings such as rounds=10.",
        show_default=False,
    ),
]
Allow = Annotated[
    list[str] | None, typer.Option(metavar="DIGEST", help="Another app that may run: what `deploy digest` prints.")
]
Unit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a systemd unit of this command, and end.")]


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
        print(f"try it on this machine: consilience deploy up {folder} --local {clients}")
        return 0

    guarded(work, debug)


@deploy.command()
def up(
    arguments: Arguments = None,
    local: Annotated[
        int | None, typer.Option(min=1, help="SuperNodes on this machine; one per client if left out.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no node keys.")] = False,
    host: Annotated[str, typer.Option(help="The address that SuperNodes reach.")] = "127.0.0.1",
    debug: Debug = False,
) -> None:
    """Start SuperLink and SuperNodes here, with new TLS and node keys, run the app and follow it.

    Started again, it continues the run after its last checkpoint.
    """

    def work() -> int:
        from consilience.flower.deploy import up as deployment

        folder, overrides = _app(arguments)
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
    member: Annotated[
        Path | None,
        typer.Option(metavar="NODE.PUB", exists=True, dir_okay=False, help="Enter a node's key into members.toml."),
    ] = None,
    clients: Annotated[str, typer.Option(help="With --member: its clients, such as 0 or 0,1.")] = "",
    train: Annotated[str, typer.Option(help="With --member: most training rows of each.")] = "",
    test: Annotated[str, typer.Option(help="With --member: most test rows of each.")] = "",
    debug: Debug = False,
) -> None:
    """Make a CA and a server certificate for the server's side, or a key pair for a SuperNode.

    With --member, write down in members.toml which clients a node's key may speak for: others are refused.
    """

    def work() -> int:
        from consilience.flower.deploy import keys as making
        from consilience.flower.deploy import member_list

        if member is not None:
            rows = {name: _numbers(name, said) for name, said in (("train", train), ("test", test)) if said}
            member_list.add(folder / member_list.FILE, member, _numbers("clients", clients), **rows)
            print(folder / member_list.FILE)
            return 0
        if node:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            print(making.node_key(folder / "node"))
            return 0
        made = making.make(folder, hosts=tuple(dict.fromkeys((*(host or ()), "127.0.0.1", "localhost"))))
        print("\n".join(str(path) for path in (made.authority, made.certificate, made.certificate_key)))
        return 0

    guarded(work, debug)


@deploy.command()
def digest(arguments: Arguments = None, debug: Debug = False) -> None:
    """Print the SHA-256 of an app with its settings, so that both sides can check that they have the same."""

    def work() -> int:
        from consilience.flower.deploy import pins

        folder, overrides = _app(arguments)
        print(pins.digest(folder, overrides))
        return 0

    guarded(work, debug)


@deploy.command()
def link(
    arguments: Arguments = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="The address that nodes reach.")] = "0.0.0.0:8000",
    keys: Annotated[Path, typer.Option(help="The folder that `deploy keys` wrote.")] = Path("keys"),
    state: Annotated[Path, typer.Option(help="A folder for state, logs and Flower's home folder.")] = Path("link"),
    control: Annotated[int, typer.Option(min=1, max=65535, help="The SuperLink's own port, on 127.0.0.1.")] = 8001,
    allow: Allow = None,
    write_unit: Unit = None,
    debug: Debug = False,
) -> None:
    """The server's side: a SuperLink on loopback, and for other machines a TLS listener with the routes of nodes only.

    It runs the given app, with the given settings, and no other.
    """

    def work() -> int:
        from consilience.flower.deploy import service

        folder, overrides = _app(arguments)
        if write_unit is not None:
            words = [str(folder.resolve()), *overrides, "--listen", listen, "--keys", str(keys.resolve())]
            words += ["--state", str(state.resolve()), "--control", str(control)]
            return _write_unit(write_unit, "link", words, allow)
        pinned = service.AllowedApp(app=folder, settings=overrides, more=tuple(allow or ()))
        service.link(pinned, listen=listen, folder=keys, place=state, control=control, say=_say)

    guarded(work, debug)


@deploy.command()
def node(
    superlink: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The SuperLink's address.")],
    arguments: Arguments = None,
    root_certificates: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="ca.crt.")] = Path("ca.crt"),
    key: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="This node's private key.")] = Path(
        "keys/node"
    ),
    node_config: Annotated[str, typer.Option(help='Settings for federation.py: clients="0" and more.')] = "",
    state: Annotated[Path, typer.Option(help="A folder for logs and Flower's home folder.")] = Path("node"),
    allow: Allow = None,
    write_unit: Unit = None,
    debug: Debug = False,
) -> None:
    """A client's side: a SuperNode that runs the given app, with the given settings, and no other."""

    def work() -> int:
        from consilience.flower.deploy import keys, service

        folder, overrides = _app(arguments)
        if write_unit is not None:
            words = [superlink, str(folder.resolve()), *overrides, "--state", str(state.resolve())]
            words += ["--root-certificates", str(root_certificates.resolve()), "--key", str(key.resolve())]
            return _write_unit(write_unit, "node", [*words, "--node-config", node_config], allow)
        pinned = service.AllowedApp(app=folder, settings=overrides, more=tuple(allow or ()))
        service.node(
            pinned,
            superlink=superlink,
            authority=root_certificates.resolve(),
            key=keys.private(key.resolve()),
            node_config=node_config,
            place=state,
            say=_say,
        )

    guarded(work, debug)


@deploy.command("check")
def check_superlink(
    superlink: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The SuperLink's address.")],
    root_certificates: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="ca.crt.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="The SuperLink has no TLS.")] = False,
    debug: Debug = False,
) -> None:
    """Check a SuperLink: reachable, right certificate, closed without an account, clocks in agreement."""

    def work() -> int:
        from consilience.core.settings import Invalid
        from consilience.flower.deploy import clock, probe

        if (root_certificates is None) != insecure:
            raise Invalid("give --root-certificates ca.crt, or, for a SuperLink without TLS, --insecure")
        ahead = clock.difference(superlink, root_certificates)
        print(f"the SuperLink at {superlink} answers{'' if insecure else ', with a certificate of this CA'}")
        print(probe.explain(superlink, probe.answers(superlink, root_certificates)))
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


def _app(arguments: Sequence[str] | None) -> tuple[Path, tuple[str, ...]]:
    """The app's folder and the settings among a command's arguments."""
    from consilience.core.settings import Invalid

    folders = [text for text in arguments or () if "=" not in text]
    if len(folders) > 1:
        raise Invalid(f"{folders[1]!r} is neither the app's folder ({folders[0]!r} is) nor a setting: write key=value")
    return Path(folders[0] if folders else "."), tuple(text for text in arguments or () if "=" in text)


def _write_unit(file: Path, name: str, words: Sequence[str], allow: Sequence[str] | None) -> int:
    from consilience.flower.deploy import service

    more = [word for digest in allow or () for word in ("--allow", digest)]
    file.write_text(service.unit(name, [name, *words, *more]), encoding="utf-8")
    print(file)
    return 0


def _numbers(name: str, text: str) -> list[int]:
    """Whole numbers with commas between."""
    from consilience.core.settings import Invalid

    if not text or not all(part.isascii() and part.isdigit() for part in _listed(text)):
        raise Invalid(f"--{name} {text!r}: give whole numbers with commas between, such as --{name} 0,1")
    return [int(part) for part in _listed(text)]


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _say(text: str) -> None:
    """Write progress to the error stream, unbuffered."""
    typer.echo(text, err=True)
