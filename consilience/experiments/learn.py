"""A schedule of aggregation weights, learned for the run that a config describes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from consilience import environments
from consilience.core.settings import Invalid
from consilience.experiments.assembly import assemble
from consilience.experiments.config.config import Config
from consilience.meta.learning import Iteration, learning
from consilience.meta.schedule import Schedule
from consilience.runs.text import duration

USUAL = {"iterations": 400, "lr": 0.001}


def learn(config: Config, out: Path, *, console: Console | None = None, **options: Any) -> Schedule:
    """Learn the weights of the config's rounds and clients, and write them to `out`; the start model is the run's own.

    What is not given, iterations and learning rate, is what the environment's paper used, else 400 and 0.001.
    """
    if out.exists():
        raise Invalid(f"{out} is there already: give another --out, or remove it")
    simulation = assemble(config)
    paper = environments.preset(config.environment.name, **config.environment.options).settings.get("unfolding", {})
    settings = {**USUAL, **paper, **{name: value for name, value in options.items() if value is not None}}
    steps = learning(simulation.algorithm, simulation.engine, rounds=config.rounds, seed=config.seed, **settings)
    losses = []
    for step in shown(steps, settings["iterations"], console) if console else steps:
        losses.append(step.loss)
    schedule = Schedule(weights=step.weights, losses=torch.tensor(losses, dtype=torch.float64), gradient=step.gradient)
    schedule.save(out)
    return schedule


def shown(steps: Iterator[Iteration], iterations: int, console: Console) -> Iterator[Iteration]:
    """Pass iterations on; a live bar on a terminal, twenty plain lines anywhere else."""
    began, every = time.monotonic(), max(1, iterations // 20)
    columns = (TextColumn("run {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("first run", total=iterations)
        for step in steps:
            left = (time.monotonic() - began) / step.number * (iterations - step.number)
            text = f"loss {step.loss:.6g}  left {duration(left)}"
            bar.update(task, completed=step.number, description=text)
            if not console.is_terminal and (step.number % every == 0 or step.number == 1):
                console.print(f"run {step.number}/{iterations}  {text}", highlight=False, soft_wrap=True)
            yield step
