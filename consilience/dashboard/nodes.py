"""The nodes of a deployed run, as its server recorded them; malformed entries are left out."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from consilience.runs import canonical
from consilience.runs.disk import read_file
from consilience.runs.folder import NODES
from consilience.runs.names import plain

_MOST_BYTES = 1 << 23
_MOST_NODES = 2000
_MOST_CLIENTS = 200  # listed of a node


def node_table(run: Path) -> list[dict[str, Any]]:
    """One row per node: its clients and their training rows together, its health, and its refused replies."""
    return [_node(one) for one in _recorded(run)]


def client_rows(run: Path) -> list[int | None] | None:
    """The training rows of each client, as its node reported them; None if no node did."""
    found: dict[int, int] = {}
    for one in _recorded(run):
        found.update(_rows(one))
    return [found.get(client) for client in range(max(found) + 1)] if found else None


def _recorded(run: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        found = canonical.decode(read_file(run / NODES, most=_MOST_BYTES))
        nodes = found.get("nodes") if isinstance(found, dict) else None
        return [one for one in nodes[:_MOST_NODES] if isinstance(one, dict)] if isinstance(nodes, list) else []
    return []


def _rows(one: dict[str, Any]) -> dict[int, int]:
    """Client -> training rows; empty if the node's lists do not fit together."""
    clients, rows = one.get("clients"), one.get("train_rows")
    if not isinstance(clients, list) or not isinstance(rows, list) or len(clients) != len(rows):
        return {}
    return {
        client: count
        for client, count in zip(clients, rows)
        if type(client) is int and 0 <= client < 10**7 and type(count) is int
    }


def _node(one: dict[str, Any]) -> dict[str, Any]:
    clients, refused, rows = one.get("clients"), one.get("refused"), _rows(one)
    return {
        "node": plain(one.get("node", "?"), most=40),
        "clients": [k for k in clients[:_MOST_CLIENTS] if type(k) is int] if isinstance(clients, list) else [],
        "rows": sum(rows.values()) if rows else None,
        "online": one.get("online") is True,
        "joined": plain(one.get("joined", ""), most=40),
        "last_seen": plain(one.get("last_seen", ""), most=40),
        "answered": one.get("answered") if type(one.get("answered")) is int else 0,
        "failed": one.get("failed") if type(one.get("failed")) is int else 0,
        "refused": ", ".join(f"{plain(k, most=40)} {n}" for k, n in refused.items() if type(n) is int)
        if isinstance(refused, dict)
        else "",
        "problem": plain(one.get("problem", ""), most=300),
    }
