"""Help as plain text, and names for shell completion."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class PlainHelp(TyperGroup):
    """Commands whose help has no escapes: Typer writes `\\[default: 1]` also where Rich does not print it."""

    def get_help(self, ctx: Any) -> str:
        """The help of the group itself."""
        return super().get_help(ctx).replace("\\[", "[")

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, set to write its help plainly."""
        return _plain(super().get_command(ctx, cmd_name))


def _plain(command: Any) -> Any:
    """Replace `get_help` of a command and of its subcommands by one that writes plain text."""
    if command is not None and "get_help" not in vars(command):
        written = command.get_help
        command.get_help = lambda ctx: written(ctx).replace("\\[", "[")
        for inner in getattr(command, "commands", {}).values():
            _plain(inner)
    return command


def algorithm_names(incomplete: str) -> list[str]:
    """Algorithm names for shell completion, without loading PyTorch."""
    from consilience.experiments.config.families import FAMILIES

    return sorted(name for names in FAMILIES.values() for name in names if name.startswith(incomplete))
