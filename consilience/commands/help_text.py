"""Help as plain text, and names for shell completion."""

from __future__ import annotations

from typing import Any

from click import UsageError
from typer.core import TyperGroup


class PlainHelp(TyperGroup):
    """Help that is whole, and without escapes: Typer writes `\\[default: 1]` also where Rich does not print it."""

    def get_help(self, ctx: Any) -> str:
        """The help of the group itself."""
        return super().get_help(ctx).replace("\\[", "[")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """All commands with their whole first sentences: Click cuts them after one line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.get_short_help_str(limit=200)) for name, found in commands if found])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that was typed; one that is unknown is refused with suggestions, once."""
        try:
            return super().resolve_command(ctx, args)
        except UsageError as problem:
            head, asked, rest = problem.format_message().partition(" Did you mean")
            once = head + asked + rest.partition(" Did you mean")[0]  # Typer suggests names, and Click 8.4, too
            raise UsageError(once, ctx) from problem

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
