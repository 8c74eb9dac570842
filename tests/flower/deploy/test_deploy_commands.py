"""`consilience flower/deploy` and `consilience verify` as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from consilience import cli


def typed(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    return result.exit_code, result.output


def test_init_says_what_it_wrote_and_what_to_do_next(tmp_path: Path) -> None:
    code, said = typed("deploy", "init", tmp_path / "hospital", "--clients", 3)
    assert code == 0 and f"consilience deploy up {tmp_path / 'hospital'} --local 3" in said
    assert "clients = 3" in (tmp_path / "hospital" / "config.toml").read_text()
    assert typed("deploy", "init", tmp_path / "hospital")[0] == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["deploy.secure_aggregation=true"], "SimProxWeights reads each reply"),
        (["algorithm=krum", "deploy.secure_aggregation=true"], "reads each reply"),
        (["--local", "9"], "--local 9: there are 4 clients"),
        (["another", "rounds=3"], "'another' is neither the app's folder"),
        (["rounds=0"], "rounds = 0 is out of range"),
        (["deploy.deadlin=3"], "did you mean 'deadline'?"),
        (["algorithm.lr=0.1", "data=digits"], "data comes from federation.py"),
    ],
)
def test_up_refuses_bad_settings_before_anything_starts(words: list[str], why: str, tmp_path: Path) -> None:
    typed("deploy", "init", tmp_path / "app")
    code, said = typed("deploy", "up", tmp_path / "app", *words)
    assert code == 2 and why in " ".join(said.split())
    assert not (tmp_path / "app" / "local").exists()


def test_keys_for_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="comes with Flower")
    assert typed("deploy", "keys", tmp_path / "server", "--host", "fl.example.org")[0] == 0
    assert typed("deploy", "keys", tmp_path / "client", "--node")[0] == 0
    assert {file.name for file in (tmp_path / "client").iterdir()} == {"node", "node.pub"}
    assert {file.name for file in (tmp_path / "server").iterdir()} == {"ca.crt", "ca.key", "server.pem", "server.key"}


def test_verify_names_a_wrong_engine_or_algorithm() -> None:
    assert typed("verify", "--engines", "flowr")[0] == 2
    code, said = typed("verify", "--algorithms", "fedavgg", "--engines", "vectorised")
    assert code == 2 and "did you mean 'fedavg'" in said
