"""The config of a deployment: that of any run, with `[deploy]`, and `federation.py` in place of named data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import capability
from consilience.core.settings import Count, Invalid, NonNegative, Option, Positive, Whole, check, hints_of
from consilience.experiments.assembly import try_surroundings
from consilience.experiments.config.catalogue import KINDS
from consilience.experiments.config.config import Config, from_table
from consilience.experiments.config.overrides import overridden
from consilience.flower.messages.mail import Waiting
from consilience.flower.secure import eligibility
from consilience.flower.secure.terms import Levels, Neighbours, SecureTerms, Share
from consilience.options import parts
from consilience.privacy import SpendsPrivacy
from consilience.runs import toml_text
from consilience.runs.names import safe_name

CONFIG, FEDERATION = "config.toml", "federation.py"
DEPLOYED = {"max_growth": 5.0, "examples_ratio": 10.0}  # [limits] that only deployments have by default
OWN = ("data", "partition", "model", "data_dir")  # federation.py replaces these


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """The clients, the server's waiting times in real seconds, and secure aggregation.

    clients: in the whole federation. classes: of the targets; left out in a regression. min_available: clients that
    must be connected for a round to begin; left out, all at first and any number later. deadline: for a whole
    reply. wait: for enough clients. retries, pause: how often, and after how many seconds (then twice that ...), a
    round without answers is repeated.

    secure_aggregation (experimental): the server sees only the sum of the replies. secure_clip: no value of an update
    counts for more. secure_levels: number of levels from -clip to clip. secure_threshold: more than this share of the
    nodes must stay connected to the end of a round. secure_neighbours: with how many others, at random, each node
    shares keys; left out, with all. secure_colluding: in private sums, nodes that may reveal their noise to the server.
    clear_tests: whether clients of secure sums report results on their test rows in clear; left out, yes, except in
    private sums: there a model's quality is known only if the server has test rows.
    """

    clients: Count = 4
    classes: Count | None = None
    min_available: Count | None = None
    deadline: Positive = 600.0
    wait: Positive = 300.0
    retries: Whole = 3
    pause: NonNegative = 5.0
    secure_aggregation: bool = False
    secure_clip: Positive = 8.0
    secure_levels: Levels = 1 << 22
    secure_threshold: Share = 0.5
    secure_neighbours: Neighbours | None = None
    secure_colluding: Whole = 0
    clear_tests: bool | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.min_available is not None and self.min_available > self.clients:
            raise Invalid(f"deploy.min_available = {self.min_available} is more than deploy.clients = {self.clients}")
        if self.clear_tests is not None and not self.secure_aggregation:
            raise Invalid("deploy.clear_tests has no effect without deploy.secure_aggregation: the server sees replies")

    @property
    def waiting(self) -> Waiting:
        """How long the server waits."""
        return Waiting(deadline=self.deadline, wait=self.wait, retries=self.retries, pause=self.pause)


@dataclass(frozen=True, kw_only=True)
class DeployedConfig(Config):
    """All settings of a deployed run; with `own`, data and model come from federation.py."""

    deploy: Deploy = field(default_factory=Deploy)
    own: bool = True

    @property
    def label(self) -> str:
        """What the run folder is called."""
        return self.name or (f"{self.algorithm.name}-deployed" if self.own else Config.label.fget(self))  # type: ignore[attr-defined]

    def table(self) -> dict[str, Any]:
        """Every setting in plain values."""
        table = Config.table(self)
        if self.own:
            table = {key: value for key, value in table.items() if key not in OWN}
            table |= {"data": {"name": FEDERATION}, "partition": {"name": "as it is"}, "model": {"name": FEDERATION}}
        known = {key: value for key, value in vars(self.deploy).items() if value is not None}
        return {**table, "deploy": parts.write(known)}

    @property
    def kept_memories(self) -> int:
        """How many memories of each client its node keeps on disk, so that every kept checkpoint finds its own."""
        return self.checkpoint.every * self.checkpoint.keep + 2

    def build_algorithm(self) -> Algorithm:
        """The algorithm that the settings name; in private secure sums clients clip and add the noise."""
        built, deploy = self.algorithm.built, self.deploy
        if not deploy.secure_aggregation:
            return built
        return eligibility.with_noise_shares(
            built,
            clients=deploy.clients,
            nodes=deploy.min_available or deploy.clients,
            colluding=deploy.secure_colluding,
            clip=deploy.secure_clip,
            threshold=deploy.secure_threshold,
        )

    def build_terms(self) -> SecureTerms | None:
        """The terms of secure sums; None if replies are sent in clear."""
        deploy = self.deploy
        if not deploy.secure_aggregation:
            return None
        terms = eligibility.secure_terms(
            self.build_algorithm(),
            clip=deploy.secure_clip,
            levels=deploy.secure_levels,
            threshold=deploy.secure_threshold,
            neighbours=deploy.secure_neighbours,
            clear_tests=deploy.clear_tests,
        )
        eligibility.refuse_settings(
            clients=deploy.clients,
            min_available=deploy.min_available,
            levels=deploy.secure_levels,
            limits=self.limits,
            tests_each_model=self.evaluation.local,
            validates=self.validation.share is not None,
            clear_tests=terms.clear_tests,
        )
        return terms


def load(folder: Path, case: str = "", overrides: Iterable[str] = ()) -> DeployedConfig:
    """The config of an app: `config.toml`, or with a case `cases/CASE.toml`; everything is checked."""
    file = Path(folder) / "cases" / f"{safe_name(case, 'case')}.toml" if case else Path(folder) / CONFIG
    given = toml_text.read(file)
    return from_given(given, overrides, own=(Path(folder) / FEDERATION).exists() and not case, source=str(file))


def from_given(
    given: Mapping[str, Any], overrides: Iterable[str] = (), *, own: bool, source: str = CONFIG
) -> DeployedConfig:
    """A checked config from plain tables."""
    spelled = {key: {"name": it} if key in KINDS and isinstance(it, str) else it for key, it in given.items()}
    table = overridden(spelled, overrides, source)
    section = table.pop("deploy", {})
    if not isinstance(section, Mapping):
        raise Invalid(f"deploy = {section!r} must be a table: write [deploy] and its settings below it")
    known = {f.name: Option(hints_of(Deploy)[f.name], f.default) for f in dataclasses.fields(Deploy)}
    deploy = Deploy(**parts.read_options("deploy", section, known, "deploy"))
    for key in OWN if own else ():
        if key in table:
            raise Invalid(f"{source}: {key} comes from {FEDERATION} in a deployment: leave it out here")
    base = from_table(_with_limits(table), source=source)
    private = capability(base.algorithm.built.server, SpendsPrivacy) is not None
    if private:  # the usual limits compare clients with each other, and its own bound holds for every update
        base = from_table(table, source=source)
    if own and base.evaluation.validation is not None:
        raise Invalid(f"{source}: evaluation.validation is not supported with {FEDERATION}: give test rows there")
    if base.engine.get("lane") == "auto":  # one process per message: measuring would not pay
        base = base.changed(lane="serial")
    settings = {f.name: getattr(base, f.name) for f in dataclasses.fields(Config)}
    config = DeployedConfig(**settings, deploy=deploy, own=own)
    config.build_terms()  # and with it the algorithm: both are checked before anything starts
    if private:
        surroundings = SimpleNamespace(environment=config.environment.built)
        try_surroundings(config, config.build_algorithm(), surroundings)
    return config


def _with_limits(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the limits that deployments have unless others are given."""
    given = table.get("limits", {})
    if not isinstance(given, Mapping):
        return dict(table)
    usual = {key: value for key, value in DEPLOYED.items() if key != "max_growth" or "defence" not in table}
    return {**table, "limits": {**usual, **given}}
