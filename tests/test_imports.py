"""Imports point one way, optional packages are imported where they are used, and no code comes out of data."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import consilience

ROOT = Path(consilience.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

PARTS = {"selection", "client", "channel", "server"}
RECIPES = PARTS | {"core", "algorithms"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "privacy": {"core"},
    **{part: {"core"} for part in PARTS},
    "server": {"core", "privacy"},  # a private server counts what it spends
    "environments": {"core"},
    "models": {"core"},
    "data": {"core", "models"},  # a data set may be stored as the features of a frozen encoder
    "engines": {"core", "environments"},
    "algorithms": PARTS | {"core"},
    "meta": RECIPES,
    "experiments": RECIPES | {"meta", "engines", "data", "environments", "models", "privacy"},
    "training": RECIPES | {"meta", "engines", "data", "environments", "models", "experiments"},
    "flower": RECIPES | {"engines", "environments"},  # for users of Flower; our own engine over it is in `engines`
    "deploy": RECIPES | {"engines", "data", "environments", "models", "experiments"},
    "reporting": {"core", "experiments"},
    "dashboard": {"core", "experiments", "reporting"},
    "cli": {"core", "experiments", "reporting", "dashboard", "deploy"},
    "__main__": {"cli"},
    "__init__": RECIPES | {"meta", "engines", "data", "environments", "models", "experiments", "training"},
}
ALWAYS = {"numpy", "safetensors", "torch"}  # allowed at the top of a module
TERMINAL = {"rich", "typer"}  # core dependencies, for the command line only


def package_of(file: Path) -> str:
    """The top-level package or module that a file belongs to."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST, *, at_the_top: bool | None = None) -> Iterator[tuple[str, int]]:
    """(module, line) of every import; `at_the_top` limits it to those that run when the module is imported."""
    lazy: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _type_checking(node):
            lazy.update(id(inner) for inner in ast.walk(node) if inner is not node)
    for node in ast.walk(tree):
        if at_the_top is not None and (id(node) not in lazy) != at_the_top:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide where things come from"
            module = node.module or ""
            yield (module, node.lineno)
            if module == "consilience":
                yield from ((f"consilience.{alias.name}", node.lineno) for alias in node.names)


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))


@each_file
def test_imports_point_one_way(file: Path) -> None:
    own = package_of(file)
    assert own in MAY_IMPORT, f"{own} is new: say in MAY_IMPORT (and docs/architecture.md) what it may import"
    for module, line in imports(parsed(file)):
        first, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if first == "consilience" and target and target != own:
            assert target in MAY_IMPORT[own], f"{file.name}:{line}: {own} must not import {target}"


@each_file
def test_optional_packages_are_imported_where_they_are_used(file: Path) -> None:
    allowed = set(sys.stdlib_module_names) | ALWAYS | {"consilience", "__future__"}
    if package_of(file) in {"experiments", "cli", "reporting", "dashboard", "training", "deploy"}:
        allowed |= TERMINAL
    for module, line in imports(parsed(file), at_the_top=True):
        top = module.split(".")[0]
        assert top in allowed, f"{file.name}:{line}: import {top} inside the function that needs it"


def test_no_import_cycle_between_packages() -> None:
    """The table above is itself without cycles: following it always ends."""

    def reach(package: str, seen: tuple[str, ...] = ()) -> None:
        assert package not in seen, f"cycle: {' -> '.join((*seen, package))}"
        for target in MAY_IMPORT[package]:
            reach(target, (*seen, package))

    for package in MAY_IMPORT:
        reach(package)


# --- no code from data (FAULTS G20) ----------------------------------------------------------------------------------

CODE_FROM_DATA = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
    "ruamel",
}
MAY_SUBCLASS_UNPICKLER = "data/readers"  # a restricted reader of the public CIFAR files


@each_file
def test_no_module_that_runs_code_from_data(file: Path) -> None:
    where = file.relative_to(ROOT).as_posix()
    for module, line in imports(parsed(file)):
        if module.split(".")[0] in CODE_FROM_DATA:
            restricted = where.startswith(MAY_SUBCLASS_UNPICKLER) and module == "pickle"
            assert restricted, f"{where}:{line}: {module} can run code from data"


@each_file
def test_no_call_that_runs_code_from_data(file: Path) -> None:
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in {"eval", "exec", "compile", "__import__"}, f"{file.name}:{node.lineno}: {name}()"
            assert name not in {"torch.load", "torch.save", "pickle.load", "pickle.loads", "pickle.Unpickler"}, (
                f"{file.name}:{node.lineno}: {name}()"
            )
            for keyword in node.keywords:
                if keyword.arg in {"allow_pickle", "shell"}:
                    assert isinstance(keyword.value, ast.Constant) and keyword.value.value is False, (
                        f"{file.name}:{node.lineno}: {keyword.arg} must be False"
                    )
            if name in {"np.load", "numpy.load"}:
                assert any(k.arg == "allow_pickle" for k in node.keywords), (
                    f"{file.name}:{node.lineno}: say allow_pickle=False"
                )


# --- what an import costs --------------------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in memory after a statement, in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return set(done.stdout.split())


def test_importing_the_package_alone_loads_nothing_heavy() -> None:
    assert not loaded_by("import consilience") & {"torch", "numpy", "sklearn", "rich", "typer"}


def test_importing_every_core_package_loads_no_optional_one() -> None:
    core = ("core", "selection", "client", "channel", "server", "algorithms", "engines.vectorised", "environments")
    statement = "; ".join(f"import consilience.{package}" for package in core)
    assert not loaded_by(statement) & {
        "sklearn",
        "ray",
        "flwr",
        "matplotlib",
        "PIL",
        "transformers",
        "datasets",
        "pandas",
    }
