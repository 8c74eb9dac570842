"""The licence check and the reading of pip-audit's answers: what is not known must never pass as harmless."""

from __future__ import annotations

import importlib.util
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(**fields: str | list[str]) -> Any:
    found = Message()
    for key, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            found[key.replace("_", "-")] = value
    return found


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"License_Expression": "MIT"}, True),
        ({"License_Expression": "GPL-3.0-only OR MIT"}, True),
        ({"License_Expression": "GPL-3.0-only AND MIT"}, False),
        ({"License_Expression": "(Apache-2.0 AND BSD-3-Clause) OR GPL-2.0-only"}, True),
        ({"License_Expression": "AGPL-3.0-only", "License": "MIT"}, False),
        ({"Classifier": ["License :: OSI Approved :: MIT License", "Topic :: X"]}, True),
        ({"Classifier": ["License :: OSI Approved :: MIT License", "License :: Other/Proprietary License"]}, False),
        ({"Classifier": "License :: OSI Approved", "License": "Apache 2.0\nlong text"}, True),
        ({"License": "ask us"}, False),
        ({}, False),
    ],
)
def test_a_licence_is_allowed_by_its_expression_its_classifiers_or_its_name(
    fields: dict[str, Any], allowed: bool
) -> None:
    licences = tool("licences")
    assert (licences.why_not("a-package", licences.licences(said(**fields))) == "") is allowed


def test_the_pinned_set_and_what_it_needs_have_allowed_licences(capsys: pytest.CaptureFixture[str]) -> None:
    licences = tool("licences")
    names = licences.pinned(licences.PINS.read_text())
    assert {"torch", "flwr", "huggingface-hub"} <= set(names)
    found = {package.metadata["Name"].lower() for package in licences.closure(names)}
    assert "numpy" in found and len(found) > len(names) / 2
    assert licences.main() == 0, capsys.readouterr().out
    licences.ALLOWED.discard("MIT")
    assert licences.main() == 1 and "NOT ALLOWED" in capsys.readouterr().out


def test_packages_that_were_not_looked_up_are_not_called_safe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    vulnerabilities = tool("vulnerabilities")
    answers = {
        '{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}': (0, "no known vulnerabilities"),
        '{"dependencies": [{"name": "a", "skip_reason": "not found"}]}': (2, "1 packages were not looked up"),
        '{"dependencies": [{"name": "consilience", "skip_reason": "not found"}]}': (0, "no known"),
        '{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}]}': (
            1,
            "VULNERABLE a 1: CVE-1 (fixed in: 2)",
        ),
        "no json": (2, "could not be asked"),
    }
    for number, (answer, (code, text)) in enumerate(answers.items()):
        program = tmp_path / f"pip-audit-{number}"
        program.write_text(f"#!/bin/sh\ncat <<'EOT'\n{answer}\nEOT\n")
        program.chmod(0o755)
        assert vulnerabilities.main(str(program), "x") == code
        assert text in capsys.readouterr().out
