"""One run's settings: a TOML file or none, plus `key=value` overrides, checked in full before anything starts.

The schema is the code: `Config`'s own fields, and the annotated options of whatever a section names.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from consilience.core.screening import Limits
from consilience.core.settings import (
    Checked,
    Count,
    Decay,
    Invalid,
    NonNegative,
    Option,
    Range,
    Whole,
    hints_of,
    nearest,
    refuse_unknown,
)
from consilience.experiments.config import defence
from consilience.experiments.config.catalogue import (
    DEFAULTS,
    ENGINES,
    KINDS,
    engine_options,
    filled,
    offered,
    section_options,
    with_defaults,
)
from consilience.experiments.config.overrides import overridden, refuse_outside_sections
from consilience.experiments.config.schedules import refuse_idle_rounds, with_horizons
from consilience.experiments.stopping import Validation
from consilience.options import parts, recipes
from consilience.runs import canonical, toml_text
from consilience.runs.names import safe_name
from consilience.runs.toml_text import TomlTable
from consilience.task.kinds import KINDS as TASK_KINDS
from consilience.task.kinds import LOSSES

Threads = Annotated[int, Range(least=1, most=1024)]  # thousands would fill the memory with their stacks
Seed = Annotated[int, Range(least=0, below=2**63)]
if TYPE_CHECKING:
    LossName = str
    KindName = str
else:
    LossName = Literal[("auto", *LOSSES)]  # those of the kinds of task
    KindName = Literal[("auto", *TASK_KINDS)]


@dataclass(frozen=True, kw_only=True)
class NamedOptions:
    """A section whose name determines its options; the options are read and checked."""

    name: str
    options: TomlTable = field(default_factory=dict)
    built: Any = field(default=None, compare=False, repr=False)  # the built part, where it needs no data


@dataclass(frozen=True, kw_only=True)
class Evaluation(Checked):
    """How often the global model is tested: every so many rounds, and after the last; 0 is never.

    With `local`, so are the clients' models before they are merged, each on all test rows. With `validation`, that
    share of each client's training rows takes the place of the test rows, and is not trained on. `client_sample`: how
    many clients are tested on their own test rows, with the standard error of their mean; the global model is then
    tested on these rows alone. By default all, and of more than 10,000 that test by themselves a sample of 1,000. With
    `maps`, how clients' updates lie to each other is recorded for the report: by default where clients are simulated
    and the run promises no differential privacy.
    """

    every: Whole = 1
    local: bool = False
    client_sample: Count | None = None
    validation: Annotated[float, Range(above=0, below=1)] | None = None
    maps: bool | None = None


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Checked):
    """The kind of task, and settings of its loss and metrics; `auto` is the kind that the data or the loss call for.

    class_weights: of the classes (or labels) in the loss; "balanced" makes all classes of all training rows weigh the
    same. label_smoothing: the share of a target that is spread over all classes. ignore_index: the target that does not
    count (tokens, dense, multi_label; -100). outputs: targets of a row, for a deployment without data at the server.
    labels: the names of the classes in the order of their numbers, where targets are texts; by default those that
    occur, sorted. metrics: further ones by name, such as "per_class", "auroc", "top_5".
    """

    kind: KindName = "auto"
    class_weights: tuple[NonNegative, ...] | Literal["balanced"] | None = None
    label_smoothing: Decay = 0.0
    ignore_index: int | None = None
    outputs: Count | None = None
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    def changed(self) -> TomlTable:
        """The settings that differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}

    def of_kind(self) -> TomlTable:
        """The arguments of the kind of task."""
        return {key: value for key, value in self.changed().items() if key not in ("kind", "outputs", "labels")}


@dataclass(frozen=True, kw_only=True)
class Checkpointing(Checked):
    """How often a checkpoint is written, and how many are kept."""

    every: Count = 1
    keep: Count = 2


FIXED: dict[str, type] = {
    "evaluation": Evaluation,
    "validation": Validation,
    "checkpoint": Checkpointing,
    "limits": Limits,
}
"""Sections with the same fields in every run, written in full."""
TASK: dict[str, type] = {"task": TaskSettings}
"""Written only if it differs from the default, since older runs have no such section."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    name: str = ""  # name of the run folder; "": made of algorithm and data
    seed: Seed = 0
    rounds: Count = 20
    loss: LossName = "auto"
    threads: Threads | None = None  # of the processor; None leaves it to PyTorch
    data_dir: str | None = None
    runs: str = "runs"
    log: Literal["csv", "tensorboard", "mlflow", "wandb", "aim"] | None = None  # tracker besides the run folder
    defence: Literal["auto"] | None = None  # bounds and a robust rule, for so many
    untrusted: Count | None = None  # members that may be hostile
    data: NamedOptions
    partition: NamedOptions
    environment: NamedOptions
    model: NamedOptions
    algorithm: NamedOptions
    engine: TomlTable = field(default_factory=dict)
    task: TaskSettings = field(default_factory=TaskSettings)
    evaluation: Evaluation = field(default_factory=Evaluation)
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.name:
            safe_name(self.name, "name")

    @property
    def label(self) -> str:
        """The name of the run folder if it is free."""
        return self.name or f"{self.algorithm.name}-{self.data.name}"

    def table(self) -> TomlTable:
        """Every setting in plain values, defaults included: what `from_table` reads back to an equal config."""
        scalars = {key: getattr(self, key) for key in _scalars() if getattr(self, key) not in (None, "")}
        chosen = {section: getattr(self, section) for section in KINDS}
        sections = {section: {"name": it.name, **parts.write(it.options)} for section, it in chosen.items()}
        ends = {"engine": self.engine, **{key: _set_options(getattr(self, key)) for key in FIXED}}
        if self.task.changed():
            ends["task"] = self.task.changed()
        if self.validation == Validation():
            del ends["validation"]
        return {**scalars, **sections, **{key: parts.write(table) for key, table in ends.items()}}

    def toml(self) -> str:
        """The table as text."""
        return toml_text.dumps(self.table())

    def digest(self) -> str:
        """SHA-256 of the table: equal for equal settings."""
        return hashlib.sha256(canonical.encode(canonical.to_json_types(self.table(), "config"))).hexdigest()

    def changed(self, **engine: Any) -> Config:
        """A copy with some engine settings replaced by measured or detected values."""
        return dataclasses.replace(self, engine={**self.engine, **engine})


def load(path: Path | str | None = None, overrides: Iterable[str] = ()) -> Config:
    """The config of a file, or the default one, with `key=value` overrides."""
    given = toml_text.read(Path(path)) if path is not None else {}
    for other in ("compare", "tune", "learn"):  # what the commands of these names do with this run
        given.pop(other, None)
    return from_table(given, overrides, source=str(path) if path is not None else "the defaults")


def from_table(given: Mapping[str, Any], overrides: Iterable[str] = (), *, source: str = "the config") -> Config:
    """A checked config from plain tables; what is left out has its default."""
    table = _with_tables(overridden(_with_tables(given), overrides, source))
    fields = [f.name for f in dataclasses.fields(Config)]
    refuse_outside_sections(table, fields)
    refuse_unknown(table, fields, "")
    hints = hints_of(Config)
    checked: TomlTable = {key: parts.read(key, table[key], hints[key]) for key in _scalars() if key in table}
    rounds = checked.get("rounds", Config.rounds)
    for section in KINDS:
        checked[section] = _chosen(section, table.get(section, {}), rounds)
    checked["engine"] = _engine(table.get("engine", {}))
    for section, kind in (TASK | FIXED).items():
        known = {f.name: Option(hints_of(kind)[f.name], f.default) for f in dataclasses.fields(kind)}
        checked[section] = kind(**_section(section, table, known))
    defence.check(checked.get("defence"), checked.get("untrusted"))
    if checked.get("defence") is not None:
        chosen = checked["algorithm"]
        checked["algorithm"] = dataclasses.replace(chosen, built=defence.defended(chosen.built, checked["untrusted"]))
        checked["limits"] = defence.bounded(checked["limits"])
    refuse_idle_rounds(checked["algorithm"].built, rounds)
    return Config(**checked)


def _scalars() -> list[str]:
    return [f.name for f in dataclasses.fields(Config) if f.name not in (*KINDS, "engine", *TASK, *FIXED)]


def _set_options(section: Any) -> TomlTable:
    """A section's settings without those that are not set."""
    return {key: value for key, value in vars(section).items() if value is not None}


def _with_tables(given: Mapping[str, Any]) -> TomlTable:
    """The tables, with `data = "mnist"` spelled `data = {name = "mnist"}`."""
    named = (*KINDS, "engine")
    spelled = {k: {"name": v} if k in named and isinstance(v, str) else v for k, v in given.items()}
    for key in (*KINDS, "engine", *TASK, *FIXED):
        if not isinstance(spelled.get(key, {}), Mapping):
            raise Invalid(f"{key} = {spelled[key]!r} must be a table: write [{key}] and its settings below it")
    return spelled


def _chosen(section: str, given: TomlTable, rounds: int) -> NamedOptions:
    """A named section: the options given, and of the default section those that belong to this name as well."""
    kind, default = KINDS[section], DEFAULTS[section]
    name, factory = kind.find(given.get("name", default["name"]))
    known = section_options(section, name)
    for key, place in kind.elsewhere.items():
        if key in given:
            raise Invalid(f"{section}.{key} = {given[key]!r} is not set here: it comes from {place}")
    own = {key: value for key, value in given.items() if key != "name"}
    wanted = {**offered(section, name, known), **own}
    built: Any
    if section == "algorithm":
        own = with_horizons(own, rounds)
        wanted = {**wanted, **own}
        if isinstance(own.get("optimiser"), Mapping):  # it has a learning rate of its own
            wanted = {key: value for key, value in wanted.items() if key != "lr" or key in own}
        built, options = recipes.built(factory, wanted, key=section, explicit=own)
    else:
        options = parts.read_options(section, wanted, known, name)
        # settings that contradict each other are refused here
        built = None if kind.needs_data else parts.made(section, lambda: kind.build(name, options), {})
    return NamedOptions(name=name, options=with_defaults(section, name, options), built=built)


def _engine(given: TomlTable) -> TomlTable:
    """The engine's settings; the default engine's name is left out."""
    if not isinstance(given, Mapping):
        raise Invalid(f"engine = {given!r} must be a table, or the name of an engine: {', '.join(ENGINES)}")
    usual, name = next(iter(ENGINES)), given.get("name", next(iter(ENGINES)))
    if not isinstance(name, str) or name not in ENGINES:
        raise Invalid(f"engine.name = {name!r} is not one of {', '.join(ENGINES)}{nearest(name, ENGINES)}")
    known = engine_options(name)
    own = {key: value for key, value in given.items() if key != "name"}
    for key, value in given.items():
        owner = next((other for other in ENGINES if key in engine_options(other)), name)
        if key != "name" and key not in known and owner != name:
            if value == engine_options(owner)[key].default:  # a stored run names all settings of its engine
                del own[key]
                continue
            raise Invalid(
                f"engine.{key} = {value!r} is a setting of the engine {owner!r}, and this run's is {name!r}: choose it "
                f"with engine={owner}, or drop the setting with `engine.{key}=`"
            )
    return {**({} if name == usual else {"name": name}), **_section("engine", {"engine": own}, known)}


def _section(section: str, table: TomlTable, known: Mapping[str, Option]) -> TomlTable:
    options = parts.read_options(section, table.get(section, {}), known, section)
    return filled(known, options, {key: option.default for key, option in known.items()})
