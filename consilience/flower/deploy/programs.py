"""The command lines of a deployment's processes; only the gateway can listen outside this machine.

SuperLink and SuperNodes listen on loopback. Apps are always started by our executor, so Flower's processes run with
`--isolation process` and start none.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import ssl
import sys
from pathlib import Path

from consilience.core.settings import Invalid
from consilience.flower.deploy.keys import Keys

LOOPBACK = "127.0.0.1"


def superlink(port: int, *, keys: Keys | None, secret: Path, database: Path | None = None) -> list[str]:
    """Flower's SuperLink on loopback; with keys, TLS, and nodes with registered keys only."""
    command = ["flower-superlink", "--host", LOOPBACK, "--port", str(port), "--isolation", "process"]
    command += ["--superexec-auth-secret-file", str(secret), "--disable-runtime-dependency-installation"]
    command += ["--database", str(database)] if database else []
    if keys is None:
        return [*command, "--insecure"]
    command += ["--ssl-ca-certfile", str(keys.authority), "--ssl-certfile", str(keys.certificate)]
    return [*command, "--ssl-keyfile", str(keys.certificate_key), "--enable-supernode-auth"]


def gateway(host: str, port: int, *, superlink: int, keys: Keys) -> list[str]:
    """What other machines can reach of the SuperLink on that port of loopback."""
    command = [sys.executable, "-m", "consilience.flower.deploy.gateway", "--host", host, "--port", str(port)]
    command += ["--superlink", f"https://{LOOPBACK}:{superlink}", "--authority", str(keys.authority)]
    return [*command, "--certificate", str(keys.certificate), "--key", str(keys.certificate_key)]


def executor(role: str, port: int, *, secret: Path, allowed: Path, authority: Path | None) -> list[str]:
    """What starts the allowed apps, for the SuperLink or SuperNode on that port of loopback."""
    command = [sys.executable, "-m", "consilience.flower.deploy.executor", role, "--allowed", str(allowed)]
    command += ["--runtime-api-address", f"{LOOPBACK}:{port}", "--superexec-auth-secret-file", str(secret)]
    return [*command, *(["--root-certificates", str(authority)] if authority else ["--insecure"])]


def supernode(
    superlink: str, port: int, *, secret: Path, authority: Path | None, key: Path | None, node_config: str
) -> list[str]:
    """A SuperNode whose own port is on loopback; with an authority, TLS and a key."""
    command = ["flower-supernode", "--superlink", superlink, "--host", LOOPBACK, "--port", str(port)]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret), "--node-config", node_config]
    if authority is None or key is None:
        return [*command, "--insecure"]
    return [*command, "--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]


def connection(name: str, port: int, authority: Path | None) -> str:
    """Flower's config.toml, by which its command `flwr` finds the SuperLink on that port of loopback."""
    trust = f"root-certificates = {json.dumps(str(authority))}" if authority else "insecure = true"
    return f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{LOOPBACK}:{port}"\n{trust}\n'


def address(text: str, what: str) -> tuple[str, int]:
    """Host and port of `host:port`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Invalid(f"{what} = {text!r} is no address: write host:port, such as fl.example.org:8000")
    return host.strip("[]"), int(port)


def connection_to(host: str, port: int, authority: Path | None, seconds: float) -> http.client.HTTPConnection:
    """A connection that waits at most so long; TLS if there is an `authority`, the file of its certificate."""
    if authority is None:
        return http.client.HTTPConnection(host, port, timeout=seconds)
    context = ssl.create_default_context(cafile=str(authority))
    return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)


def is_loopback(address: str) -> bool:
    """Whether an address (with or without a port) never leaves this machine."""
    host = address.rpartition(":")[0] if address.count(":") == 1 or address.startswith("[") else address
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
