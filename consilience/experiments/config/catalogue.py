"""The catalogue: all names that a config can use, with their options, read from the code that defines them."""

from __future__ import annotations

import inspect
import re
import typing
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
MANY = 12  # names: longer lists are not printed if a near match is known


@dataclass(frozen=True, kw_only=True)
class NamedSection:
    """One section of a config whose name determines its options."""

    section: str
    factories: Callable[[], Mapping[str, Factory]]
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # options that are not set here -> what sets them
    needs_data: bool = False  # cannot be built from the config alone

    def find(self, name: Any) -> tuple[str, Factory]:
        """The factory of that name, and the name in its canonical spelling."""
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
        """Its options, without those that are set elsewhere."""
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

SHARED, ALL = "options", "all"
"""The words of `consilience list` for the options that all algorithms share, and for everything."""

_FROM_DATA = ("vocabulary",)  # options of models taken from the data where the config does not set them


ENGINES: dict[str, Callable[..., RunnerEngine]] = {"vectorised": Vectorised, "ray": RayCluster}
"""Where clients can run; the first is the default."""


def engine_options(name: str = "vectorised") -> dict[str, Option]:
    """The settings of an engine: the arguments of its class, without those that the run supplies."""
    given = ("self", "task", "federation", "environment", "rounds_ahead", "hosts")
    make: Any = ENGINES[name]
    known = options_of(make.__init__ if inspect.isclass(make) else make)
    return {key: option for key, option in known.items() if key not in given}


def section_options(section: str, name: Any) -> dict[str, Option]:
    """The options of a name; those that the data supply are not required."""
    known = KINDS[section].options(name)
    return {
        key: Option(option.annotation) if section == "model" and key in _FROM_DATA else option
        for key, option in known.items()
    }


def with_defaults(section: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options and the plain defaults of the others, in the order of their declaration."""
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
    """The settings of the default run that apply to this name; an algorithm's own defaults are kept."""
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
    about: str  # the first paragraph; of an algorithm its citation and equation
    options: dict[str, Option]
    text: str = ""  # the whole docstring
    recipe: Factory | None = None  # of an algorithm
    headline: str = ""  # a one-line description


SECTIONS = ("algorithms", "datasets", "partitions", "environments", "models", "engines")
"""Kinds that a section of a config chooses by name; the others but SETTINGS are parts of algorithms."""

SETTINGS = "settings"
"""The kind of the settings that no name determines."""


def listing() -> dict[str, list[Entry]]:
    """All entries by kind; the parts of algorithms are found by the protocols of the options."""
    shown = {"algorithms": "algorithm", "datasets": "data", "partitions": "partition"}
    shown |= {"environments": "environment", "models": "model"}
    found = {title: [_entry(KINDS[kind], name) for name in KINDS[kind].factories()] for title, kind in shown.items()}
    options = [option for name in algorithms.names() for option in KINDS["algorithm"].options(name).values()]
    for protocol in dict.fromkeys(protocol_in(item) for option in options for item in _items(option.annotation)):
        if protocol is not None:
            known = parts_of(protocol).items()
            found[_plural(protocol)] = [described(name, part, dict(options_of(part))) for name, part in known]
    found["engines"] = [described(name, kind, engine_options(name)) for name, kind in ENGINES.items()]
    return found


def narrowed(found: dict[str, list[Entry]], wanted: list[str]) -> dict[str, list[Entry]]:
    """Only the kinds and names asked for; a kind may be named in the singular, and data sets are also `data`."""
    if ALL in wanted:
        return found
    wanted = [word for word in wanted if word != SHARED]
    entries = [entry for entries in found.values() for entry in entries]
    names = [entry.name for entry in entries]
    kinds = {**{singular(title): title for title in found}, "data": "datasets", **{title: title for title in found}}
    for word in wanted:
        if word not in kinds and word not in names:
            owners = [entry.name for entry in entries if word in entry.options]
            if owners:
                place = SHARED if len(owners) > MANY else owners[0]
                raise Invalid(f"{word!r} is an option of {_some(owners)}: `consilience list {place}` shows it")
            raise Invalid(
                f"{word!r} is not in the catalogue{nearest(word, [*found, *names])}; kinds: {', '.join(found)}"
            )
    whole = {kinds[word] for word in wanted if word in kinds}
    chosen = {title: [e for e in entries if title in whole or e.name in wanted] for title, entries in found.items()}
    return {title: entries for title, entries in chosen.items() if entries}


def searched(found: dict[str, list[Entry]], words: str) -> dict[str, list[Entry]]:
    """Entries whose name, description or options contain every word; matches in the name come first."""
    wanted = words.lower().split()
    if not wanted:
        raise Invalid("--search needs a word, such as similarity")
    ranked: dict[str, list[Entry]] = {}
    for title, entries in found.items():
        hits = [(rank, entry) for entry in entries if (rank := _rank(entry, wanted)) is not None]
        if hits:
            ranked[title] = [entry for _, entry in sorted(hits, key=lambda hit: hit[0])]
    return ranked


def _rank(entry: Entry, wanted: list[str]) -> int | None:
    shared = () if entry.recipe is None else getattr(entry.recipe, "shared", ())  # the same in every algorithm
    own = " ".join(key for key in entry.options if key not in shared)
    for rank, text in enumerate(
        (entry.name, f"{entry.name} {entry.headline} {entry.about}", f"{entry.name} {entry.text} {own}")
    ):
        if all(word in text.lower() for word in wanted):
            return rank
    return None


def _items(annotation: Any) -> tuple[Any, ...]:
    """An option's annotation; of a list that of its items."""
    inside = typing.get_args(annotation)
    return inside[:1] if typing.get_origin(annotation) is tuple else (annotation,)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def singular(title: str) -> str:
    """'weighting' of 'weightings', 'memory' of 'memories'."""
    return f"{title[:-3]}y" if title.endswith("ies") else title.removesuffix("s")


def _entry(kind: NamedSection, name: str) -> Entry:
    factory = kind.factories()[name]
    options = section_options(kind.section, name)
    if kind.section == "algorithm":
        options = {key: _with_default(factory, key, option) for key, option in options.items()}
    if kind.section == "environment" and not _needs_something(factory):
        built = factory().environment
        options = {key: Option(o.annotation, getattr(built, key, o.default)) for key, o in options.items()}
    return described(name, factory, options, factory if kind.section == "algorithm" else None)


def described(name: str, thing: Any, options: dict[str, Option], recipe: Factory | None = None) -> Entry:
    """An entry described by the docstring of a class or function."""
    text = inspect.getdoc(thing) or ""
    about = " ".join(text.partition("\n\n")[0].split())
    module = inspect.getmodule(recipe)
    headline = (module.__doc__ or about).partition("\n")[0] if module is not None else about
    return Entry(name=name, about=about, options=options, text=text, recipe=recipe, headline=headline)


def _with_default(recipe: Factory, key: str, option: Option) -> Option:
    """A shared option with this recipe's actual default: the value it is built with if nothing is given."""
    if key in inspect.signature(recipe).parameters or _needs_something(recipe):
        return option
    return Option(option.annotation, default_part(recipe, key) or shared_defaults(recipe).get(key))


def _needs_something(factory: Factory) -> bool:
    return any(option.required for option in options_of(factory).values())


def _plural(protocol: type) -> str:
    """The catalogue's name for all parts of one protocol, such as 'weightings' or 'personal_layers'."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", protocol.__name__).lower()
    if words.endswith("ss"):
        return f"{words}es"
    return words if words.endswith("s") else f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"
