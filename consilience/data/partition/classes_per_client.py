"""A fixed number of classes per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from consilience.core.rng import host
from consilience.core.settings import Checked, Count, Invalid, NonNegative, OnlyWith
from consilience.data.partition.apportion import apportion, deal, rows_by_class
from consilience.data.partition.quantity import Skew, skewed


@dataclass(frozen=True, kw_only=True)
class ClassesPerClient(Checked):
    """Every client holds exactly `classes_per_client` classes, drawn at random; every row goes to a holder.

    A class has holders in proportion to its rows. They share it equally, or by `skew` (see Quantity), with at
    least `min_per_class` rows each: 1000 clients, 2 classes each, skew = "power_law" is FedProx's MNIST.
    """

    clients: Count
    classes_per_client: Count
    skew: Skew = "equal"
    exponent: Annotated[NonNegative, OnlyWith("skew", ("power_law",))] = 1.0
    sigma: Annotated[NonNegative, OnlyWith("skew", ("log_normal",))] = 1.0
    min_per_class: Count = 1

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        _, rows = rows_by_class(labels, "classes_per_client")
        totals = np.array([len(of_class) for of_class in rows])
        self._refuse_impossible(totals)
        rng = host(seed, "classes_per_client")
        holds = self._draw_holders(self._holders(totals), rng)  # [classes, clients]
        weights = skewed(self.skew, self.clients, rng, exponent=self.exponent, sigma=self.sigma)
        counts = np.zeros(holds.shape, dtype=np.int64)
        for c, total in enumerate(totals):
            counts[c, holds[c]] = apportion(int(total), weights[holds[c]], least=self.min_per_class)
        return deal(rows, counts, rng)

    def _refuse_impossible(self, totals: np.ndarray) -> None:
        classes, each = len(totals), self.classes_per_client
        place = f"ClassesPerClient.classes_per_client = {each} for {self.clients} clients"
        if each > classes:
            raise Invalid(f"{place}: the data have {classes} classes, so at most classes_per_client = {classes}")
        if self.clients * each < classes:
            raise Invalid(
                f"{place} leaves {classes - self.clients * each} of {classes} classes to nobody: at least "
                f"classes_per_client = {-(-classes // self.clients)}, or clients = {-(-classes // each)}"
            )
        if totals.min() < self.min_per_class:
            raise Invalid(
                f"ClassesPerClient.min_per_class = {self.min_per_class}: the smallest class has "
                f"{totals.min()} rows, so at most min_per_class = {totals.min()}"
            )
        room = self._most_holders(totals).sum()
        if room < self.clients * each:
            raise Invalid(
                f"{place}, with at least {self.min_per_class} rows of each class, needs "
                f"{self.clients * each} holders, but there are rows for {room}: {self._what_works(totals)}"
            )

    def _most_holders(self, totals: np.ndarray) -> np.ndarray:
        return np.minimum(totals // self.min_per_class, self.clients)

    def _what_works(self, totals: np.ndarray) -> str:
        """The largest value of each setting that the class sizes allow, with the other settings unchanged."""
        sizes = totals // self.min_per_class
        least_clients, each = -(-len(totals) // self.classes_per_client), self.classes_per_client
        clients = next(
            (k for k in range(self.clients - 1, least_clients - 1, -1) if np.minimum(sizes, k).sum() >= k * each),
            0,
        )
        fewer = int(self._most_holders(totals).sum()) // self.clients
        options = [f"clients = {clients}"] if clients else []
        options += [f"classes_per_client = {fewer}"] if fewer * self.clients >= len(totals) else []
        return "at most " + ", or ".join(options) if options else "there are too few rows for any number of clients"

    def _holders(self, totals: np.ndarray) -> np.ndarray:
        """How many clients hold each class, [classes]: in proportion to its rows."""
        places = self.clients * self.classes_per_client
        return apportion(places, totals, least=1, most=self._most_holders(totals))

    def _draw_holders(self, holders: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """[classes, clients] flags with `holders` in every row and `classes_per_client` in every column.

        A class that needs every remaining client is forced; the rest are drawn in proportion to their needs.
        The remainder can then always be completed, so nothing is ever redrawn.
        """
        holds = np.zeros((len(holders), self.clients), dtype=bool)
        needs = holders.copy()
        for done, client in enumerate(rng.permutation(self.clients)):
            with np.errstate(divide="ignore"):
                keys = rng.standard_exponential(len(needs)) / needs  # the smallest keys are a draw without repeats
            keys[needs == self.clients - done] = -1.0
            chosen = np.argsort(keys, kind="stable")[: self.classes_per_client]
            holds[chosen, client] = True
            needs[chosen] -= 1
        return holds
