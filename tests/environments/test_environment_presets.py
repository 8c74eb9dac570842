"""The presets carry their papers' numbers, and can be run on real data."""

import os
from pathlib import Path

import numpy as np
import pytest

from consilience.core.settings import Invalid
from consilience.data.partition import Partition, partition
from consilience.environments import ENVIRONMENTS, Environment, Preset, environment, preset

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
DIGITS = np.repeat(np.arange(10), MNIST_COUNTS)
DUW_SIZES = {
    "duw_1": [1042, 1023, 862, 1184, 4459],
    "duw_2": [6775, 6774, 6776, 6776, 6776],
    "duw_3": [1713, 1713, 1713, 1713, 1716],
    "duw_4": [1713, 1713, 1713, 1713, 1716],
}
DUW_DIGITS = [{2, 9}, {0, 4, 6}, {1, 3, 5, 7, 8}, {1, 3, 5, 7, 8}, {1, 3, 5, 7, 8}]


def shared(*parts):
    root = os.environ.get("CONSILIENCE_DATA")
    if not root or not Path(root, *parts).is_file():
        pytest.skip(f"CONSILIENCE_DATA does not name a folder with {'/'.join(parts)}")
    return Path(root, *parts)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_preset_builds_and_its_partition_is_in_the_catalogue(name):
    made = preset(name)
    assert isinstance(made, Preset) and environment(name) == made.environment
    if made.partition:
        built = partition(**made.partition)
        assert isinstance(built, Partition)
        assert made.citation and made.data
        made.environment.check_against(made.partition.get("clients", 5))


def test_duw_environments_have_table_1():
    assert environment("duw_1") == environment("duw_2") == Environment()
    assert environment("duw_3") == Environment(epochs=(2, 1, 1, 1, 1))
    assert environment("duw_4") == Environment(communication=(0.2, 0.3, 0.8, 0.9, 1.0), silent="broadcast_model")
    for name, iterations in (("duw_1", 400), ("duw_2", 400), ("duw_3", 500), ("duw_4", 1000)):
        settings = preset(name).settings
        assert settings["rounds"] == 10 and settings["batch_size"] == 50 and settings["lr"] == 0.01
        assert settings["epochs"] == 2 and settings["hidden"] == (128, 128)
        assert settings["unfolding"] == {"iterations": iterations, "lr": 0.001}
        assert preset(name).data == "mnist"


@pytest.mark.parametrize("name", DUW_SIZES)
def test_duw_partitions_drawn_from_mnist_have_the_papers_sizes(name):
    parts = partition(**preset(name).partition).split(DIGITS, groups=None, seed=0)
    assert [len(p) for p in parts] == DUW_SIZES[name]
    held = [set(DIGITS[p].tolist()) for p in parts]
    assert held == (DUW_DIGITS if name == "duw_2" else [set(range(10))] * 5)


@pytest.mark.parametrize("name", DUW_SIZES)
def test_duw_partitions_from_the_authors_file_are_theirs(name):
    indices = shared("duw_mnist", "client_indices.npz")
    with np.load(shared("mnist", "mnist.npz")) as mnist:
        labels = mnist["y_train"].astype(np.int64)
    parts = partition(**preset(name, indices=str(indices)).partition).split(labels, groups=None, seed=0)
    assert [len(p) for p in parts] == DUW_SIZES[name]
    held = [set(labels[p].tolist()) for p in parts]
    assert held == (DUW_DIGITS if name == "duw_2" else [set(range(10))] * 5)
    assert len(np.unique(np.concatenate(parts))) == sum(DUW_SIZES[name])
    with np.load(indices) as stored:
        key = {"duw_1": "env1", "duw_2": "env2"}.get(name, "env34")
        assert all(np.array_equal(part, stored[f"{key}_client{k}"]) for k, part in enumerate(parts))


def test_duw_a_and_b_have_table_2():
    a, b = preset("duw_a"), preset("duw-b")
    assert a.environment == Environment(communication=(0.96, 0.6995, 0.9999, 0.2201, 0.3611), silent="broadcast_model")
    assert b.environment == Environment(
        communication=(0.5173, 0.947, 0.7655, 0.2824, 0.221), epochs=(4, 7, 1, 2, 7), silent="broadcast_model"
    )
    for made, rounds in ((a, 100), (b, 70)):
        assert made.partition == {"name": "dirichlet", "clients": 5, "alpha": 0.0005}
        assert made.settings["rounds"] == rounds and made.settings["epochs"] == 5
        assert made.settings["batch_size"] == 100 and made.settings["lr"] == 0.01


def test_environment_four_is_heard_as_often_as_the_table_says():
    four = environment("duw_4")
    heard = np.mean([four.reachable(r, np.arange(5), seed=0) for r in range(4000)], axis=0)
    expected = np.array([0.2, 0.3, 0.8, 0.9, 1.0])
    assert (np.abs(heard - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / 4000)).all()


@pytest.mark.parametrize("level", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("policy", ["partial", "drop"])
def test_fedprox_stragglers(level, policy):
    made = preset("fedprox_stragglers", level=level, policy=policy)
    assert made.environment == Environment(stragglers=level, straggler_policy=policy)
    work = made.environment.work(0, np.arange(10), 0, epochs=20, steps_per_epoch=np.ones(10, int))
    assert (work < 20).sum() == round(10 * level) and work.min() >= 1
    heard = made.environment.reachable(0, np.arange(10), 0)
    assert heard.sum() == (10 if policy == "partial" else 10 - round(10 * level))


def test_fedprox_data_have_the_papers_spread():
    parts = partition(**preset("fedprox_stragglers").partition).split(DIGITS, groups=None, seed=0)
    sizes = np.array([len(p) for p in parts])
    assert len(parts) == 1000 and sizes.sum() == 60_000 and sizes.min() >= 10
    assert {len(np.unique(DIGITS[p])) for p in parts} == {2}
    assert sizes.std() == pytest.approx(106, rel=0.03)


def test_fields_can_replace_a_presets():
    assert environment("duw_4", silent="renormalise").silent == "renormalise"
    assert environment("plain", stragglers=0.3, dropout=0) == Environment(stragglers=0.3)
    assert environment() == Environment()
    assert environment("plain", communication=[0.5, 1]).communication == (0.5, 1.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("duw_5", {}, r"environment.name = 'duw_5' is not one of plain, .*did you mean"),
        (None, {}, "environment.name = None is not one of"),
        ("plain", {"straglers": 0.5}, r"environment.straglers is not a setting \(did you mean 'stragglers'\?\)"),
        ("plain", {"stragglers": 2}, "environment.stragglers = 2.0 is out of range"),
        ("plain", {"level": 0.5}, "environment.level is not a setting"),
        ("fedprox_stragglers", {"level": 0.7}, "level = 0.7 is not one of the paper's 0, 0.5, 0.9"),
        ("fedprox_stragglers", {"level": 1.7}, "environment.level = 1.7 is out of range"),
        ("duw_1", {"indices": 3}, "environment.indices = 3 must be text"),
    ],
)
def test_the_catalogue_names_what_is_wrong(name, options, message):
    with pytest.raises(Invalid, match=message):
        environment(name, **options)
