"""Federated learning behind scikit-learn's `fit` and `predict`, for tables of numbers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, check_random_state, validate_data

from consilience import algorithms, models
from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import own_model_of
from consilience.core.federation import Federation
from consilience.core.settings import Count, Invalid, check_value
from consilience.training import train

LOCAL: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "epochs": 1}  # of a recipe that is given by name


class _Federated(BaseEstimator):
    """Base class of `FederatedClassifier` and `FederatedRegressor`."""

    def __init__(
        self,
        algorithm: str | Algorithm = "fedavg",
        *,
        options: Mapping[str, Any] | None = None,
        hidden: Sequence[int] = (32,),
        rounds: int = 30,
        n_clients: int = 4,
        standardise: bool = True,
        random_state: Any = None,
    ) -> None:
        self.algorithm = algorithm
        self.options = options
        self.hidden = hidden
        self.rounds = rounds
        self.n_clients = n_clients
        self.standardise = standardise
        self.random_state = random_state

    def _train(self, x: np.ndarray, y: np.ndarray, clients: Any, outputs: int, classes: int | None) -> None:
        """Train on rows [N, D] that belong to `clients`."""
        draw = check_random_state(self.random_state)
        seed = int(draw.randint(2**31 - 1))
        self.mean_ = x.mean(0) if self.standardise else np.zeros(x.shape[1])
        deviation = x.std(0) if self.standardise else np.ones(x.shape[1])
        self.scale_ = np.where(deviation > 0, deviation, 1.0)
        owners = self._owners(clients, len(x), draw)
        self.clients_ = np.unique(owners)
        features = self._scaled(x)
        targets = torch.from_numpy(y)
        pairs = [(features[rows], targets[rows]) for rows in (np.flatnonzero(owners == who) for who in self.clients_)]
        names = [str(who) for who in self.clients_]
        federation = Federation.from_clients(pairs, names=names, classes=classes)
        hidden = check_value("hidden", self.hidden, tuple[Count, ...])
        model, more = ("mlp", {"hidden": hidden}) if hidden else ("logistic", {})
        module = models.build(model, (x.shape[1],), outputs, seed=seed, **more)
        algorithm = self._algorithm()
        if own_model_of(algorithm.client) is not None:
            name = self.algorithm if isinstance(self.algorithm, str) else "this algorithm"
            warnings.warn(
                f"{name} trains a model for each client, and predict uses the common one, which may lack layers that "
                "clients keep: choose an algorithm with one model, or use cs.train, which tests clients' own models",
                stacklevel=3,
            )
        result = train(
            module,
            federation,
            algorithm,
            rounds=self.rounds,
            seed=seed,
            kind="classification" if classes else "regression",
            evaluate_every=0,
            progress=False,
            lane="serial",
        )
        self.model_, self.history_ = result.model.double(), result.history  # same predictions for any batch
        self.n_iter_ = len(result.history)

    def _algorithm(self) -> Algorithm:
        if isinstance(self.algorithm, Algorithm):
            if self.options:
                raise Invalid("options are for an algorithm that is given by name: make the Algorithm with them")
            return self.algorithm
        return algorithms.given({"name": self.algorithm, **LOCAL, **(self.options or {})})

    def _owners(self, clients: Any, rows: int, draw: np.random.RandomState) -> np.ndarray:
        """The owner of each row: as given, or one of `n_clients` at random."""
        if clients is None:
            return draw.permutation(np.arange(rows) % min(check_value("n_clients", self.n_clients, Count), rows))
        owners = np.asarray(clients)
        if owners.shape != (rows,):
            raise ValueError(f"clients has the shape {owners.shape} for {rows} rows: give the owner of each row")
        return owners

    def _scaled(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(((x - self.mean_) / self.scale_).astype(np.float32))

    def _output(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "model_")
        x = validate_data(self, X, reset=False, dtype=np.float64)
        with torch.no_grad():
            return self.model_(torch.from_numpy((x - self.mean_) / self.scale_)).numpy()


class FederatedClassifier(ClassifierMixin, _Federated):
    """A classifier trained by federated learning: `FederatedClassifier("simprox").fit(X, y, clients=hospital)`.

    algorithm: a recipe by name, or an `Algorithm`; options: of the recipe, next to lr 0.02, momentum 0.9 and one epoch.
    hidden: widths of the perceptron's hidden layers; () is logistic regression.
    rounds: number of rounds (30); n_clients: number of random clients if `fit` is called without `clients` (4).
    standardise: columns to mean 0 and deviation 1 over all clients' rows.
    random_state: of initial model, batches and shares.

    `model_` is the trained module, `history_` a row for each round, `classes_` the classes in the order of
    `predict_proba`.
    """

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Train; `clients` is the owner of each row, any labels."""
        x, target = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(target)
        self.classes_, numbers = np.unique(target, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class only ({self.classes_[0]}): a classifier needs at least two classes")
        self._train(x, numbers.astype(np.int64), clients, len(self.classes_), len(self.classes_))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """[N, C] the probability of each class."""
        output = self._output(X)
        chances = np.exp(output - output.max(1, keepdims=True))
        return chances / chances.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """[N] the most likely class."""
        best = self._output(X).argmax(1)
        return self.classes_[best]


class FederatedRegressor(RegressorMixin, _Federated):
    """A regression trained by federated learning: `FederatedRegressor().fit(X, y, clients=hospital)`.

    The settings are those of `FederatedClassifier`; targets, one or several a row, are standardised in training.
    """

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Train; `clients` is the owner of each row, any labels."""
        x, target = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        target = check_array(target, ensure_2d=False, dtype=np.float64)
        self.target_mean_, deviation = target.mean(0), target.std(0)
        self.target_scale_ = np.where(deviation > 0, deviation, 1.0)
        scaled = ((target - self.target_mean_) / self.target_scale_).astype(np.float32)
        self._flat = target.ndim == 1
        self._train(x, scaled, clients, 1 if self._flat else target.shape[1], None)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """[N] or [N, outputs] the expected values."""
        output = self._output(X)
        return (output[:, 0] if self._flat else output) * self.target_scale_ + self.target_mean_

    def __sklearn_tags__(self) -> Any:
        """Several targets a row are allowed."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


__all__ = ["FederatedClassifier", "FederatedRegressor"]
