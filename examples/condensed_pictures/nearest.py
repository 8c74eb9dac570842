"""What do condensed pictures give away? `python examples/condensed_pictures/nearest.py`: distances to real ones."""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import consilience as cs
from consilience.algorithms.fedaf import fedaf
from consilience.algorithms.feddm import feddm
from consilience.core.exchange import Cohort

FEW = 3  # rows of a class at a client
METHODS = {
    "feddm, noise": lambda: feddm(start="noise"),
    "feddm, rows": lambda: feddm(start="rows"),
    "fedaf, noise": lambda: fedaf(start="noise"),
    "fedaf, means": lambda: fedaf(start="means"),
    "fedaf, rows": lambda: fedaf(start="rows"),
}


class Cell(NamedTuple):
    """One class at one client: its condensed rows, the client's rows, and rows of the class that nobody trains on."""

    condensed: Tensor  # [n, d]
    training: Tensor  # [rows of the client, d]
    held_out: Tensor  # [h, d]
    size: int  # rows of the class at the client

    def distances(self) -> tuple[Tensor, Tensor]:
        """(condensed rows', held-out rows') distance to the nearest training row of the client."""
        return (nearest(self.condensed, self.training)[0], nearest(self.held_out, self.training)[0])


def nearest(rows: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """(distance, place) of the nearest of `among` [m, d], for each of `rows` [n, d]."""
    found = torch.cdist(rows, among).min(1)
    return found.values, found.indices


def condense(name: str, seed: int, rounds: int) -> tuple[float, list[Cell]]:
    """(accuracy, cells) of the last round of a run on digits, ten clients by Dirichlet 0.5."""
    data = cs.load_data("digits")
    federation, _ = cs.federate(data, cs.partition("dirichlet", clients=10, alpha=0.5), seed=seed)
    module = cs.build_model("mlp", (1, 8, 8), 10, seed=seed, hidden=(64,))
    engine = cs.Vectorised(cs.Task(module), federation, lane="serial", device="cpu")
    *_, last = cs.run(METHODS[name](), engine, rounds=rounds, seed=seed)
    output, _ = engine.task.apply(last.model, data.test_x, train=False)
    accuracy = float((output.argmax(1) == data.test_y).double().mean())
    return accuracy, list(cells(last.cohort, federation, data))


def cells(cohort: Cohort, federation: cs.Federation, data: cs.Dataset) -> Iterator[Cell]:
    """Every class at every client that has it."""
    for place, client in enumerate(cohort.ids.tolist()):
        x, y = federation.train.of(client)
        for label in y.unique().tolist():
            yield Cell(
                condensed=cohort.reply["x"][place, label].flatten(1),
                training=x.flatten(1),
                held_out=data.test_x[data.test_y == label].flatten(1),
                size=int((y == label).sum()),
            )


def copies(found: list[Cell]) -> float:
    """Share of condensed rows nearer to a training row than 99 % of the held-out rows of the class are, in percent."""
    shares = []
    for cell in found:
        own, other = cell.distances()
        shares += (own < torch.quantile(other, 0.01)).double().tolist()
    return 100 * statistics.fmean(shares) if shares else float("nan")


def line(name: str, seeds: int, rounds: int) -> tuple[str, list[Cell]]:
    """A line of the table, and the cells of the first seed."""
    runs = [condense(name, seed, rounds) for seed in range(seeds)]
    everything = [cell for _, found in runs for cell in found]
    own, other = (torch.cat(parts) for parts in zip(*(cell.distances() for cell in everything)))
    few = [cell for cell in everything if cell.size <= FEW]
    many = [cell for cell in everything if cell.size > FEW]
    accuracy = 100 * statistics.fmean(score for score, _ in runs)
    row = (
        f"{name:14} {accuracy:8.1f} {own.median():10.2f} {other.median():9.2f} {copies(few):16.0f} {copies(many):11.0f}"
    )
    return row, runs[0][1]


def draw(found: list[Cell], path: Path) -> None:
    """Condensed rows above the training rows that are nearest to them, for classes of one, few and many rows."""
    from matplotlib import pyplot as plt

    ordered = sorted(found, key=lambda cell: cell.size)
    shown = [ordered[int(k * (len(ordered) - 1) / 7)] for k in range(8)]
    figure, axes = plt.subplots(2, len(shown), figsize=(10, 3))
    for column, cell in zip(axes.T, shown):
        distance, place = nearest(cell.condensed[:1], cell.training)
        for axis, pixels in zip(column, (cell.condensed[0], cell.training[int(place)])):
            axis.imshow(pixels.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            axis.set_axis_off()
        column[0].set_title(f"{cell.size} rows\ndistance {float(distance):.2f}", fontsize=8)
    figure.suptitle("Condensed pictures (above) and the client's nearest training pictures (below)", fontsize=9, y=1.08)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """The table, and with --figure a picture for `fedaf, means`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure", type=Path, help="where to draw condensed pictures beside the nearest real ones")
    given = parser.parse_args()
    print(f"{'':14} {'accuracy':>8} {'nearest':>10} {'held-out':>9} {f'copies, <= {FEW} rows':>16} {'others':>11}")
    for name in METHODS:
        row, found = line(name, given.seeds, given.rounds)
        print(row, flush=True)
        if given.figure and name == "fedaf, means":
            draw(found, given.figure)


if __name__ == "__main__":
    main()
