"""What is typed after a command: the config file and the settings."""

from __future__ import annotations


def split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The config file, if any, and the overrides among the arguments."""
    paths = [text for text in arguments if "=" not in text]
    if len(paths) > 1:
        from consilience.core.settings import Invalid

        raise Invalid(f"{paths[1]!r} is neither the config file ({paths[0]!r} is) nor a setting: write key=value")
    return paths[0] if paths else None, [text for text in arguments if "=" in text]


def given(**options: str) -> list[str]:
    """The options of a command that are settings, as `key=value`; empty ones are left out."""
    return [f"{key}={value}" for key, value in options.items() if value]
