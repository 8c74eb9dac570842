"""Writes the tables in algorithms.md from the recipes, their parts and one measured round of each recipe.

`python docs/make_algorithms.py` writes them; with `--check` it fails if they are not up to date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from consilience import algorithms, models
from consilience.algorithms._common import averaged
from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.rounds import Round, run
from consilience.core.settings import Option, options_of
from consilience.engines.vectorised.engine import Vectorised
from consilience.models.siamese import siamese_heads
from consilience.options.parts import name_of, parts_of
from consilience.selection import Everyone
from consilience.server.averaging.weighting.schedule import ScheduleWeights
from consilience.server.rules.public_rows import NoiseRows
from consilience.task.task import Task

PAGE = Path(__file__).with_name("algorithms.md")
BEGIN, END = "<!-- table: written by docs/make_algorithms.py -->", "<!-- end of table -->"
BEGIN_OPTIONS, END_OPTIONS = "<!-- options: written by docs/make_algorithms.py -->", "<!-- end of options -->"
NONE = "—"
CLIENTS, ROWS, INPUTS, CLASSES = 12, 32, (1, 8, 8), 10
PLAIN = ("dp_fedavg", "fedma")  # refuse the heads: their batch norm, or a head that the forward does not use
ADAPTED = ("fedit", "ffa_lora", "flora", "flexlora", "hetlora")  # on frozen layers with low-rank adapters
LABELS = ("Use when", "Not when", "Cost")
HEADER = (
    "method",
    "paper",
    "changes",
    "keeps",
    "down / up",
    "client work",
    "server sees",
    "use when",
    "not when",
    "cost",
)


def needed(name: str, clients: int) -> dict[str, Any]:
    """Required options of a recipe."""
    if name.startswith("duw_"):
        return {"weighting": ScheduleWeights(table=((1 / clients,) * clients,))}
    if name in ("fedaf", "feddm"):
        return {"shape": INPUTS}
    options: dict[str, dict[str, Any]] = {"fedsplit": {"step": 1.0}, "fedprox_fedsplit": {"step": 1.0}}
    options["hetlora"] = {"ranks": (2, 4, 8)}
    return {**options, "feddf": {"public": NoiseRows(shape=INPUTS)}}.get(name, {})


class Counting(Vectorised):
    """An engine that counts the multiplications of clients."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.flops = 0

    def exchange(self, *arguments: Any, **options: Any) -> Any:
        """As usual, counted."""
        with FlopCounterMode(display=False) as counter:
            cohort = super().exchange(*arguments, **options)
        self.flops += counter.get_total_flops()
        return cohort


def build(name: str, clients: int = CLIENTS) -> Algorithm:
    """The recipe with its defaults and required options."""
    return algorithms.recipe(name)(**needed(name, clients))


def engine(name: str = "") -> Counting:
    """Clients of one distribution, and a small network with all heads that methods need."""
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(ROWS, *INPUTS, generator=draw), torch.randint(0, CLASSES, (ROWS,), generator=draw))
        for _ in range(CLIENTS)
    ]
    federation = Federation.from_clients(clients, classes=CLASSES)
    network = models.build("lora_mlp" if name in ADAPTED else "mlp", INPUTS, CLASSES, seed=0)
    if name not in (*PLAIN, *ADAPTED):
        network = siamese_heads(network, projection=32)
    federation = federation.pooled() if name == "centralised" else federation
    task = build(name).prepared(Task(network)) if name in ADAPTED else Task(network)
    return Counting(task, federation, device="cpu", lane="serial", clients_at_once=64)


def described(name: str) -> dict[str, str]:
    """Cells of a row that need no run, from the docstring and the parts."""
    algorithm, said = build(name), sections(name)
    return {
        "method": f"`{name}`",
        "paper": said["paper"],
        "changes": ", ".join(dict.fromkeys(differences(algorithm, build("fedavg")))) or "nothing",
        "keeps": kept(name, engine(name).start()),
        "server sees": "each reply" if algorithm.server.needs_each_reply else "a sum",
        **{label.lower(): said[label] for label in LABELS},
    }


def measured(name: str, fedavg_work: float = 1.0) -> dict[str, str]:
    """Cells from a round of all clients: traffic per client, and multiplications per row relative to FedAvg."""
    one, work = worked(name, engine(name))
    if name in PLAIN:  # on a network of its own
        fedavg_work = worked("fedavg", engine(name))[1]
    model = tree.nbytes(one.model)
    if name in ADAPTED:  # adapters and head are the model, as they are for FedAvg
        usual = engine("fedit")
        model, fedavg_work = tree.nbytes(usual.start()), worked("fedavg", usual)[1]
    down, up = one.bytes_down / len(one.chosen) / model, one.bytes_up / max(1, len(one.cohort)) / model
    work /= fedavg_work
    return {"down / up": f"{number(down)} / {number(up)}", "client work": number(work)}


def worked(name: str, counting: Counting) -> tuple[Round, float]:
    """A round of all clients, and its multiplications per row."""
    algorithm = build(name)
    if name not in ("centralised", "dp_fedavg"):  # in which all clients take part anyway
        algorithm = dataclasses.replace(algorithm, selection=Everyone())
    one = next(run(algorithm, counting, rounds=1))
    return one, counting.flops / float(one.cohort.examples.sum())


def sections(name: str) -> dict[str, str]:
    """The paper and the labelled sentences of the docstring."""
    text = inspect.getdoc(algorithms.recipe(name)) or ""
    paper, colon, _ = text.partition("\n")[0].partition(": ")
    found = {"paper": paper if colon and not paper.lower().startswith("no paper") else NONE}
    for label in LABELS:
        match = re.search(rf"^{label}: (.*?)(?=\n\s*\n|\n(?:{'|'.join(LABELS)}): |\Z)", text, re.DOTALL | re.MULTILINE)
        found[label] = " ".join(match[1].split()).rstrip(".").replace("|", "\\|") if match else NONE
    return found


def differences(part: Any, usual: Any, role: str = "") -> list[str]:
    """Names of the parts that differ from FedAvg's."""
    if part == usual:
        return []
    if isinstance(part, tuple):
        known = usual if isinstance(usual, tuple) else ()
        return [f"{role.removesuffix('s')} `{name_of(type(one))}`" for one in part if one not in known]
    if not dataclasses.is_dataclass(part):
        return []
    found = [] if type(part) is type(usual) else [f"{role} `{name_of(type(part))}`"]
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if type(part) is type(usual):
            found += differences(value, getattr(usual, field.name), field.name)
        elif type(value) is type(usual):  # the usual part inside another one
            found += differences(value, usual, field.name)
    return found


def kept(name: str, start: tree.Tree) -> str:
    """State of server and clients beyond the global model, in units of one model."""
    algorithm, model = build(name), tree.nbytes(start)
    few, many = (tree.nbytes(build(name, k).server.init(start, k)) / model for k in (CLIENTS, 2 * CLIENTS))
    each = (many - few) / CLIENTS
    server = few - each * CLIENTS - 1
    client = sum(tree.nbytes(part.init(start)) for part in (algorithm.client, algorithm.channel)) / model
    said = [("server {}", server), ("server {} per client", each), ("client {}", client)]
    return ", ".join(form.format(amount(size)) for form, size in said if amount(size)) or "nothing"


def amount(models: float) -> str:
    """A size in models, in words."""
    if models < 1e-9:
        return ""
    return "a few numbers" if models < 0.02 else f"{number(models)} model{'s' if models > 1.01 else ''}"


def number(value: float) -> str:
    """Two decimals, so that the bytes of a loss or a counter do not show."""
    return f"{round(value, 2):g}" if value < 9.95 else f"{value:.0f}"


def table() -> str:
    """The whole table in Markdown."""
    work = float(measured("fedavg")["client work"])
    lines = [HEADER, ("---",) * len(HEADER)]
    for name in algorithms.names():
        cells = {**described(name), **measured(name, work)}
        lines.append(tuple(cells[column] for column in HEADER))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def options() -> str:
    """Every recipe's own options, then every part with its options, in Markdown."""
    shared = set(options_of(averaged))
    lines = ["| method | own options |", "|---|---|"]
    for name in algorithms.names():
        own = {key: option for key, option in options_of(algorithms.recipe(name)).items() if key not in shared}
        lines.append(f"| `{name}` | {settings(own) or NONE} |")
    for kind, protocol in part_kinds().items():
        lines += ["", f"| {kind} | | options |", "|---|---|---|"]
        for name, part in parts_of(protocol).items():
            about = (inspect.getdoc(part) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            lines.append(f"| `{name}` | {about} | {settings(dict(options_of(part))) or NONE} |")
    return "\n".join(lines)


def part_kinds() -> dict[str, type]:
    """The protocols of parts, by the option that takes them."""
    found: dict[str, type] = {}
    for name in algorithms.names():
        for key, option in options_of(algorithms.recipe(name)).items():
            for protocol in protocols_in(option.annotation):
                found.setdefault(f"`{key}`", protocol)
    unique = {protocol: key for key, protocol in reversed(found.items())}
    return {key: protocol for key, protocol in found.items() if unique[protocol] == key}


def protocols_in(annotation: Any) -> list[type]:
    """The protocols that an annotation names, in tuples and unions too."""
    if getattr(annotation, "_is_protocol", False):
        return [annotation]
    return [found for inner in typing.get_args(annotation) for found in protocols_in(inner)]


def settings(known: dict[str, Option]) -> str:
    """`option` = default, ..."""
    return ", ".join(f"`{key}`" + _default(option) for key, option in known.items())


def _default(option: Option) -> str:
    if option.required:
        return " (needed)"
    plain = isinstance(option.default, (bool, int, float, str, tuple)) and option.default not in ((), "")
    return f" = {canonical(option.default)}" if plain else ""


def canonical(value: Any) -> str:
    """A default as a config spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def page(text: str) -> str:
    """The page with new tables."""
    for begin, end, fresh in ((BEGIN, END, table), (BEGIN_OPTIONS, END_OPTIONS, options)):
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{fresh()}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Write the page, or check it."""
    text = PAGE.read_text(encoding="utf-8")
    fresh = page(text)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        sys.exit(f"{PAGE} is out of date: run python docs/make_algorithms.py")


if __name__ == "__main__":
    main()
