"""The fingerprint of a run's code covers all that computes, and names the little that it leaves out."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import consilience
from consilience.runs import identity

TOP = Path(consilience.__path__[0])
STORES = ("runs/", "experiments/trackers.py")  # receive what was computed, and are left out for that reason
RUN = """
import sys
from pathlib import Path
from consilience.experiments import runner
from consilience.experiments.config import config
from consilience.experiments.config.catalogue import listing

listing()  # imports every recipe, data set and part
settings = ["data.name=digits", "partition.clients=4", "model=logistic", "rounds=1", "algorithm.epochs=1"]
runner.execute(config.load(None, [*settings, "engine.lane=serial", "runs=" + sys.argv[1]]))
for name in ("consilience.flower.engine.engine", "consilience.flower.secure.sum", "consilience.engines.ray.cluster"):
    try:
        __import__(name)
    except ImportError as problem:
        assert not str(problem.name).startswith("consilience"), problem
files = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "consilience"]
print("\\n".join(sorted(filter(None, files))))
"""


def harmless() -> list[str]:
    return [path for paths in identity.HARMLESS_CODE.values() for path in paths]


def test_a_run_loads_no_code_outside_the_fingerprint_but_what_stores(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True, cwd=TOP.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    files = [line for line in done.stdout.splitlines() if line.endswith(".py") and Path(line).is_relative_to(TOP)]
    loaded = {Path(line).relative_to(TOP).as_posix() for line in files}
    computing = set(identity.computing_files())
    assert [name for name in sorted(loaded - computing) if not name.startswith(STORES)] == []
    packages = {name.split("/")[0] for name in loaded & computing}
    assert packages >= {"core", "privacy", "wire", "server", "client", "engines", "data", "experiments"}


def test_what_is_in_the_fingerprint_imports_nothing_that_is_left_out_but_what_stores() -> None:
    outside = {name.removesuffix(".py").replace("/", ".") for name in harmless()}
    wrong = []
    for name in identity.computing_files():
        if name.endswith("__init__.py"):  # public names, each imported from its own place when it is asked for
            continue
        for node in ast.walk(ast.parse((TOP / name).read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in modules:
                found = module.removeprefix("consilience.")
                left_out = any(found == path or found.startswith(f"{path}.") for path in outside)
                if left_out and not found.replace(".", "/").startswith(("runs", "experiments/trackers")):
                    wrong.append(f"{name}: {module}")
    assert not wrong, "\n".join(wrong)


def test_what_is_left_out_exists_and_is_left_out_for_one_reason() -> None:
    assert len(set(harmless())) == len(harmless()) and all(identity.HARMLESS_CODE)
    assert [path for path in harmless() if not (TOP / path).exists()] == []
    covered = identity.computing_files()
    assert covered and not [name for name in covered for path in harmless() if name == path]


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package that may be changed."""
    top = tmp_path / "consilience"
    shutil.copytree(TOP, top, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(consilience, "__path__", [str(top)])
    return top


@pytest.mark.parametrize("name", ["privacy", "wire", "meta", "core", "experiments", "flower/engine"])
def test_a_change_of_what_computes_changes_the_digest(copied: Path, name: str) -> None:
    before = identity.source_digest()
    file = max((copied / name).glob("*.py"), key=lambda path: path.stat().st_size)
    file.write_text(file.read_text() + "\n# changed\n")
    assert identity.source_digest() != before
    file.write_text(file.read_text().removesuffix("\n# changed\n"))
    assert identity.source_digest() == before
    (copied / name / "new.py").write_text("")
    assert identity.source_digest() != before


def test_a_change_of_what_only_shows_or_stores_does_not(copied: Path) -> None:
    before = identity.source_digest()
    for path in harmless():
        file = copied / path if path.endswith(".py") else copied / path / "__init__.py"
        file.write_text(file.read_text() + "\n# changed\n")
    assert identity.source_digest() == before
