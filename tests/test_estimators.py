"""Federated learning behind scikit-learn's interface."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator

import consilience as cs
from consilience.core.settings import Invalid


@pytest.mark.slow
@pytest.mark.parametrize("kind", [cs.FederatedClassifier, cs.FederatedRegressor])
def test_scikit_learns_own_checks(kind: type) -> None:
    """All of them, none expected to fail; two in the classifier's and regressor's list skip themselves."""
    found = check_estimator(kind(random_state=0), on_fail=None)
    failed = [(one["check_name"], one["exception"]) for one in found if one["status"] not in ("passed", "skipped")]
    assert not failed, failed
    assert sum(one["status"] == "passed" for one in found) > 40


def test_clients_are_who_owns_the_rows() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    owner = np.where(x[:, 0] > 14, "large", "small")  # clients that differ
    model = cs.FederatedClassifier("simprox", options={"selection": "everyone"}, rounds=5, random_state=0)
    model.fit(x, y, clients=owner)
    assert model.clients_.tolist() == ["large", "small"] and model.score(x, y) > 0.9
    assert len(model.history_) == 5 and len(model.history_[0]["weights"]) == 2
    chances = model.predict_proba(x[:7])
    np.testing.assert_allclose(chances.sum(1), 1)
    assert (model.classes_[chances.argmax(1)] == model.predict(x[:7])).all()
    again = cs.FederatedClassifier("simprox", options={"selection": "everyone"}, rounds=5, random_state=0)
    assert (again.fit(x, y, clients=owner).predict_proba(x) == model.predict_proba(x)).all()


def test_it_works_in_scikit_learns_tools() -> None:
    x, y = load_diabetes(return_X_y=True)
    scores = cross_val_score(cs.FederatedRegressor(hidden=(), rounds=10, random_state=0), x, y, cv=3)
    assert scores.mean() > 0.4  # of the variance; least squares has 0.49


def test_bad_requests_say_what_to_do() -> None:
    x, y = np.eye(4), [0, 1, 0, 1]
    with pytest.raises(Invalid, match="did you mean 'fedavg'"):
        cs.FederatedClassifier("fedavgg").fit(x, y)
    with pytest.raises(ValueError, match=r"clients has the shape \(3,\) for 4 rows"):
        cs.FederatedClassifier().fit(x, y, clients=[1, 2, 3])
    with pytest.raises(ValueError, match="one class"):
        cs.FederatedClassifier().fit(x, [1, 1, 1, 1])
    for settings, word in (({"hidden": 8}, "write \\[8\\]"), ({"n_clients": 0}, "n_clients = 0 is out of range")):
        with pytest.raises(Invalid, match=word):
            cs.FederatedClassifier(**settings).fit(x, y)


def test_a_model_for_each_client_is_not_what_predict_uses() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    with pytest.warns(UserWarning, match="fedrep trains a model for each client"):
        cs.FederatedClassifier("fedrep", rounds=1, random_state=0).fit(x, y)
