"""A learned table of aggregation weights: saved, shown, checked, used as a plain weighting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from consilience.server.averaging.weighting.schedule import ScheduleWeights, load_tensors, save_table

_SHADES = " .:-=+*#%@"
_COLUMNS = 12  # rounds of a table on the terminal


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """Theta [rounds, clients], and the loss of every unfolded run on the way to it."""

    weights: Tensor  # [T, K] float64
    losses: Tensor  # [M] float64
    gradient: str = ""  # the way to the gradient that was taken
    idle_rounds: tuple[int, ...] = ()  # counted from 1: no loss of any unfolded run depended on their weights

    def weighting(self) -> ScheduleWeights:
        """For any algorithm that averages: `fedavg(weighting=schedule.weighting())`."""
        return ScheduleWeights.of(self.weights)

    def save(self, path: Path | str) -> None:
        """Write it as a safetensors file, which `duw_fedavg(schedule=path)` reads."""
        save_table(self.weights, path, losses=self.losses)

    @staticmethod
    def load(path: Path | str) -> Schedule:
        """Read it back."""
        found = load_tensors(path)
        return Schedule(weights=found["weights"], losses=found.get("losses", torch.empty(0, dtype=torch.float64)))

    def note(self) -> str:
        """A warning if some rows of the table have no effect; else empty."""
        if not self.idle_rounds:
            return ""
        rounds = ", ".join(map(str, self.idle_rounds))
        return (
            f"round{'s' * (len(self.idle_rounds) > 1)} {rounds}: no loss depends on these weights (models are swapped "
            "and not averaged, or nobody was heard); they are as they were at the start"
        )

    def text(self) -> str:
        """Client x round as a table of numbers, each with a shade of its size; of many rounds, some of them."""
        highest = float(self.weights.max())
        rounds = len(self.weights)
        shown = sorted({round(at * (rounds - 1) / (_COLUMNS - 1)) for at in range(_COLUMNS)})
        lines = ["client " + " ".join(f"round {t + 1:<3}" for t in shown)]
        for client, row in enumerate(self.weights.T.tolist()):
            cells = (f"{row[t]:7.4f} {_shade(row[t] / highest if highest > 0 else 0.0)}" for t in shown)
            lines.append(f"{client:6} " + " ".join(cells))
        if len(shown) < rounds:
            lines.append(f"({len(shown)} of {rounds} rounds)")
        return "\n".join(lines)

    def plot(self, path: Path | str, names: tuple[str, ...] = ()) -> None:
        """Every client's weight over the rounds, and the map client x round, as a picture."""
        try:
            from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
        except ImportError as problem:
            raise ImportError('plots need matplotlib: pip install "consilience[report]"') from problem
        rounds, clients = self.weights.shape
        figure = Figure(figsize=(10, 4), layout="constrained")
        lines, grid = figure.subplots(1, 2)
        for client in range(clients):
            label = names[client] if names else f"client {client}"
            lines.plot(range(1, rounds + 1), self.weights[:, client].tolist(), marker="o", label=label)
        lines.set(xlabel="round", ylabel="aggregation weight")
        if clients <= 12:
            lines.legend()
        picture = grid.imshow(self.weights.T.numpy(), aspect="auto", extent=(0.5, rounds + 0.5, clients - 0.5, -0.5))
        grid.set(xlabel="round", ylabel="client")
        figure.colorbar(picture, ax=grid, label="aggregation weight")
        figure.savefig(path)

    def variance(self) -> Tensor:
        """[K] variance of each client's weight over the rounds: the left side of eq (28)."""
        return self.weights.var(0, correction=0)

    def within_rate(self) -> bool:
        """Whether the mean variance stays below 1/sqrt(T), so that it does not slow convergence (Theorem 1)."""
        return bool(self.variance().mean() <= len(self.weights) ** -0.5)


def variance_table(schedules: list[Schedule]) -> str:
    """The paper's Figure 2 as a table: rounds T, mean variance of the learned weights, 1/sqrt(T)."""
    lines = ["rounds  mean variance  1/sqrt(T)"]
    for schedule in schedules:
        rounds = len(schedule.weights)
        lines.append(f"{rounds:6}  {float(schedule.variance().mean()):13.3e}  {rounds**-0.5:9.4f}")
    return "\n".join(lines)


def _shade(share: float) -> str:
    return _SHADES[min(len(_SHADES) - 1, max(0, int(share * len(_SHADES))))]
