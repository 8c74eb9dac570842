"""The Grid as Flower's SecAgg+ workflow sees it: our messages, and every answer checked first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from consilience.core.refusal import Refused
from consilience.flower.audit.log import masked_digest
from consilience.flower.messages import wire
from consilience.flower.messages.mail import Mail
from consilience.flower.messages.pulling import TEXT, TEXT_EACH, MessageLimit
from consilience.flower.secure.terms import MODULUS
from consilience.wire import arrays

InClear = tuple[wire.ReplyReport, wire.ClearReport]
"""A client's report in clear beside its masked reply."""


@dataclass(eq=False, kw_only=True)
class SumResult:
    """The result of one secure sum; without a mean, `why` says why."""

    mean: np.ndarray | None = None  # [P] float64
    in_clear: dict[int, InClear] = field(default_factory=dict)  # by node: those whose replies are in the sum
    refusals: list[tuple[int, Refused]] = field(default_factory=list)  # nodes whose answer could not be used
    failures: dict[int, str] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)  # nodes that were asked and are not in the sum
    stale: list[tuple[int, str]] = field(default_factory=list)
    met: int = 0  # nodes that answered the first stage
    nbytes: int = 0  # sent by nodes
    digests: dict[int, str] = field(default_factory=dict)  # by node: of its masked reply
    why: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class SumRequest:
    """One round's sum: the orders, the largest weight, and the check of the reports in clear."""

    contents: Mapping[int, Any]  # by node: the order and what is broadcast
    case: str
    turn: int  # the number of this sum: a node may still answer an earlier one
    group: str  # such as "round 3"
    binding: bytes  # the context from which mask keys are derived
    heaviest: float  # weight
    length: int  # values in the vector
    look: Callable[[int, Any], InClear]  # `Refused` if a node's report is invalid
    bound: float = 0.0  # clip norm of the clients' updates, in a private sum


class CheckedGrid:
    """Sends the workflow's messages; a node with an unexpected answer counts as silent."""

    def __init__(self, mail: Mail, asked: SumRequest, found: SumResult, deadline: float) -> None:
        self._mail, self._asked, self._found, self._deadline = mail, asked, found, deadline

    def send_and_receive(self, messages: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        """The answers that may be used; a node without one is silent."""
        from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

        contents, stage = {}, ""
        for message in messages:
            node, content = message.metadata.dst_node_id, message.content
            configs = content.config_records[RECORD_KEY_CONFIGS]
            stage = str(configs[Key.STAGE])
            if stage == Stage.COLLECT_MASKED_VECTORS:
                content = self._asked.contents[node]
                content.config_records[RECORD_KEY_CONFIGS] = configs
            wire.put_json(content, wire.ABOUT, {"case": self._asked.case, "turn": self._asked.turn})
            contents[node] = content
        vector = self._asked.length * torch.int64.itemsize + arrays.USUAL_HEADER  # it comes in a record, not as arrays
        bound = MessageLimit(arrays=TEXT, text=TEXT + vector + len(contents) * TEXT_EACH)
        group = f"{self._asked.group}, {stage}"
        answers = self._mail.ask(contents, "train", group, self._deadline, dict.fromkeys(contents, bound))
        self._found.refusals += answers.refused.items()
        self._found.failures |= answers.failures
        self._found.stale += answers.stale
        replies = []
        for node, content in sorted(answers.replies.items()):
            try:
                replies.append(self._read(node, content, contents[node].config_records[RECORD_KEY_CONFIGS]))
            except Refused as problem:
                self._found.refusals.append((node, problem))
        if stage != Stage.UNMASK:
            self._found.silent |= set(contents) - {reply.metadata.src_node_id for reply in replies}
        return replies

    def _read(self, node: int, content: Any, configs: Any) -> Any:
        """The answer, checked and reduced to what the workflow needs."""
        from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

        app, stage = wire.records(), str(configs[Key.STAGE])
        try:
            given = content.config_records[RECORD_KEY_CONFIGS]
            self._found.nbytes += sum(map(_nbytes, given.values()))
            kept = {key: _typed(given[key], kinds) for key, kinds in _expected(stage).items()}
        except (KeyError, TypeError) as problem:
            raise Refused("format", key=stage, detail=repr(problem)) from None
        if stage in (Stage.SHARE_KEYS, Stage.UNMASK) and len({len(some) for some in kept.values()}) != 1:
            raise Refused("format", key=stage, detail="lists of different lengths")
        if stage == Stage.UNMASK:
            wanted = [*configs[Key.ACTIVE_NODE_ID_LIST], *configs[Key.DEAD_NODE_ID_LIST]]
            if sorted(kept[Key.NODE_ID_LIST]) != sorted(wanted):
                raise Refused("format", key=stage, detail="shares of other nodes than was asked for")
        clean = app.RecordDict({RECORD_KEY_CONFIGS: app.ConfigRecord(kept)})
        if stage == Stage.COLLECT_MASKED_VECTORS:
            self._look_at_vector(kept[Key.MASKED_PARAMETERS])
            self._found.in_clear[node] = self._asked.look(node, content)
            self._found.digests[node] = masked_digest(kept[Key.MASKED_PARAMETERS])
            clean.update(_empty_fit())
        return SimpleNamespace(metadata=SimpleNamespace(src_node_id=node), content=clean, has_error=lambda: False)

    def _look_at_vector(self, masked: list[bytes]) -> None:
        """Check that an answer is exactly a weight and a vector of whole numbers below the modulus."""
        if len(masked) != 2:
            raise Refused("format", detail=f"{len(masked)} arrays instead of a weight and a vector")
        for data, length in zip(masked, (1, self._asked.length)):
            values = arrays.from_bytes(data, (length,), torch.int64)
            if length and (int(values.min()) < 0 or int(values.max()) >= MODULUS):
                raise Refused("value", detail=f"not within 0..{MODULUS - 1}")


def _expected(stage: str) -> dict[str, tuple[type, ...]]:
    """What an answer to each stage holds: (kind,) of a value, (list, kind) of a list."""
    from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage

    known: dict[str, dict[str, tuple[type, ...]]] = {
        Stage.SETUP: {Key.PUBLIC_KEY_1: (bytes,), Key.PUBLIC_KEY_2: (bytes,)},
        Stage.SHARE_KEYS: {Key.DESTINATION_LIST: (list, int), Key.CIPHERTEXT_LIST: (list, bytes)},
        Stage.COLLECT_MASKED_VECTORS: {Key.MASKED_PARAMETERS: (list, bytes)},
        Stage.UNMASK: {Key.NODE_ID_LIST: (list, int), Key.SHARE_LIST: (list, bytes)},
    }
    return known[stage]


def _typed(value: Any, kinds: tuple[type, ...]) -> Any:
    values = value if kinds[0] is list and type(value) is list else [value]
    if (kinds[0] is list and type(value) is not list) or any(type(one) is not kinds[-1] for one in values):
        raise TypeError(f"{type(value).__name__} instead of {' of '.join(kind.__name__ for kind in kinds)}")
    return value


def _nbytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_nbytes, value))
    return len(value) if isinstance(value, (bytes, str)) else 8


def _empty_fit() -> Any:
    """The empty fit result that the workflow stores beside a reply's vector."""
    from flwr.common import Code, FitRes, Parameters, Status
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict

    nothing = Parameters(tensors=[], tensor_type="")
    return fitres_to_recorddict(FitRes(Status(code=Code.OK, message=""), nothing, 0, {}), keep_input=True)
