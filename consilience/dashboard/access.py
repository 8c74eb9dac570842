"""Access rules: anyone on this machine may view; remote access and control of runs need a token."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from consilience.core.settings import Invalid

TOKEN_VARIABLE = "CONSILIENCE_DASHBOARD_TOKEN"
SHORTEST_TOKEN = 20
_MOST_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """Where the server listens, and what a request must contain."""

    host: str
    token: str = field(default="", repr=False)
    certificate: Path | None = None
    key: Path | None = None
    control: bool = False  # whether runs may be stopped and resumed
    made_token: bool = False  # generated for this start, because control needs one and none was given
    page_secret: str = field(default_factory=secrets.token_urlsafe, repr=False)  # embedded in our own pages only

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"

    def authorises(self, authorization: str) -> bool:
        """Whether an Authorization header has the token: as a bearer token, or as a basic authentication password."""
        if not self.token:
            return True
        kind, _, rest = authorization.partition(" ")
        shown = rest.strip() if kind.lower() == "bearer" else _password(rest) if kind.lower() == "basic" else ""
        return hmac.compare_digest(shown.encode(), self.token.encode())

    def is_own_page(self, secret: str) -> bool:
        """Whether a request comes from a page that this server has served since its start."""
        return hmac.compare_digest(secret.encode(), self.page_secret.encode())

    def accepts_host(self, host: str) -> bool:
        """Whether a Host header names this machine: on loopback no other name is accepted.

        Otherwise a web page could point its own name to 127.0.0.1 and read the answers (DNS rebinding).
        """
        if not is_loopback(self.host):
            return True
        name = host.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        return name == "localhost" or is_loopback(name)


def access_rules(
    host: str,
    *,
    token_file: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    control: bool = False,
) -> AccessRules:
    """The rules asked for; refused if they would show the runs to others unprotected."""
    token = _token(token_file)
    if (certificate is None) != (key is None):
        raise Invalid("--certificate and --key belong together: give both files, or none")
    for name, path in (("--certificate", certificate), ("--key", key)):
        if path is not None and not path.is_file():
            raise Invalid(f"{name} = {str(path)!r} is no file")
    if not is_loopback(host):
        missing = [
            *([] if token else [f"a token (--token-file, or {TOKEN_VARIABLE})"]),
            *([] if certificate else ["TLS (--certificate and --key)"]),
        ]
        if missing:
            raise Invalid(
                f"--host = {host!r} can be reached from other machines, which needs {' and '.join(missing)}; "
                "without them only 127.0.0.1 is allowed"
            )
    if control and os.name != "posix":
        raise Invalid("--control stops runs by signals, which this system does not have: leave it out")
    made = control and not token  # on loopback anyone with an account on this machine could stop the runs
    token = secrets.token_urlsafe() if made else token
    return AccessRules(host=host, token=token, certificate=certificate, key=key, control=control, made_token=made)


def is_loopback(host: str) -> bool:
    """Whether an address is loopback; of names only localhost is."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(file: Path | None) -> str:
    if file is None:
        token, place = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
    else:
        token, place = _read_token(file), f"--token-file = {str(file)!r}"
    if (token or file is not None) and len(token) < SHORTEST_TOKEN:
        raise Invalid(
            f"{place} holds a token of {len(token)} characters: use at least {SHORTEST_TOKEN}, such as the output of "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


def _read_token(file: Path) -> str:
    if not file.is_file():
        raise Invalid(f"--token-file = {str(file)!r} is no file")
    if os.name == "posix" and file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Invalid(f"--token-file = {str(file)!r} can be read by others on this machine: chmod 600 {file}")
    with open(file, encoding="utf-8", errors="replace") as stream:
        return stream.read(_MOST_BYTES).strip()


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
