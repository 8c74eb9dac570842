"""The command `consilience show-algorithm`: equation, options, an example, cost and measured results."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from consilience.commands.help_text import algorithm_names
from consilience.runs.failures import guarded

if TYPE_CHECKING:
    from consilience.experiments.config.catalogue import Entry

_EQUAL = "{name='schedule', table=[[0.5, 0.5]]}"  # one round's weights of two clients, for every round
NEEDED: dict[str, tuple[str, ...]] = {
    "fedsplit": ("algorithm.step=1.0",),
    "fedprox_fedsplit": ("algorithm.step=1.0",),
    "feddf": ("algorithm.public={name='noise_rows', shape=[1, 8, 8]}",),
    "fedsiam_da": ("model=siamese", "model.backbone=mlp"),
    **dict.fromkeys(("duw_fedavg", "duw_fednova"), ("partition.clients=2", f"algorithm.weighting={_EQUAL}")),
    "hetlora": ("model=lora_mlp", "algorithm.ranks=[2, 4]"),
    **dict.fromkeys(("fedit", "ffa_lora", "flexlora", "flora"), ("model=lora_mlp",)),
}
"""Settings of the default run without which a method cannot be tried."""
LABELS = ("Use when", "Not when", "Cost")
METRICS = {"accuracy": "global", "clients_mean": "clients"}


def show_algorithm(
    name: Annotated[str, typer.Argument(help="The algorithm, such as simprox.", autocompletion=algorithm_names)],
    measure: Annotated[bool, typer.Option(help="Run two short rounds of the example to measure messages.")] = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Show one algorithm: its equation, options with ranges and defaults, an example, its cost and measured results."""

    def work() -> int:
        from rich.console import Console

        from consilience.core.settings import Invalid, nearest
        from consilience.experiments.config import catalogue

        known = {entry.name: entry for entry in catalogue.listing()["algorithms"]}
        spelled = name.lower().replace("-", "_")
        if spelled not in known:
            raise Invalid(f"{name!r} is no algorithm{nearest(spelled, known)}; `consilience list algorithms` has all")
        console = Console()
        for line in described(known[spelled], min(console.width, 100), measure):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return 0

    guarded(work, debug)


def described(entry: Entry, width: int, measure: bool = True) -> Iterator[str]:
    """Everything known about an algorithm, line by line."""
    from consilience.experiments.config import catalogue_text
    from consilience.experiments.config.catalogue_text import wrapped

    paper, colon, equation = entry.about.partition(": ")
    yield from textwrap.wrap(entry.headline, width)
    yield ""
    if colon:
        yield from wrapped(f"paper: {paper}", width, "")
        yield from wrapped(f"equation: {equation}", width, "")
    for label, text in _sections(entry.text).items():
        yield from wrapped(f"{label.lower()}: {text}", width, "") if label else ("", *textwrap.wrap(text, width), "")
    own, others = catalogue_text.split_options(entry)
    yield from ("", "options" if own else "options: the shared ones alone")
    for key, option in own.items():
        yield from wrapped(catalogue_text.option_text(key, option), width, "  ")
    yield from wrapped(f"shared: {', '.join(others)} (`consilience list options`)", width, "  ")
    yield from ("", "try it", f"  {command(entry.name)}", f"  {python(entry.name)}")
    if measure:
        yield from ("", "messages and memory", *_measured(entry.name, width))
    yield from ("", *_results(entry.name, width))


def command(name: str) -> str:
    """The command of a run on the default data that this algorithm supports."""
    settings = " ".join(f'"{text}"' if re.search(r"[\s'{\[]", text) else text for text in overrides(name))
    return f"consilience run {settings} rounds=5"


def overrides(name: str) -> list[str]:
    """The settings of that run."""
    return [f"algorithm={name}", *NEEDED.get(name, ())]


def python(name: str) -> str:
    """The same algorithm from Python."""
    options = [text.removeprefix("algorithm.") for text in NEEDED.get(name, ()) if text.startswith("algorithm.")]
    tables = [re.sub(r"\{name=(.*?), (\w+)=(.*)\}", r'{"name": \1, "\2": \3}', option) for option in options]
    given = ", ".join(["lr=0.1", *tables])
    return f"cs.train(model, federation, cs.{name}({given}))".replace("'", '"')


def _sections(text: str) -> dict[str, str]:
    """The paragraphs after the first: "" what it does, then the labelled sentences."""
    rest = text.partition("\n\n")[2]
    found, current = dict[str, str](), ""
    for line in rest.splitlines():
        label = next((label for label in LABELS if line.startswith(f"{label}: ")), None)
        if label is not None:
            current, line = label, line.removeprefix(f"{label}: ")
        found[current] = f"{found.get(current, '')} {line.strip()}".strip()
    return {label: body for label, body in found.items() if body}


def _measured(name: str, width: int) -> list[str]:
    """Messages and memory of two short rounds of the example, in models; the reason if they cannot be run."""
    import contextlib

    from consilience.core.settings import Invalid
    from consilience.experiments import preview
    from consilience.experiments.assembly import assemble
    from consilience.experiments.config import config
    from consilience.experiments.config.catalogue_text import wrapped

    try:
        settings = config.load(None, [*overrides(name), "partition.min_size=2", "partition.alpha=1.0"])
        with contextlib.closing(assemble(settings)) as simulation:
            size = preview.size(simulation)
            cost = preview.cost(simulation, size)
    except (Invalid, RuntimeError) as problem:
        return wrapped(f"not measured: {problem}", width, "  ")
    one = size.model_bytes
    told = [
        f"a client receives {_models(cost.bytes_down / one)} and sends {_models(cost.bytes_up / one)} in a round",
        f"a client keeps {_models(size.memory_bytes_a_client / one)} between rounds, "
        f"the server {_models(size.server_bytes / one)}",
        f"measured on the example: {size.parameters:,} parameters, {size.clients_a_round:g} of {size.clients} clients "
        "a round",
    ]
    return [line for text in told for line in wrapped(text, width, "  ")]


def _models(count: float) -> str:
    if count < 1e-9:
        return "nothing"
    if count < 0.02:
        return "a few numbers"
    return "1 model" if abs(count - 1) < 0.02 else f"{count:.3g} models"


def _results(name: str, width: int) -> list[str]:
    """How far ahead of FedAvg it was in the stored comparisons, in points of accuracy."""
    from consilience.diagnose.evidence import tasks
    from consilience.experiments.config.catalogue_text import wrapped

    found = list[str]()
    for task in tasks():
        told = []
        for metric, title in METRICS.items():
            for item in task.findings(metric):
                if item.method == name:
                    told.append(f"{title} {100 * item.difference:+.1f} ({item.verdict})")
        if told:
            found += wrapped(f"{task.task}: {', '.join(told)}. {task.strength}", width, "  ")
    if not found:
        return ["measured results: none stored for this method (docs/comparison.md)"]
    head = "measured results: points of accuracy ahead of fedavg, of the global model and of clients on their own rows"
    foot = "(larger, smaller: shown by paired tests; t only: by the t test and not by the exact one)"
    return [*wrapped(head, width, ""), *found, *wrapped(foot, width, "  ")]
