"""The file members.toml: every node's public key, its clients, and the rows they were declared to have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from consilience.core.settings import Invalid
from consilience.flower.messages.members import Member, fingerprint
from consilience.runs import toml_text

MEMBERS = "CONSILIENCE_MEMBERS"
"""Environment variable in which the launcher names the file; empty: any registered node may be any client."""
FILE = "members.toml"
KEYS = {"key", "clients", "train", "test"}


def read(file: Path) -> dict[str, Member]:
    """The members, by the fingerprints of their keys; `Invalid` if anything is wrong with the file."""
    members: dict[str, Member] = {}
    for number, entry in enumerate(_entries(file)):
        where = f"{file}, member {number + 1}"
        if not isinstance(entry, Mapping) or not {"key", "clients"} <= set(entry) <= KEYS:
            raise Invalid(f"{where}: needs key and clients, and may have train and test (rows, in their order)")
        name = fingerprint(str(entry["key"]).encode())
        if not name:
            raise Invalid(f"{where}: key is no public key: the text of node.pub is needed")
        if name in members:
            raise Invalid(f"{where}: its key is listed twice")
        clients = _whole(entry["clients"], where, "clients")
        members[name] = Member(
            clients=clients,
            train=_declared(entry, "train", clients, where),
            test=_declared(entry, "test", clients, where),
        )
    return members


def add(
    file: Path,
    public_key: Path,
    clients: Iterable[int],
    *,
    train: Iterable[int] | None = None,
    test: Iterable[int] | None = None,
) -> None:
    """Enter a key with its clients; an entry of the same key, or of just these clients, is replaced."""
    key, held = public_key.read_text(encoding="utf-8").strip(), list(clients)
    if not fingerprint(key.encode()):
        raise Invalid(f"{public_key} is no public key: the other side sends the file node.pub")
    kept = []
    for entry in _entries(file) if file.exists() else ():
        if fingerprint(str(entry["key"]).encode()) == fingerprint(key.encode()):
            continue
        others = [client for client in entry["clients"] if client not in held]
        if len(others) == len(entry["clients"]):
            kept.append(dict(entry))
        elif others:
            raise Invalid(
                f"{file}: clients {entry['clients']} belong to one key, and now {held} to another: remove that entry"
            )
    rows = {"train": train, "test": test}
    mine = {"key": key, "clients": held, **{name: list(said) for name, said in rows.items() if said is not None}}
    file.write_text(toml_text.dumps({"member": [*kept, mine]}), encoding="utf-8")
    read(file)


def _entries(file: Path) -> list[Any]:
    entries = toml_text.read(file).get("member", [])
    if not isinstance(entries, list):
        raise Invalid(f"{file}: write [[member]] and its settings below it, once for every node")
    return entries


def _whole(values: Any, where: str, name: str) -> tuple[int, ...]:
    if not isinstance(values, list) or not values or not all(type(value) is int and value >= 0 for value in values):
        raise Invalid(f"{where}: {name} = {values!r} must be a list of whole numbers, such as [0]")
    return tuple(values)


def _declared(entry: Mapping[str, Any], name: str, clients: tuple[int, ...], where: str) -> dict[int, int]:
    if name not in entry:
        return {}
    rows = _whole(entry[name], where, name)
    if len(rows) != len(clients):
        raise Invalid(f"{where}: {name} has {len(rows)} numbers for {len(clients)} clients")
    return dict(zip(clients, rows))
