"""Certificates and node keys for a deployment, made by the `cryptography` package, which Flower installs."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from consilience.core.settings import Invalid

DAYS = 365


class Keys(NamedTuple):
    """The paths of the files; private ones are readable by their owner only."""

    authority: Path  # CA certificate: everyone needs it
    certificate: Path  # the SuperLink's
    certificate_key: Path
    nodes: tuple[Path, ...]  # a private key each; its public half beside it, ending in .pub


def make(folder: Path, *, hosts: tuple[str, ...] = ("127.0.0.1", "localhost"), nodes: int = 0) -> Keys:
    """Make a CA, a server certificate for these names and addresses, and `nodes` node keys, in a new folder."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority_key, server_key = _key(), _key()
    authority = (
        _certificate("consilience local CA", authority_key.public_key(), None)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    server = (
        _certificate(hosts[0], server_key.public_key(), authority.subject)
        .add_extension(x509.SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    _write(folder / "ca.key", _pem(authority_key), secret=True)
    return Keys(
        authority=_write(folder / "ca.crt", _encoded(authority)),
        certificate=_write(folder / "server.pem", _encoded(server)),
        certificate_key=_write(folder / "server.key", _pem(server_key), secret=True),
        nodes=tuple(node_key(folder / f"node-{number}") for number in range(nodes)),
    )


def load(folder: Path) -> Keys:
    """The server's side of a folder that `make` wrote; a private key that others may read is refused."""
    folder = Path(folder).resolve()
    made = Keys(folder / "ca.crt", folder / "server.pem", folder / "server.key", ())
    for path in made[:3]:
        if not path.is_file():
            raise Invalid(f"{path} is missing: `consilience deploy keys {folder} --host NAME` makes it")
    return made._replace(certificate_key=private(made.certificate_key))


def private(path: Path) -> Path:
    """A file that only its owner may read; `Invalid` if others can."""
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise Invalid(f"{path} can be read by others on this machine: chmod 600 {path}")
    return path


def node_key(path: Path) -> Path:
    """Make a SuperNode's private key at `path`, and its public key at `path`.pub, which the server's side registers."""
    from cryptography.hazmat.primitives import serialization as form

    key = _key()
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    _write(Path(f"{path}.pub"), public + b"\n")
    return _write(Path(path), private, secret=True)


def secret(path: Path) -> Path:
    """Make a secret that a SuperLink shares with its ServerApp executor; an existing one is kept."""
    return path if path.exists() else _write(path, secrets.token_hex(32).encode(), secret=True)


def _key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _certificate(name: str, public_key: Any, issuer: Any) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _usage(*, signs: bool) -> Any:
    from cryptography import x509

    off = dict.fromkeys(("content_commitment", "data_encipherment", "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(
        digital_signature=True,
        key_encipherment=not signs,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        **off,
    )


def _name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _encoded(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def _write(path: Path, content: bytes, *, secret: bool = False) -> Path:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)
    return path
