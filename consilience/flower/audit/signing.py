"""Signatures of the audit log: made with the key of the server's certificate, which the members' CA has issued."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.core.refusal import plain
from consilience.core.settings import Invalid
from consilience.runs import canonical
from consilience.runs.disk import read_file

PURPOSE = "consilience audit log"  # so that no other signature of this key is valid for a log
MOST = 1 << 20  # bytes of a certificate or key


@dataclass(frozen=True, kw_only=True)
class Head:
    """The state of a log after some row: its id, the number of rows, the chain after the last, and its signature."""

    id: str
    rows: int
    chain: str
    signature: str = ""

    @property
    def signed_bytes(self) -> bytes:
        """What is signed."""
        return canonical.encode({"chain": self.chain, "id": self.id, "purpose": PURPOSE, "rows": self.rows})


class Signer:
    """The server's key and certificate."""

    def __init__(self, certificate: Path, key: Path) -> None:
        from cryptography.hazmat.primitives import serialization

        self.certificate = certificate.read_text(encoding="ascii")
        self._key: Any = serialization.load_pem_private_key(read_file(key, most=MOST), password=None)

    def sign(self, head: Head) -> str:
        """The signature of a head."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        return base64.b64encode(self._key.sign(head.signed_bytes, ec.ECDSA(hashes.SHA384()))).decode("ascii")


def is_signed(head: Head, certificate: str) -> bool:
    """Whether the key of this certificate has signed a head."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        public: Any = x509.load_pem_x509_certificate(certificate.encode()).public_key()
        public.verify(base64.b64decode(head.signature, validate=True), head.signed_bytes, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError, TypeError, AttributeError):
        return False
    return True


def why_not_issued(certificate: str, authority: Path) -> str:
    """Why a certificate was not issued by this CA; "" if it was. Its dates are ignored, since a log outlives them."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        issuer = x509.load_pem_x509_certificate(read_file(authority, most=MOST))
    except (ValueError, OSError) as problem:
        raise Invalid(f"{authority} is no certificate ({plain(problem, most=80)}): give ca.crt") from None
    if not certificate:
        return "there is none"
    try:
        x509.load_pem_x509_certificate(certificate.encode()).verify_directly_issued_by(issuer)
    except InvalidSignature:
        return f"it was not issued by the CA of {authority}"
    except (ValueError, TypeError) as problem:
        return plain(problem, most=80)
    return ""
