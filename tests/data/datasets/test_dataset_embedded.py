"""The sets that need no file, and the synthetic federation against a plain reading of the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from consilience.data.datasets import load
from consilience.data.datasets.synthetic import STREAM


def test_digits_are_scikit_learns_scaled_to_unit():
    from sklearn.datasets import load_digits

    data = load("digits")
    assert data.x.shape == (1438, 1, 8, 8) and data.test_x.shape == (359, 1, 8, 8)
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64 and data.classes == 10
    assert data.x.min() == 0 and data.x.max() == 1
    original = load_digits()
    both = np.concatenate([data.x.numpy(), data.test_x.numpy()]).reshape(-1, 64) * 16
    key = np.lexsort(both.T)
    assert np.array_equal(both[key], original.data[np.lexsort(original.data.T)])
    for digit in range(10):
        total = int((original.target == digit).sum())
        assert abs(int((data.test_y == digit).sum()) - 0.2 * total) < 1


def test_pictures_keep_their_labels():
    from sklearn.datasets import load_digits

    original = load_digits()
    label_of = {row.tobytes(): label for row, label in zip(original.data.astype(np.float32), original.target)}
    data = load("digits", seed=3)
    for x, y in ((data.x, data.y), (data.test_x, data.test_y)):
        assert [label_of[row.tobytes()] for row in (x.reshape(-1, 64) * 16).numpy()] == y.tolist()


def test_breast_cancer_is_standardised_over_training_rows():
    data = load("breast_cancer")
    assert (len(data.y), len(data.test_y), data.classes) == (455, 114, 2)
    assert torch.allclose(data.x.mean(0), torch.zeros(30), atol=1e-6)
    assert torch.allclose(data.x.std(0, correction=0), torch.ones(30), atol=1e-5)
    assert data.test_x.mean(0).abs().max() > 1e-3  # test rows had no say
    assert data.label_names == ("malignant", "benign") and len(data.feature_names) == 30


def test_seed_decides_the_split():
    first, same, other = (load("digits", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.x, same.x) and not torch.equal(first.test_y, other.test_y)


def reference(alpha, beta, clients, seed, iid, dimension=60, classes=10):
    """Section 5.1 sample by sample, with the same source of randomness."""
    rng = np.random.default_rng([seed, STREAM])
    sizes = [int(size) + 50 for size in rng.lognormal(4, 2, clients)]
    u = rng.normal(0, alpha, clients)
    B = rng.normal(0, beta, clients)
    shared = rng.normal(0, 1, (dimension, classes)), rng.normal(0, 1, classes)
    federation = []
    for k in range(clients):
        v = np.zeros(dimension) if iid else rng.normal(B[k], 1, dimension)
        W, b = shared if iid else (rng.normal(u[k], 1, (dimension, classes)), rng.normal(u[k], 1, classes))
        noise = rng.standard_normal((sizes[k], dimension))
        rows = []
        for e in noise:
            x = np.array([v[j] + np.sqrt((j + 1.0) ** -1.2) * e[j] for j in range(dimension)])
            logits = W.T @ x + b
            softmax = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            rows.append((x, int(softmax.argmax())))
        federation.append(rows)
    return federation


@pytest.mark.parametrize("iid", [False, True])
def test_synthetic_follows_the_paper(iid):
    alpha, beta = (0.0, 0.0) if iid else (0.5, 0.7)
    data = load("synthetic", alpha=alpha, beta=beta, clients=6, iid=iid, seed=4)
    expected = reference(alpha, beta, 6, 4, iid)
    for k, rows in enumerate(expected):
        x = torch.cat([data.x[data.groups == k], data.test_x[data.test_groups == k]]).numpy()
        y = torch.cat([data.y[data.groups == k], data.test_y[data.test_groups == k]]).numpy()
        assert len(x) == len(rows)
        wanted = np.array([x for x, _ in rows])
        order, wanted_order = np.argsort(x[:, 0]), np.argsort(wanted[:, 0])
        assert np.allclose(x[order], wanted[wanted_order], atol=1e-5)
        assert y[order].tolist() == [rows[row][1] for row in wanted_order]
        assert abs(int((data.test_groups == k).sum()) - len(rows) * 0.2) < 1


def test_synthetic_inputs_have_the_stated_distribution():
    data = load("synthetic", alpha=0, beta=3, clients=200, max_size=300, seed=0)
    x, groups = data.x, data.groups
    centres = torch.stack([x[groups == k].mean(0) for k in range(200)])
    assert abs(centres.mean(1).std().item() - 3) < 0.4  # B_k ~ N(0, beta)
    within = torch.cat([x[groups == k] - centres[k] for k in range(200)])
    wanted = torch.arange(1, 61, dtype=torch.float32) ** -0.6
    assert torch.allclose(within.std(0), wanted, rtol=0.03)


def test_synthetic_sizes():
    data = load("synthetic", clients=40, seed=2)
    sizes = torch.bincount(torch.cat([data.groups, data.test_groups]))
    assert sizes.min() >= 50 and sizes.max() > 4 * sizes.median()
    capped = load("synthetic", clients=40, seed=2, max_size=100)
    assert torch.bincount(torch.cat([capped.groups, capped.test_groups])).tolist() == sizes.clamp(max=100).tolist()


def test_one_linear_model_explains_the_iid_federation_only():
    from sklearn.linear_model import LogisticRegression

    scores = {}
    for iid in (True, False):
        data = load("synthetic", alpha=1, beta=1, iid=iid, clients=40, max_size=400, seed=0)
        own = data.groups < 30
        model = LogisticRegression(max_iter=2000).fit(data.x[own].numpy(), data.y[own].numpy())
        scores[iid] = model.score(data.x[~own].numpy(), data.y[~own].numpy())
    assert scores[True] > 0.8 and scores[False] < 0.4
