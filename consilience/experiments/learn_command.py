"""`consilience learn`: learns aggregation weights by deep unfolding, fits a rule to them, studies their variance."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from consilience.runs.failures import guarded

if TYPE_CHECKING:  # PyTorch takes seconds to import: `--help` must not wait for it
    from consilience.experiments.config.config import Config
    from consilience.meta.schedule import Schedule


def learn(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...", help="As for `run`: the run to learn weights for.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the weights go.")] = Path("schedule.safetensors"),
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Unfolded runs; the environment's paper's, or 400.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the weights; 0.001.")] = None,
    gradient: Annotated[str | None, typer.Option(help="auto, server, reported, autograd or full; auto.")] = None,
    constraint: Annotated[str | None, typer.Option(help="square, softmax or raw weights; square.")] = None,
    keep: Annotated[
        str | None, typer.Option(help="Where received models are stored: device, cpu or nothing; device.")
    ] = None,
    initial: Annotated[
        str | None,
        typer.Option(help="First weights: a .safetensors table, a weighting's name, or own; rows of each client."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Loss that the weights minimise: task, squared_error or squared_error_logits; task."),
    ] = None,
    rule: Annotated[Path | None, typer.Option(help="Fit a rule for other clients to the weights, and save it.")] = None,
    features: Annotated[
        str, typer.Option(help="The rule's client features, such as size,loss; all that the algorithm can read.")
    ] = "",
    variance: Annotated[
        str, typer.Option(help="Rounds such as 2,5,10: learn weights for each, and print their variance.")
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what --out holds, exactly: after a kill, or for more iterations.")
    ] = False,
    results: Annotated[Path | None, typer.Option(help="Losses, weights and variance as JSON rows.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of the weights (needs matplotlib).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the file.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Learn aggregation weights for every round and client (deep unfolding), and save them.

    The first seven settings can also stand in the config's table [learn], or as learn.KEY=VALUE; options come first.
    """
    named: dict[str, Any] = {"iterations": iterations, "lr": lr, "gradient": gradient, "constraint": constraint}
    named |= {"keep": keep, "initial": initial, "loss": loss}

    def work() -> int:
        from rich.console import Console

        from consilience.core.settings import Invalid
        from consilience.experiments import learn
        from consilience.experiments.config import config
        from consilience.meta.schedule import variance_table

        stored, given = learn.settings_in(arguments or [])
        options = {**stored, **{name: value for name, value in named.items() if value is not None}}
        settings = config.load(next((text for text in given if "=" not in text), None), [t for t in given if "=" in t])
        console, screen = None if quiet else Console(stderr=True), Console()
        studied = rounds_in(variance) or [settings.rounds]
        files = {rounds: numbered(out, rounds) if variance else out for rounds in studied}
        read = learn.rule_features(settings, features)
        if features and rule is None:
            raise Invalid("--features has no effect without --rule")
        learn.refuse_existing(*(() if resume else files.values()), rule, results)
        found = []
        for rounds, file in files.items():
            begun = resume and (file.exists() or not variance)  # a study may have ended between two of its files
            schedule = learn.learn(
                dataclasses.replace(settings, rounds=rounds), file, console=console, resume=begun, **options
            )
            if isinstance(schedule, learn.Stopped):
                done = f"stopped after run {len(schedule.schedule.losses)}: the same command with --resume goes on"
                Console(stderr=True).print(done, highlight=False)
                return 128 + schedule.signal
            found.append(schedule)
            if not quiet:
                screen.print(schedule.text(), highlight=False, soft_wrap=True)
                if schedule.note():
                    screen.print(f"note: {schedule.note()}", highlight=False, markup=False, soft_wrap=True)
        if plot is not None:
            found[-1].plot(plot)
        if results is not None:
            results.parent.mkdir(parents=True, exist_ok=True)
            rows = [row(settings, schedule) for schedule in found]
            results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        if quiet:
            print("\n".join(str(file) for file in files.values()))
            screen = Console(quiet=True)
        if variance:
            screen.print(variance_table(found), highlight=False, soft_wrap=True)
        else:
            screen.print(f"saved: {out}", highlight=False, soft_wrap=True)
            screen.print(f"use it: {learn.usage(given, out)}", highlight=False, markup=False, soft_wrap=True)
        if rule is not None:
            told = learn.fit(dataclasses.replace(settings, rounds=studied[-1]), found[-1], rule, read)
            screen.print(
                f"rule: {rule}; its weights are {told.divergence:.4g} nats from the learned ones, N_k / N "
                f"{told.by_examples:.4g}",
                highlight=False,
                soft_wrap=True,
            )
            advice = learn.rule_usage(given, told, rule)
            screen.print(f"use the rule: {advice}", highlight=False, markup=False, soft_wrap=True)
        return 0

    guarded(work, debug)


def rounds_in(text: str) -> list[int]:
    """The numbers of a list such as 2,5,10, ascending."""
    from consilience.core.settings import Invalid

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise Invalid(f"--variance = {text!r} is not a list of numbers of rounds: write 2,5,10")
    return sorted({int(word) for word in words})


def numbered(out: Path, rounds: int) -> Path:
    """`schedule.safetensors` -> `schedule_5.safetensors`."""
    return out.with_name(f"{out.stem}_{rounds}{out.suffix}")


def row(config: Config, schedule: Schedule) -> dict[str, Any]:
    """The stored description of a schedule."""
    return {
        "environment": config.environment.name,
        "seed": config.seed,
        "algorithm": config.algorithm.name,
        "rounds": len(schedule.weights),
        "iterations": len(schedule.losses),
        "losses": [schedule.losses[0].item(), schedule.losses[-1].item()],
        "variance": float(schedule.variance().mean()),
        "weights": [[round(weight, 6) for weight in weights] for weights in schedule.weights.tolist()],
    }
