"""Environments: speed and reliability of clients, by settings or by presets from papers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from consilience.core.settings import Invalid, check_options, nearest, options_of, refuse_unknown
from consilience.environments import presets
from consilience.environments.environment import Environment
from consilience.environments.presets import Preset

ENVIRONMENTS: dict[str, Callable[..., Preset]] = {
    "plain": presets.plain,
    "duw_1": presets.duw_1,
    "duw_2": presets.duw_2,
    "duw_3": presets.duw_3,
    "duw_4": presets.duw_4,
    "duw_a": presets.duw_a,
    "duw_b": presets.duw_b,
    "fedprox_stragglers": presets.fedprox_stragglers,
}

__all__ = ["ENVIRONMENTS", "Environment", "Preset", "environment", "preset"]


def environment(name: str = "plain", **options: Any) -> Environment:
    """An environment by name; options are the preset's own, or fields of Environment to replace."""
    return preset(name, **options).environment


def preset(name: str, **options: Any) -> Preset:
    """As `environment`, with the paper's data, partition and settings."""
    build = ENVIRONMENTS.get(name.replace("-", "_")) if isinstance(name, str) else None
    if build is None:
        known = ", ".join(ENVIRONMENTS)
        raise Invalid(f"environment.name = {name!r} is not one of {known}{nearest(name, ENVIRONMENTS)}")
    own = set(options_of(build))
    fields = [field.name for field in dataclasses.fields(Environment)]
    refuse_unknown(options, [*sorted(own), *fields], "environment")
    ours = {key: value for key, value in options.items() if key in own}
    made = build(**check_options(build, ours, "environment"))
    changes = check_options(Environment, {k: v for k, v in options.items() if k not in own}, "environment")
    return dataclasses.replace(made, environment=dataclasses.replace(made.environment, **changes))
