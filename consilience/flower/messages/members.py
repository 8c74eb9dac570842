"""The server's list of members: which node key may represent which clients, and their maximal numbers of rows."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from consilience.core.refusal import Refused, plain
from consilience.core.settings import Invalid


@dataclass(frozen=True, kw_only=True)
class Member:
    """One node: the clients that its key may represent, and the declared rows of each, if any."""

    clients: tuple[int, ...]
    train: Mapping[int, int] = field(default_factory=dict)  # client -> rows
    test: Mapping[int, int] = field(default_factory=dict)

    def refuse_claims(self, said: Mapping[int, Sequence[int]]) -> None:
        """`Refused` if a node with this key claims another client, or more rows than were declared."""
        for client, (train, test, validation) in said.items():
            if client not in self.clients:
                mine = ", ".join(map(str, self.clients))
                raise Refused("identity", detail=f"its key is that of client {mine}, not of {plain(client, most=40)}")
            for what, rows, declared in (("train", train + validation, self.train), ("test", test, self.test)):
                if rows > declared.get(client, rows):
                    detail = f"client {client} says {rows} {what} rows, and {declared[client]} were declared"
                    raise Refused("examples", detail=detail)


Members = Mapping[str, Member]
"""Fingerprint of a public key -> its member."""


def refuse_shared(members: Members, clients: int) -> None:
    """`Invalid` if two keys share a client, or a client is not in the federation."""
    seen: dict[int, str] = {}
    for key, member in members.items():
        for client in member.clients:
            if not 0 <= client < clients:
                raise Invalid(f"the list of members has client {client}, and there are 0..{clients - 1}")
            if seen.setdefault(client, key) != key:
                raise Invalid(f"the list of members has two keys for client {client}: remove one")


@functools.lru_cache(maxsize=4096)
def fingerprint(public_key: bytes) -> str:
    """SHA-256 of a public key, in PEM or in the form of OpenSSH; "" if it is neither."""
    from cryptography.hazmat.primitives import serialization as form

    for load in (form.load_pem_public_key, form.load_ssh_public_key):
        try:
            key = load(public_key)
        except Exception:  # invalid keys raise many kinds of exceptions
            continue
        return hashlib.sha256(key.public_bytes(form.Encoding.DER, form.PublicFormat.SubjectPublicKeyInfo)).hexdigest()
    return ""


def keys_of(grid: Any) -> dict[int, str]:
    """Node -> fingerprint of the key it authenticated with, as the SuperLink knows it; of nodes that are online."""
    from flwr.proto.runtime_pb2 import GetNodesRequest

    try:
        found = grid._runtime_client.GetNodes(GetNodesRequest()).nodes  # no public method of Flower's gives the keys
        return {node.node_id: fingerprint(node.public_key) for node in found}
    except AttributeError as problem:
        raise Invalid(
            f"this version of Flower does not give the nodes' keys ({problem}), and there is a list of members: "
            "use flwr 1.41"
        ) from problem
