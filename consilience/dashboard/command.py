"""The command `consilience dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from consilience.runs.failures import guarded


def dashboard(
    folder: Annotated[Path, typer.Argument(metavar="[RUNS_FOLDER]", help="Where the run folders are.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8787,
    host: Annotated[str, typer.Option(help="Another address than loopback needs a token and TLS.")] = "127.0.0.1",
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token; or set CONSILIENCE_DASHBOARD_TOKEN.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="The TLS certificate, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key, PEM.")] = None,
    refresh: Annotated[int, typer.Option(min=1, max=3600, help="Seconds between two looks at the runs.")] = 3,
    control: Annotated[
        bool, typer.Option("--control", help="Buttons that stop and resume your own runs on this machine.")
    ] = False,
    similarity: Annotated[
        bool | None,
        typer.Option(help="Show similarity and swaps of clients; by default of simulated ones, on this machine."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Watch runs in progress in a browser; by default read-only and on this machine only."""

    def work() -> int:
        from consilience.dashboard import access, server

        rules = access.access_rules(host, token_file=token_file, certificate=certificate, key=key, control=control)
        server.serve(folder, rules, port=port, refresh=refresh, with_similarity=similarity)
        return 0

    guarded(work, debug)
