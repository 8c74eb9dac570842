"""Who may look: refusals before anything listens, and the headers by which a visitor is known."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from consilience.core.settings import Invalid
from consilience.dashboard.access import TOKEN_VARIABLE, AccessRules, access_rules, is_loopback

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("token", "certificate", "key")}
    for path in found.values():
        path.write_text(TOKEN)
        path.chmod(0o600)
    return found


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "", "127.0.0.1.example.org"])
def test_other_addresses_need_a_token_and_tls(host: str, files: dict[str, Path]) -> None:
    tls = {"certificate": files["certificate"], "key": files["key"]}
    with pytest.raises(Invalid, match=r"a token .* and TLS"):
        access_rules(host)
    with pytest.raises(Invalid, match="needs TLS"):
        access_rules(host, token_file=files["token"])
    with pytest.raises(Invalid, match="needs a token"):
        access_rules(host, **tls)
    assert access_rules(host, token_file=files["token"], **tls).scheme == "https"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.10"])
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host) and access_rules(host).scheme == "http"


def test_a_token_is_long_private_and_not_shown(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    files["key"].write_text("short")
    with pytest.raises(Invalid, match="5 characters"):
        access_rules("127.0.0.1", token_file=files["key"])
    files["token"].chmod(0o644)
    with pytest.raises(Invalid, match="chmod 600"):
        access_rules("127.0.0.1", token_file=files["token"])
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert access_rules("127.0.0.1").token == TOKEN and TOKEN not in repr(access_rules("127.0.0.1"))


def test_a_certificate_has_a_key(files: dict[str, Path]) -> None:
    with pytest.raises(Invalid, match="belong together"):
        access_rules("127.0.0.1", certificate=files["certificate"])
    with pytest.raises(Invalid, match="is no file"):
        access_rules("127.0.0.1", certificate=files["certificate"], key=Path("/nowhere"))


def test_the_token_opens_as_bearer_and_as_password() -> None:
    locked = AccessRules(host="127.0.0.1", token=TOKEN)
    assert locked.authorises(f"Bearer {TOKEN}") and locked.authorises(f"bearer {TOKEN}")
    assert locked.authorises("Basic " + base64.b64encode(f"me:{TOKEN}".encode()).decode())
    for wrong in ("", TOKEN, "Bearer", f"Bearer {TOKEN}x", "Basic !", "Basic " + base64.b64encode(b"\xff:x").decode()):
        assert not locked.authorises(wrong), wrong
    assert AccessRules(host="127.0.0.1").authorises("")


def test_on_loopback_only_its_own_names_are_believed() -> None:
    here = AccessRules(host="127.0.0.1")
    for name in ("127.0.0.1:8787", "localhost", "LOCALHOST:1", "[::1]:8787"):
        assert here.accepts_host(name), name
    for name in ("", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::2]"):
        assert not here.accepts_host(name), name
