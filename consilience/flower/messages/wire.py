"""Trees and orders in Flower's records: named arrays for tensors, JSON texts for the rest; no executable content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from consilience.core.refusal import Refused
from consilience.core.settings import Invalid
from consilience.core.tree import SEPARATOR, Tree
from consilience.wire import arrays
from consilience.wire.arrays import Packed

STYPE = "numpy.ndarray"  # Flower's name for .npy bytes
ABOUT, ASIDE = "about", "aside"  # records of messages that belong to a secure sum
AUDIT = "audit"  # record with the head of the audit log
LONGEST = 1 << 22  # characters of a JSON text: thousands of clients on one node


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a node is to do with a broadcast, for those of its clients that are named."""

    run: str
    case: str  # which of several experiments of one app; "" where there is one
    rule: str
    round: int
    seed: int
    agreement: dict[str, str]
    clients: list[int]
    steps: list[int]
    heard: list[bool]
    memory: list[str]  # digests of the memories that the server expects; "" before the first


@dataclass(frozen=True, kw_only=True)
class ReplyReport:
    """What a node says about one client's reply."""

    client: Any
    run: Any
    round: Any
    examples: Any
    steps: Any
    digest: Any
    memory: Any  # digest of the memory afterwards
    lost: Any  # whether the memory that the server asked for was missing


@dataclass(frozen=True, kw_only=True)
class ClearReport:
    """A client's report in clear beside a masked reply."""

    clipped: Any  # values that were beyond the clip
    counters: Any  # path -> whole number: a counter has no mean


def records() -> Any:
    """Flower's record types; the error says what to install."""
    try:
        import flwr.app
    except ImportError as problem:
        raise ImportError('Flower is not installed: pip install "consilience[flower]"') from problem
    return flwr.app


def array_record(packed: Mapping[str, Packed]) -> Any:
    """Packed tensors by path as one ArrayRecord."""
    app = records()
    return app.ArrayRecord(
        {path: app.Array(dtype=one.dtype, shape=one.shape, stype=STYPE, data=one.data) for path, one in packed.items()}
    )


def packed(record: Any) -> dict[str, Packed]:
    """The arrays of a record, not yet read."""
    if not isinstance(record, records().ArrayRecord):
        raise Refused("format", detail=f"{type(record).__name__} instead of ArrayRecord")
    found = {}
    for path, array in record.items():
        if array.stype != STYPE:
            raise Refused("format", key=path, detail=f"{array.stype} instead of {STYPE}")
        found[path] = Packed(array.data, array.dtype, tuple(array.shape))
    return found


def put_tree(content: Any, name: str, value: Tree) -> None:
    """Add a tree to a RecordDict: its arrays, and the order of its paths (a last slash: an empty subtree)."""
    flat = dict(_walk(value))
    content[name] = array_record({path: arrays.to_bytes(leaf) for path, leaf in flat.items() if leaf is not None})
    put_json(content, f"{name}.paths", [path if leaf is not None else path + SEPARATOR for path, leaf in flat.items()])


def get_tree(content: Any, name: str) -> Tree:
    """The tree that `put_tree` added."""
    found, built = packed(content[name]), Tree()
    for path in get_json(content, f"{name}.paths"):
        *parents, last = path.rstrip(SEPARATOR).split(SEPARATOR)
        node = built
        for parent in parents:
            node = node.setdefault(parent, {})
        if path.endswith(SEPARATOR):
            node[last] = {}
        else:
            one = found[path]
            node[last] = arrays.from_bytes(one.data, one.shape, one.dtype)
    return built


def put_json(content: Any, name: str, value: Any) -> None:
    """Add plain values to a RecordDict."""
    content[name] = records().ConfigRecord({"json": json.dumps(value, separators=(",", ":"))})


def get_json(content: Any, name: str) -> Any:
    """The plain values that `put_json` added; `Refused` if they are missing or no JSON."""
    try:
        text = content[name]["json"]
        if not isinstance(text, str) or len(text) > LONGEST:
            raise ValueError("too long, or no text")
        return json.loads(text)
    except (KeyError, TypeError, ValueError, RecursionError) as problem:
        raise Refused("format", key=name, detail=f"{type(problem).__name__}: {problem}") from None


def put_order(content: Any, order: Order) -> None:
    """Add an order."""
    put_json(content, "order", asdict(order))


def get_order(content: Any) -> Order:
    """The order that a node was sent."""
    given = get_json(content, "order")
    try:
        return Order(**given)
    except TypeError as problem:
        raise Invalid(
            f"this node's consilience cannot read the server's order ({problem}): install one version"
        ) from None


def put_answer(content: Any, said: list[ReplyReport]) -> None:
    """Add the reports on the replies of one message."""
    put_json(content, "answer", [asdict(one) for one in said])


def get_answer(content: Any) -> list[ReplyReport]:
    """A node's reports on its clients' replies; not checked yet."""
    given = get_json(content, "answer")
    if not isinstance(given, list):
        raise Refused("format", key="answer", detail=f"{type(given).__name__} instead of a list")
    try:
        return [ReplyReport(**one) for one in given]
    except TypeError as problem:
        raise Refused("format", key="answer", detail=str(problem)) from None


def get_aside(content: Any) -> ClearReport:
    """A client's report beside a masked reply; not checked yet."""
    given = get_json(content, ASIDE)
    try:
        return ClearReport(**given)
    except TypeError as problem:
        raise Refused("format", key=ASIDE, detail=str(problem)) from None


def reply_name(client: int) -> str:
    """The record that holds a client's reply."""
    return f"reply.{client}"


def _walk(value: Tree, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, item in value.items():
        if not isinstance(item, dict):
            found.append((prefix + key, item))
        elif not item:
            found.append((prefix + key, None))
        else:
            found += _walk(item, prefix + key + SEPARATOR)
    return found
