"""What one training step of a group reads and writes, from the shapes of its operations: no GPU is needed.

    python benchmarks/step_traffic.py [--only "fedavg,mlp compiled,vit"]

Traces a step of the cases of `rooflines.py`, applies the passes that a CUDA graph's step gets, and adds up the bytes of
the inputs and outputs of every operation, by kind. PyTorch's compiler fuses elementwise operations with neighbours, so
that these take less; products and convolutions remain as they are. Views count nothing, and neither does the update of
the weights, which follows the operations. Less than a minute on one core.
"""

from __future__ import annotations

import argparse
import math
import operator
from collections import Counter
from typing import Any

import torch
from rooflines import Case, cases
from torch import fx
from torch.utils import _pytree as pytree

from consilience.algorithms.fedavg import fedavg
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.engines.compiler.biases import add_biases_in_products
from consilience.engines.compiler.constant_casts import cast_constants_once
from consilience.engines.compiler.in_place import InPlace
from consilience.engines.compiler.small_embeddings import multiply_small_embeddings
from consilience.engines.compiler.thin_convolutions import multiply_thin_gradients
from consilience.engines.compiler.trace import Trace, origin
from consilience.engines.vectorised import program
from consilience.engines.vectorised.engine import Vectorised
from consilience.task.task import Task

PASSES = (multiply_thin_gradients, multiply_small_embeddings, add_biases_in_products, cast_constants_once)
VIEWS = (operator.getitem, torch.ops.aten._unsafe_view.default)  # besides those whose schema says so
SHOWN = 8  # kinds of operations
LANES = {"vit": "batched-matmul", "mobilenet": "serial"}  # where "auto" chooses; streams run one client at a time


class Traced(Exception):
    """Ends the run: the step is known."""

    def __init__(self, graph: fx.Graph, step: InPlace) -> None:
        super().__init__()
        self.graph, self.step = graph, step


def step_of(case: Case) -> Traced:
    """One traced step of all clients of a case."""
    clients, _, batch = case.size
    lane, precision = LANES.get(case.name, case.options["lane"]), case.options.get("precision", "full")
    data = [(case.rows(batch), torch.randint(0, 10, (batch,))) for _ in range(clients)]
    federation = Federation.from_clients(data, classes=10)
    how = {"lane": lane, "precision": precision, "device": "cpu", "clients_at_once": 4096}
    engine = Vectorised(Task(case.model()), federation, **how)

    def found(traced: Trace, leaves: int) -> InPlace:
        for change in PASSES:
            change(traced)
        raise Traced(traced.graph, InPlace(traced, leaves, products=True))

    program.HOT, program.InPlace = 0, found  # type: ignore[misc, assignment]
    try:
        next(run(fedavg(lr=0.1, batch_size=batch), engine, rounds=1))
    except Traced as step:
        return step
    raise RuntimeError("no step was traced")


def traffic(graph: fx.Graph) -> tuple[Counter[str], Counter[str]]:
    """(bytes, number) of the operations of each kind."""
    moved, number = Counter[str](), Counter[str]()
    for node in graph.nodes:
        if node.op != "call_function" or node.target in VIEWS or origin(node) is not node:
            continue
        read = [one for one in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(one, fx.Node)]
        written = [node] if "shape" in node.meta else list(node.users)
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        moved[name] += sum(map(_bytes, [*read, *written]))
        number[name] += 1
    return moved, number


def _bytes(node: fx.Node) -> int:
    return math.prod(node.meta["shape"]) * node.meta["dtype"].itemsize if "shape" in node.meta else 0


def report(case: Case) -> None:
    """Print the traffic of a case."""
    torch.manual_seed(0)
    step = step_of(case)
    moved, number = traffic(step.graph)
    updated: list[Any] = [*step.step.moves.added.values(), step.step.moves.multiplied, step.step.moves.copied]
    print(
        f"{case.name}, {case.size[0]} x {case.size[2]}: {sum(moved.values()) / 1e9:.2f} GB in {number.total()} "
        f"operations, and {sum(map(len, updated))} leaves updated"
    )
    for name, many in moved.most_common(SHOWN):
        print(f"{many / 1e6:10.0f} MB {number[name]:5} {name}", flush=True)


def main() -> None:
    """Print one table for every case asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="fedavg,mlp compiled,vit")
    asked = parser.parse_args().only.split(",")
    for case in cases():
        if case.name in asked:
            report(case)


if __name__ == "__main__":
    main()
