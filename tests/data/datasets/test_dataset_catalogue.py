"""Data sets by name: what is listed, how options are checked, and what is imported on the way."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from consilience.core.settings import Invalid, options_of
from consilience.data.dataset import Dataset
from consilience.data.datasets import catalogue, load

EXPECTED = {
    *("diabetes", "shapes", "synthetic_labels", "synthetic_regression", "synthetic_text"),
    *("digits", "breast_cancer", "synthetic", "mnist", "fashion_mnist", "emnist", "duw_mnist", "cifar10", "cifar100"),
    *("npz", "pneumoniamnist", "picture_folders", "text_table", "banking77", "sentiment140", "sheets", "mnist_m"),
    *("pacs64", "usps", "digits_domains", "crisismmd", "shakespeare", "heart_disease", "uci_har_acc", "medic"),
    *("client_files", "node_files", "array_files", "table", "multimodal", "leaf", "hugging_face", "flower_datasets"),
}


def test_catalogue_holds_every_set_and_nothing_else():
    assert set(catalogue()) == EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_factory_can_be_configured_and_explains_itself(name):
    factory = catalogue()[name]
    assert inspect.getdoc(factory)
    for parameter in inspect.signature(factory).parameters.values():
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.annotation is not parameter.empty
    assert options_of(factory)


def test_catalogue_cannot_be_changed_from_outside():
    catalogue().clear()
    assert set(catalogue()) == EXPECTED


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, r"data set 'digit' is unknown \(did you mean 'digits'\?\)"),
        ("digits", {"test_fractoin": 0.1}, r"test_fractoin is not a setting \(did you mean 'test_fraction'\?\)"),
        ("digits", {"test_fraction": 1.0}, "test_fraction = 1.0 is out of range: it must be > 0 and < 1"),
        ("digits", {"seed": -1}, "seed = -1 is out of range"),
        ("mnist", {"normalise": "std"}, r"normalise = 'std' is not one of standard, unit, signed"),
        ("npz", {}, "data set 'npz' needs the option file"),
        ("cifar10", {"batches": 6}, "batches = 6 is out of range"),
        ("digits_domains", {"styles": ["mnist", "svhn"]}, r"styles\[1\] = 'svhn'"),
    ],
)
def test_wrong_names_and_options_are_refused(name, options, message):
    with pytest.raises(Invalid, match=message):
        load(name, **options)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "emnist", "cifar10", "cifar100", "pneumoniamnist", "usps"])
def test_missing_files_say_where_and_how(tmp_path, name):
    with pytest.raises(FileNotFoundError) as problem:
        load(name, data_dir=tmp_path)
    message = str(problem.value)
    assert str(tmp_path / name) in message and f"{tmp_path}." in message and "CONSILIENCE_DATA" in message


def test_data_dir_is_ignored_by_sets_without_files(tmp_path):
    assert isinstance(load("digits", data_dir=tmp_path / "nowhere"), Dataset)


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys; from consilience.data.datasets import catalogue; catalogue(); "
        "print([m for m in ('sklearn', 'scipy', 'PIL', 'pandas', 'datasets', 'transformers') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
