"""Help as plain text: Typer escapes `[default: 1]` for Rich also where Rich does not print it."""

from __future__ import annotations

from typing import Any

import click
from typer.core import TyperGroup


class _Formatter(click.HelpFormatter):
    def getvalue(self) -> str:
        return super().getvalue().replace("\\[", "[")


class _Context(click.Context):
    formatter_class = _Formatter


class PlainHelp(TyperGroup):
    """A group of commands whose help, and that of all commands in it, has no escapes."""

    context_class = _Context

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, set to write its help plainly."""
        return _plain(super().get_command(ctx, cmd_name))


def _plain(command: Any) -> Any:
    if command is not None:
        command.context_class = _Context
        for inner in getattr(command, "commands", {}).values():
            _plain(inner)
    return command


def algorithm_names(incomplete: str) -> list[str]:
    """Names that a shell completes, without loading PyTorch."""
    from consilience.experiments.config.families import FAMILIES

    return sorted(name for names in FAMILIES.values() for name in names if name.startswith(incomplete))
