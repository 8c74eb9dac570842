"""The server's audit log: a row for each event of a deployed run, chained to the rows before and signed.

Rows are only added, also when a run is continued from an earlier checkpoint: rounds that were computed twice are in the
log twice. A row is on disk before the data it describes leave the server.
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from consilience.core import tree
from consilience.core.refusal import Refusal, plain
from consilience.core.tree import Tree
from consilience.flower.audit.signing import Head, Signer
from consilience.runs.disk import replace_file
from consilience.runs.row_log import RowLog
from consilience.wire import arrays

FILE = "audit.jsonl"
KEYS = "CONSILIENCE_SERVER_KEYS"
"""Environment variable in which the launcher names the folder of the server's certificate and key; empty: unsigned."""


class AuditLog:
    """Adds rows to the audit log of one run."""

    def __init__(self, path: Path, signer: Signer | None = None) -> None:
        self._log, self._signer = RowLog(path, chained=True), signer
        if not path.exists():
            replace_file(path, b"")
        self._log.drop_torn_line()  # left by a killed server; it was never sent
        rows = self._log.read().rows  # raises, with its name, if it was changed
        self._rows = len(rows)
        self._id = str(rows[0]["id"]) if rows else secrets.token_hex(16)

    def add(self, event: str, *, sync: bool = False, **facts: Any) -> None:
        """Add one row."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._log.append({"n": self._rows, "time": now, "event": event, **facts}, sync=sync)
        self._rows += 1

    def sign(self) -> Head:
        """The current head of the log, with its signature in a row of its own, on disk."""
        head = Head(id=self._id, rows=self._rows, chain=self._log.chain)
        if self._signer is not None:
            head = replace(head, signature=self._signer.sign(head))
        self.add("signed", rows=head.rows, of=head.chain, signature=head.signature, sync=True)
        return head

    def started(self, *, done: int, model: Tree, **facts: Any) -> None:
        """The server has begun, or begun again after `done` rounds, from this model."""
        certificate = "" if self._signer is None else self._signer.certificate
        self.add("started", id=self._id, round=done, model=model_digest(model), certificate=certificate, **facts)
        self.sign()

    def joined(self, node: int, key: str, clients: Mapping[int, Sequence[int]]) -> None:
        """A node has introduced itself; `clients`: how many rows of each split they have."""
        rows = {str(client): list(sizes) for client, sizes in sorted(clients.items())}
        self.add("joined", node=str(node), key=key, clients=rows)

    def turned_away(self, node: int, key: str, why: str) -> None:
        """A node was refused."""
        self.add("turned_away", node=str(node), key=key, why=plain(why, most=400))

    def left(self, clients: Iterable[int]) -> None:
        """Clients whose nodes are no longer online."""
        self.add("left", clients=sorted(clients))

    def sent(
        self, round: int, rule: str, shared: Tree, nodes: Mapping[int, tuple[Sequence[int], Tree]]
    ) -> dict[str, Any]:
        """Log what is sent to each node, with its clients and personal parts; returns the head sent with it."""
        to = [
            {"node": str(node), "clients": list(clients)}
            | ({"personal": arrays.digest(own)} if tree.flatten(own) else {})
            for node, (clients, own) in sorted(nodes.items())
        ]
        facts: dict[str, Any] = {"shared": arrays.digest(shared), **_model(shared), "to": to}
        self.add("sent", round=round + 1, rule=rule, **facts)
        return asdict(self.sign())

    def received(
        self,
        round: int,
        rule: str,
        replies: Mapping[int, str],
        refusals: Iterable[Refusal],
        silent: Iterable[int],
        *,
        masked: bool = False,
    ) -> None:
        """Log the replies: digests by client, refusals with their reasons, and clients that did not answer."""
        digests = {str(client): digest for client, digest in sorted(replies.items())}
        refused, without = [_refused(refusal) for refusal in refusals], sorted(silent)
        self.add(
            "received",
            round=round + 1,
            rule=rule,
            replies=digests,
            refused=refused,
            silent=without,
            **({"masked": True} if masked else {}),
        )

    def concluded(
        self, number: int, chosen: Sequence[int], used: Sequence[int], refusals: Iterable[Refusal], model: Tree
    ) -> None:
        """A round has ended: the clients whose replies were aggregated, and the model's digest."""
        refused = [_refused(refusal) for refusal in refusals]
        self.add(
            "round", round=number, chosen=list(chosen), used=list(used), refused=refused, model=model_digest(model)
        )
        self.sign()

    def ended(self, status: str, reason: str = "", files: Mapping[str, str] | None = None) -> None:
        """The server has stopped regularly; `files`: SHA-256 of its files in the run folder."""
        self.add("ended", status=status, reason=plain(reason, most=400), files=dict(files or {}))
        self.sign()


def model_digest(model: Tree) -> str:
    """SHA-256 of a model's paths, types, shapes and bits."""
    return arrays.digest(tree.to(model, "cpu"))


def received_digests(shared: Tree, personal: Tree) -> dict[str, str]:
    """The digests of what a node has received, as both sides record them."""
    own = {"personal": arrays.digest(personal)} if tree.flatten(personal) else {}
    return {"shared": arrays.digest(shared), **_model(shared), **own}


def masked_digest(vectors: Sequence[bytes]) -> str:
    """SHA-256 of a masked reply, which reveals nothing about the reply."""
    return hashlib.sha256(b"".join(vectors)).hexdigest()


def _model(shared: Tree) -> dict[str, str]:
    model = shared.get("model")
    return {"model": arrays.digest(model)} if isinstance(model, dict) else {}


def _refused(refusal: Refusal) -> dict[str, Any]:
    return {"client": str(refusal.client), "reason": refusal.reason, "detail": str(refusal)}
