"""Imports point one way, optional packages are imported where they are used, and no code comes out of data."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import consilience

ROOT = Path(consilience.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

PARTS = {"selection", "client", "channel", "server"}
LEARNED = {"core", "layers", "task"}
RECIPES = PARTS | LEARNED | {"stores", "privacy", "options", "algorithms"}
WORLD = RECIPES | {"meta", "data", "environments", "models", "wire"}
RUNNING = WORLD | {"engines", "runs", "experiments"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "wire": {"core"},
    "stores": {"core"},
    "privacy": {"core"},
    "layers": {"core"},
    "task": {"core", "layers"},
    "channel": {"core"},
    "client": LEARNED,
    "selection": {"core", "privacy"},  # Poisson sampling draws from the round's secret key
    "server": LEARNED | {"privacy", "stores"},  # a private server counts what it spends, a splitting one keeps rows
    "environments": {"core"},
    "models": {"core", "layers"},
    "data": LEARNED | {"models", "stores"},  # a data set may be features of a frozen encoder, or stay in its files
    "engines": LEARNED | {"environments", "stores"},
    "options": PARTS | {"core"},
    "algorithms": PARTS | LEARNED | {"options", "privacy"},
    "meta": RECIPES,
    "runs": LEARNED | {"wire", "stores"},
    "experiments": WORLD | {"engines", "runs"},
    "flower": RUNNING,
    "reporting": {"core", "task", "runs"},
    "dashboard": {"core", "runs", "reporting"},
    "compare": RUNNING | {"reporting", "callable_package"},
    "tuning": RUNNING | {"reporting", "compare"},
    "diagnose": RUNNING | {"reporting", "compare", "callable_package"},
    "callable_package": set(),
    "estimators": RUNNING | {"training"},
    "commands": RUNNING | {"reporting", "compare", "diagnose"},
    "training": RUNNING | {"reporting"},
    "cli": {"core", "runs", "experiments", "reporting", "dashboard", "flower", "compare", "diagnose", "tuning"}
    | {"commands"},
    "__main__": {"cli"},
    "__init__": RUNNING | {"training", "tuning", "compare", "diagnose", "estimators"},
}
FLOWER: dict[str, set[str]] = {  # its sub-packages, in the same way
    "messages": set(),
    "audit": {"messages"},
    "secure": {"messages", "audit"},
    "engine": {"messages", "audit", "secure"},
    "strategies": {"messages"},
    "deploy": {"messages", "audit", "secure", "engine", "strategies"},
}
ALWAYS = {"numpy", "safetensors", "torch"}  # allowed at the top of a module
TERMINAL = {"click", "rich", "typer"}  # core dependencies (click is what typer builds on), for the command line only
TALKING = {"experiments", "cli", "reporting", "dashboard", "training", "flower", "compare", "diagnose", "runs"}
TALKING |= {"tuning", "commands"}


def where(file: Path) -> str:
    """A file as it is named in a message."""
    return file.relative_to(ROOT).as_posix()


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


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def test_imports_point_one_way() -> None:
    wrong = []
    for file in FILES:
        own = package_of(file)
        assert own in MAY_IMPORT, f"{own} is new: say in MAY_IMPORT (and docs/architecture.md) what it may import"
        for module, line in imports(parsed(file)):
            first, _, rest = module.partition(".")
            target = rest.split(".")[0]
            if first == "consilience" and target and target not in {own, *MAY_IMPORT[own]}:
                wrong.append(f"{where(file)}:{line}: {own} must not import {target}")
    assert not wrong, "\n".join(wrong)


def test_imports_between_the_packages_of_flower_point_one_way() -> None:
    wrong = []
    for file in (ROOT / "flower").glob("*/*.py"):
        own = file.parent.name
        for module, line in imports(parsed(file)):
            target = module.removeprefix("consilience.flower.").split(".")[0]
            if module.startswith("consilience.flower.") and target not in {own, *FLOWER[own]}:
                wrong.append(f"{where(file)}:{line}: {own} must not import {target}")
    assert not wrong, "\n".join(wrong)


def test_optional_packages_are_imported_where_they_are_used() -> None:
    wrong = []
    for file in FILES:
        allowed = set(sys.stdlib_module_names) | ALWAYS | {"consilience", "__future__"}
        if package_of(file) in TALKING:
            allowed |= TERMINAL
        if package_of(file) == "estimators":  # classes derived from scikit-learn's; loaded when one is asked for
            allowed |= {"sklearn"}
        if file.stem.endswith("_kernels"):  # Triton reads their source; no module imports them at its top, see below
            allowed |= {"triton"}
        for module, line in imports(parsed(file), at_the_top=True):
            if module.endswith("_kernels"):
                wrong.append(f"{where(file)}:{line}: import {module} inside the function that needs it")
            if module.split(".")[0] not in allowed:
                wrong.append(f"{where(file)}:{line}: import {module} inside the function that needs it")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("table", [MAY_IMPORT, FLOWER], ids=["all", "flower"])
def test_no_import_cycle_between_packages(table: dict[str, set[str]]) -> None:
    """A table is itself without cycles: following it always ends."""

    def reach(package: str, seen: tuple[str, ...] = ()) -> None:
        assert package not in seen, f"cycle: {' -> '.join((*seen, package))}"
        for target in table[package]:
            reach(target, (*seen, package))

    for package in table:
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
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "torch.save", "pickle.load", "pickle.loads", "pickle.Unpickler"),
}
MAY_SUBCLASS_UNPICKLER = "data/readers"  # a restricted reader of the public CIFAR files


def test_no_module_that_runs_code_from_data() -> None:
    wrong = []
    for file in FILES:
        for module, line in imports(parsed(file)):
            restricted = where(file).startswith(MAY_SUBCLASS_UNPICKLER) and module == "pickle"
            if module.split(".")[0] in CODE_FROM_DATA and not restricted:
                wrong.append(f"{where(file)}:{line}: {module} can run code from data")
    assert not wrong, "\n".join(wrong)


def test_no_call_that_runs_code_from_data() -> None:
    wrong = []
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call):
                wrong += [f"{where(file)}:{node.lineno}: {problem}" for problem in unsafe(node)]
    assert not wrong, "\n".join(wrong)


def unsafe(call: ast.Call) -> Iterator[str]:
    """What is wrong with a call."""
    name = ast.unparse(call.func)
    if name in UNSAFE_CALLS:
        yield f"{name}()"
    for keyword in call.keywords:
        off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in {"allow_pickle", "shell"} and not off:
            yield f"{keyword.arg} must be False"
    if name in {"np.load", "numpy.load"} and not any(keyword.arg == "allow_pickle" for keyword in call.keywords):
        yield "say allow_pickle=False"


# --- what an import costs --------------------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in memory after a statement, in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return set(done.stdout.split())


def test_importing_the_package_alone_loads_nothing_heavy() -> None:
    assert not loaded_by("import consilience") & {"torch", "numpy", "sklearn", "rich", "typer"}


def test_a_recipe_that_is_given_parts_imports_no_others() -> None:
    """A list of all parts, which a name would be looked up in, imports every package of parts."""
    made = "fedavg(lr=0.1, selection=Everyone(), weighting=UniformWeights())"
    code = f"""
import sys
from consilience.algorithms.fedavg import fedavg
from consilience.selection import Everyone
from consilience.server.averaging.weighting.by_size import UniformWeights
before = set(sys.modules)
{made}
print(sorted(name for name in set(sys.modules) - before if name.startswith("consilience")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.strip() == "[]"


def test_importing_every_core_package_loads_no_optional_one() -> None:
    core = (
        "core",
        "task.task",
        "selection",
        "client",
        "channel",
        "server",
        "algorithms",
        "engines.vectorised.engine",
        "environments",
    )
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
