"""A schedule of aggregation weights, learned for the run that a config describes."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from consilience import environments
from consilience.core.settings import Invalid, Option, nearest, options_of
from consilience.experiments import learn_file
from consilience.experiments.assembly import Simulation, assemble
from consilience.experiments.config import config as configs
from consilience.experiments.config.catalogue import KINDS
from consilience.experiments.config.config import Config
from consilience.experiments.config.overrides import overridden
from consilience.meta.initial import Initial
from consilience.meta.learning import Iteration, learn_schedule, learned, learning
from consilience.meta.schedule import Schedule
from consilience.meta.transfer import FittedRule, fit_rule
from consilience.options import parts
from consilience.runs import identity, toml_text
from consilience.runs.text import duration
from consilience.server.averaging.weighting.schedule import ScheduleWeights
from consilience.server.averaging.weighting.transferred import FEATURES, Feature, save_rule
from consilience.server.protocols import Weighting

SETTINGS = ("iterations", "lr", "gradient", "constraint", "keep", "loss")  # and `initial`, which a file names as text
USUAL = {name: option.default for name, option in options_of(learn_schedule).items() if name in SETTINGS}
COUNTING = ("fedavg", "duw_fedavg")  # with a rule that reads labels, both are duw_fedavg, whose clients count them


class Stopped(NamedTuple):
    """Learning that a signal ended: what is in the file, and the signal."""

    schedule: Schedule
    signal: int


def learn(
    config: Config,
    out: Path,
    *,
    console: Console | None = None,
    initial: str = "",
    resume: bool = False,
    **options: Any,
) -> Schedule | Stopped:
    """Learn the weights of the config's rounds and clients, and write them to `out`; the start model is the run's own.

    Default iterations and learning rate: those of the environment's paper, else 400 and 0.001.
    initial: the file of a table, the name of a weighting, "own" for the algorithm's weighting; else N_k / N.
    resume: continue what `out` holds, exactly; it may be finished and get more iterations.
    """
    saved = learn_file.read(out) if resume else None
    if saved is None:
        refuse_existing(out)
    paper = environments.preset(config.environment.name, **config.environment.options).settings.get("unfolding", {})
    settings = {**USUAL, **paper, **{name: value for name, value in options.items() if value is not None}}
    facts = {"config": identity.settings(config.table()), "code": identity.code()}
    kept = {name: value for name, value in settings.items() if name not in ("iterations", "keep")}
    facts["learn"] = {**kept, "initial": initial}
    if saved is not None:
        saved.refuse_changes(facts)  # before the data are read, which may take long
        config = config.changed(**saved.facts.get("engine", {}))  # the lane that was measured then
    simulation = assemble(config)
    facts["fingerprint"] = {**simulation.prints, "threads": torch.get_num_threads()}
    if saved is not None:
        saved.refuse_changes({"fingerprint": facts["fingerprint"]})
        if saved.done >= settings["iterations"]:
            return saved.schedule()
    settings |= {"rounds": config.rounds, "seed": config.seed}
    settings |= {"initial": first_weights(initial, simulation)} if saved is None else {"resume": saved.state}
    writer = learn_file.Writer(path=out, facts=facts, engine=simulation.engine)
    steps = writer.through(learning(simulation.algorithm, simulation.engine, **settings), settings["iterations"])
    done = 0 if saved is None else saved.done
    schedule = learned(shown(steps, settings["iterations"], console, done) if console else steps)
    return Stopped(schedule, writer.stopped) if writer.stopped else schedule


def settings_in(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(the settings of learning in the config's table [learn] and in `learn.KEY=VALUE`, the other arguments)."""
    path = next((text for text in arguments if "=" not in text), None)
    mine = [text for text in arguments if "=" in text and text.partition("=")[0].partition(".")[0] == "learn"]
    table = overridden({"learn": {} if path is None else toml_text.read(Path(path)).get("learn", {})}, mine, "learn")
    if not isinstance(table["learn"], dict):
        raise Invalid(f"learn = {table['learn']!r} must be a table: write [learn] and its settings below it")
    known = {name: option for name, option in options_of(learn_schedule).items() if name in SETTINGS}
    known["initial"] = Option(str, "")
    return parts.read_options("learn", table["learn"], known, "learn"), [text for text in arguments if text not in mine]


def fit(config: Config, schedule: Schedule, out: Path, features: tuple[Feature, ...]) -> FittedRule:
    """Fit a rule of these features to the schedule of this config's run, and write it to `out`."""
    simulation = assemble(config)
    engine = simulation.engine
    if not engine.task.kind.class_per_row:
        features = tuple(name for name in features if name != "label_entropy")
    found = fit_rule(schedule.weights, simulation.algorithm, engine, features=features, seed=config.seed)
    quality = {"divergence": found.divergence, "divergence_by_examples": found.by_examples}
    save_rule(found.rule, out, clients=schedule.weights.shape[1], **quality)
    return found


def rule_features(config: Config, text: str) -> tuple[Feature, ...]:
    """The features that a value of `--features` names; by default all that a rule for this algorithm can read."""
    counts = config.algorithm.name in COUNTING
    usable = tuple(name for name in FEATURES if counts or name != "label_entropy")
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in usable:
            known = f"known for {config.algorithm.name}: {', '.join(usable)}{nearest(word, usable)}"
            raise Invalid(f"--features = {word!r} is not a feature; {known}")
    return tuple(name for name in usable if not words or name in words)


def refuse_existing(*files: Path | None) -> None:
    """Refuse to overwrite files, before any work."""
    for file in files:
        if file is not None and file.exists():
            raise Invalid(f"{file} is there already: give another name, remove it, or continue it with --resume")


def first_weights(initial: str, simulation: Simulation) -> Initial:
    """The initial weights for a value of `--initial`."""
    if not initial:
        return None
    if initial == "own":
        own: Weighting = simulation.algorithm.server.weighting  # type: ignore[attr-defined]
        return own
    if Path(initial).suffix == ".safetensors":
        return ScheduleWeights(path=initial)
    weighting: Weighting = parts.build("initial", initial, Weighting)
    return weighting


def usage(arguments: Sequence[str], out: Path) -> str:
    """The command that uses these weights in the run they were learned for, checked as `run` would."""
    recipe = KINDS["algorithm"].find(_loaded(arguments).algorithm.name)[1]
    own = [f"algorithm.schedule={out}"] if "schedule" in options_of(recipe) else None
    return _command(arguments, own or _weighting(arguments, "schedule", out))


def rule_usage(arguments: Sequence[str], rule: FittedRule, out: Path) -> str:
    """The command that uses a rule in the run it was learned for; settings of other clients and rounds can be added."""
    if "labels" not in rule.rule.reads:
        return _command(arguments, _weighting(arguments, "transferred", out))
    kept = [text for text in arguments if text not in {f"algorithm={name}" for name in COUNTING}]
    return _command(kept, ["algorithm=duw_fedavg", f"algorithm.rule={out}"])


def _loaded(arguments: Sequence[str]) -> Config:
    """The config of these arguments of `run`."""
    path = next((text for text in arguments if "=" not in text), None)
    return configs.load(path, [text for text in arguments if "=" in text])


def _weighting(arguments: Sequence[str], name: str, out: Path) -> list[str]:
    """Overrides that replace the algorithm's weighting by one with a file."""
    if "weighting" in _loaded(arguments).algorithm.options:  # a whole table, so that nothing is left of the other one
        return [f'algorithm.weighting={{name = "{name}", path = "{out}"}}']
    return [f"algorithm.weighting.name={name}", f"algorithm.weighting.path={out}"]


def _command(arguments: Sequence[str], more: list[str]) -> str:
    """`consilience run` with further overrides, and with those removed that they make idle."""
    given = [*arguments, *more]
    for _ in options_of(KINDS["algorithm"].find(_loaded(arguments).algorithm.name)[1]):
        try:
            _loaded(given)
            break
        except Invalid as problem:  # an option of the weighting that is replaced, such as DR-FedAvg's q
            idle = re.match(r"algorithm\.(\w+) = .* has no effect", str(problem))
            if idle is None:
                raise
            given.append(f"algorithm.{idle[1]}=")
    return shlex.join(["consilience", "run", *given])


def shown(steps: Iterator[Iteration], iterations: int, console: Console, done: int = 0) -> Iterator[Iteration]:
    """Pass iterations on; a live bar on a terminal, twenty plain lines anywhere else."""
    began, every = time.monotonic(), max(1, iterations // 20)
    columns = (TextColumn("run {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("first run", total=iterations, completed=done)
        for step in steps:
            left = (time.monotonic() - began) / (step.number - done) * (iterations - step.number)
            text = f"loss {step.loss:.6g}  left {duration(left)}"
            bar.update(task, completed=step.number, description=text)
            if not console.is_terminal and (step.number % every == 0 or step.number == done + 1):
                console.print(f"run {step.number}/{iterations}  {text}", highlight=False, soft_wrap=True)
            yield step
