"""A node's receipts, row by row: what it received, what it answered, and the head of the server's log it was sent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from consilience.core.refusal import plain
from consilience.core.settings import Invalid
from consilience.flower.audit.log import masked_digest, received_digests
from consilience.flower.messages import wire
from consilience.runs.disk import make_folder, replace_file
from consilience.runs.row_log import RowLog

RECEIPTS = "CONSILIENCE_RECEIPTS"
"""Environment variable in which the launcher names a node's folder of receipts; empty: none are kept."""
MASKED = "secaggplus_configs", "masked_params"  # record and key of a masked reply


def keep(folder: Path, message: Any, reply: Any) -> None:
    """Record an order and its answer before the reply is sent; messages without an order need no receipt."""
    content = message.content
    if "order" not in content:
        return
    order = wire.get_order(content)
    received = received_digests(wire.get_tree(content, "shared"), wire.get_tree(content, "personal"))
    row = {
        "event": "answered",
        "run": order.run,
        "round": order.round + 1,
        "rule": order.rule,
        "node": str(message.metadata.dst_node_id),
        "clients": order.clients,
        "received": received,
        "replies": _replies(reply),
        "head": wire.get_json(content, wire.AUDIT) if wire.AUDIT in content else None,
    }
    _append(folder / f"{_name(order.run)}.jsonl", row)


def _replies(reply: Any) -> dict[str, str]:
    """Digests of the replies, by client."""
    record, key = MASKED
    masked = reply.config_records[record].get(key) if record in reply.config_records else None
    said = wire.get_answer(reply)
    return {str(one.client): masked_digest(masked) if masked is not None else one.digest for one in said}


def _append(path: Path, row: dict[str, Any]) -> None:
    """Add a row, under a lock for processes that answer at the same time."""
    import filelock

    make_folder(path.parent)
    with filelock.FileLock(path.with_suffix(".lock")):
        if not path.exists():
            replace_file(path, b"")
        log = RowLog(path, chained=True)
        log.drop_torn_line()
        log.append(row)


def _name(run: Any) -> str:
    """The name of the run's file; checked, since the server chooses the name of the run."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", str(run)):
        raise Invalid(f"{plain(run)!r} is no name of a run: letters, digits, '.', '_' and '-' only")
    return str(run)
