"""All that a config can name, with its options, read from the code that defines it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from consilience import algorithms, environments, models
from consilience.core.protocols import RunnerEngine
from consilience.core.settings import Invalid, Option, nearest, options_of
from consilience.data import datasets, partition
from consilience.engines.ray.cluster import RayCluster
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.options.parts import parts_of, protocol_in
from consilience.options.recipes import default_algorithm, default_part, shared_defaults

Factory = Callable[..., Any]
MANY = 12  # names: more are not spelled out where a near one is known


@dataclass(frozen=True, kw_only=True)
class NamedSection:
    """One section of a config in which a name chooses what the options mean."""

    section: str
    factories: Callable[[], Mapping[str, Factory]]
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # options that are not set here -> what sets them
    needs_data: bool = False  # cannot be built from the config alone

    def find(self, name: Any) -> tuple[str, Factory]:
        """The factory of that name, and the name as it is spelled."""
        known = self.factories()
        spelled = name.lower().replace("-", "_") if isinstance(name, str) else ""
        if spelled not in known:
            hint = nearest(name, known)
            if len(known) > MANY and hint:
                raise Invalid(f"{self.section}.name = {name!r} is unknown{hint}; `consilience list` shows them all")
            raise Invalid(f"{self.section}.name = {name!r} is not one of {', '.join(known)}{hint}")
        return spelled, known[spelled]

    def build(self, name: str, options: Mapping[str, Any]) -> Any:
        """Build it from options that were read and checked."""
        if self.section == "environment":
            return environments.environment(name, **options)
        return self.find(name)[1](**options)

    def options(self, name: Any) -> dict[str, Option]:
        """What may be set for it, apart from what is set elsewhere."""
        _, factory = self.find(name)
        known = dict(options_of(factory))
        if self.section == "environment":
            known.update(options_of(Environment))
        return {name: option for name, option in known.items() if name not in self.elsewhere}


def _recipes() -> dict[str, Factory]:
    return {name: algorithms.recipe(name) for name in algorithms.names()}


KINDS: dict[str, NamedSection] = {
    kind.section: kind
    for kind in (
        NamedSection(
            section="data",
            factories=datasets.catalogue,
            elsewhere={"data_dir": "the setting data_dir at the top"},
            needs_data=True,
        ),
        NamedSection(section="partition", factories=lambda: partition.PARTITIONS),
        NamedSection(
            section="environment",
            factories=lambda: environments.ENVIRONMENTS,
            elsewhere={"indices": "the data: data.name = 'duw_mnist' reads the authors' split"},
        ),
        NamedSection(
            section="model",
            factories=lambda: {name: models.find(name) for name in models.__all__},
            elsewhere={"inputs": "the data", "classes": "the data"},
            needs_data=True,
        ),
        NamedSection(section="algorithm", factories=_recipes),
    )
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 20, "alpha": 0.5},
    "environment": {"name": "plain"},
    "model": {"name": "mlp"},
    "algorithm": {"name": "simprox", "lr": 0.2, "epochs": 3, "batch_size": 16},
}
"""Defaults for omitted sections."""

_FROM_DATA = ("vocabulary",)  # options of models taken from the data where the config does not set them


ENGINES: dict[str, Callable[..., RunnerEngine]] = {"vectorised": Vectorised, "ray": RayCluster}
"""Where clients can run; the first is the default."""


def engine_options(name: str = "vectorised") -> dict[str, Option]:
    """The settings of an engine: the arguments of its class, apart from what the run gives it."""
    given = ("self", "task", "federation", "environment", "rounds_ahead", "hosts")
    make: Any = ENGINES[name]
    known = options_of(make.__init__ if inspect.isclass(make) else make)
    return {key: option for key, option in known.items() if key not in given}


def section_options(section: str, name: Any) -> dict[str, Option]:
    """The options of a named thing, with what the data will supply marked as not required."""
    known = KINDS[section].options(name)
    return {
        key: Option(option.annotation) if section == "model" and key in _FROM_DATA else option
        for key, option in known.items()
    }


def with_defaults(section: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the plain defaults of those left out, in the order in which they are declared."""
    _, factory = KINDS[section].find(name)
    known = section_options(section, name)
    own = {key: option.default for key, option in options_of(factory).items() if key in known}
    if section == "algorithm":
        own = {**shared_defaults(factory), **{key: value for key, value in own.items() if value is not None}}
    return filled(known, given, own)


def filled(known: Mapping[str, Option], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, else a default that can be written down; None is kept only where it differs from the default."""
    values = {key: given.get(key, defaults.get(key)) for key in known}
    plain = (bool, int, float, str, tuple)
    return {
        key: value
        for key, value in values.items()
        if (key in given or isinstance(value, plain)) and (value is not None or defaults.get(key) is not None)
    }


def offered(section: str, name: str, known: Mapping[str, Option]) -> dict[str, Any]:
    """The settings of the default run that suit this name: an algorithm's own defaults are left alone."""
    default = DEFAULTS[section]
    settings = {key: value for key, value in default.items() if key in known and key != "name"}
    if section != "algorithm" or name == default["name"]:
        return settings
    _, recipe = KINDS[section].find(name)
    return {key: value for key, value in settings.items() if not has_own_default(recipe, key)}


def has_own_default(recipe: Factory, key: str) -> bool:
    """Whether a recipe has a default of its own for an option that all recipes share."""
    if key in inspect.signature(recipe).parameters:
        return True
    return default_algorithm(recipe) is not None and key not in shared_defaults(recipe)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the catalogue."""

    name: str
    about: str
    options: dict[str, Option]


def listing() -> dict[str, list[Entry]]:
    """Everything by kind; the parts that algorithms are made of are found by their options' protocols."""
    shown = {"algorithms": "algorithm", "datasets": "data", "partitions": "partition"}
    shown |= {"environments": "environment", "models": "model"}
    found = {title: [_entry(KINDS[kind], name) for name in KINDS[kind].factories()] for title, kind in shown.items()}
    options = [option for name in algorithms.names() for option in KINDS["algorithm"].options(name).values()]
    for protocol in dict.fromkeys(protocol_in(option.annotation) for option in options):
        if protocol is not None:
            known = parts_of(protocol).items()
            entries = [Entry(name=name, about=_about(part), options=dict(options_of(part))) for name, part in known]
            found[_plural(protocol)] = entries
    found["engine"] = [Entry(name=n, about=_about(kind), options=engine_options(n)) for n, kind in ENGINES.items()]
    return found


def narrowed(found: dict[str, list[Entry]], wanted: list[str]) -> dict[str, list[Entry]]:
    """Only the kinds and names asked for."""
    names = [entry.name for entries in found.values() for entry in entries]
    for word in wanted:
        if word not in found and word not in names:
            raise Invalid(
                f"{word!r} is not in the catalogue{nearest(word, [*found, *names])}; kinds: {', '.join(found)}"
            )
    chosen = {title: [e for e in entries if title in wanted or e.name in wanted] for title, entries in found.items()}
    return {title: entries for title, entries in chosen.items() if entries}


def _entry(kind: NamedSection, name: str) -> Entry:
    factory = kind.factories()[name]
    options = section_options(kind.section, name)
    if kind.section == "algorithm":
        options = {key: _with_default(factory, key, option) for key, option in options.items()}
    if kind.section == "environment" and not _needs_something(factory):
        built = factory().environment
        options = {key: Option(o.annotation, getattr(built, key, o.default)) for key, o in options.items()}
    return Entry(name=name, about=_about(factory), options=options)


def _with_default(recipe: Factory, key: str, option: Option) -> Option:
    """A shared option with the default this recipe really has: what it is built with when nothing is given."""
    if key in inspect.signature(recipe).parameters or _needs_something(recipe):
        return option
    return Option(option.annotation, default_part(recipe, key) or shared_defaults(recipe).get(key))


def _needs_something(factory: Factory) -> bool:
    return any(option.required for option in options_of(factory).values())


def _plural(protocol: type) -> str:
    """'weightings', 'personal_layers': what the catalogue calls all parts of one protocol."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", protocol.__name__).lower()
    if words.endswith("ss"):
        return f"{words}es"
    return words if words.endswith("s") else f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"


def _about(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
