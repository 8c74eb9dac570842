"""Checks Flower's reply messages, converts them to arrivals, and filters their metrics."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from consilience.core.refusal import Refused
from consilience.core.screening import Limits
from consilience.core.tree import SEPARATOR, Tree, map_leaves
from consilience.flower.messages import wire
from consilience.flower.strategies.catalogue import TREES
from consilience.flower.strategies.records import StateDictLayout, flwr
from consilience.wire import arrays
from consilience.wire.admission import Arrival
from consilience.wire.arrays import Packed
from consilience.wire.template import Template

STEPS = "num-steps"
LONGEST_LIST = 1024  # numbers in one metric


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a strategy expects in a reply."""

    layout: StateDictLayout
    needs: tuple[str, ...]  # beside the model
    personal: frozenset[str]  # entries of the model that stay at clients: ignored in replies
    steps: bool
    weighted_by_key: str
    arrayrecord_key: str
    client_id_key: str

    def template(self, model: Tree) -> Template:
        """The template of replies to this model."""
        shared = {kind: {n: v for n, v in leaves.items() if n not in self.personal} for kind, leaves in model.items()}
        reply: Tree = {"model": shared}
        for name in self.needs:
            as_params = map_leaves(torch.zeros_like, model["params"])
            reply[name] = as_params if name in TREES else torch.zeros((), dtype=torch.float64)
        return Template.of(reply)

    def arrival(self, client: int, round: int, content: Any) -> Arrival:
        """One reply as an arrival; `Refused` if a required entry is missing."""
        metrics = numbers_of(content)
        if self.weighted_by_key not in metrics:
            raise Refused("examples", detail=f"no metric {self.weighted_by_key!r}")
        if self.steps and STEPS not in metrics:
            raise Refused("steps", detail=f"no metric {STEPS!r}, which this strategy needs")
        packed = {**self._model(content), **self._others(content)}
        for name in self.needs:
            if name not in TREES:
                packed[name] = _number(metrics, name)
        return Arrival(
            client=client,
            round=round,
            examples=metrics[self.weighted_by_key],
            steps=metrics.get(STEPS, 1),
            packed=packed,
            metrics={key: value for key, value in metrics.items() if not isinstance(value, list)},
        )

    def _model(self, content: Any) -> dict[str, Packed]:
        records = content.array_records
        own = [key for key in records if key not in self.needs]
        key = self.arrayrecord_key if self.arrayrecord_key in own else next(iter(own), None)
        if key is None:
            raise Refused("missing_key", key=self.arrayrecord_key, detail="the reply holds no model")
        if len(own) > 1:
            raise Refused("unknown_key", key=next(k for k in own if k != key), detail="one more ArrayRecord than asked")
        found = wire.packed(records[key])
        return {self.layout.path(name): item for name, item in found.items() if name not in self.personal}

    def _others(self, content: Any) -> dict[str, Packed]:
        found: dict[str, Packed] = {}
        for name in (name for name in self.needs if name in TREES):
            if name not in content.array_records:
                raise Refused("missing_key", key=name, detail="this strategy needs an ArrayRecord of this name")
            for leaf, item in wire.packed(content.array_records[name]).items():
                found[SEPARATOR.join((name, leaf))] = item
        return found


def numbers_of(content: Any) -> dict[str, Any]:
    """All metrics of a reply; where two records have one name, the first counts."""
    found: dict[str, Any] = {}
    for record in content.metric_records.values():
        for key, value in record.items():
            found.setdefault(key, value)
    return found


def metric_name(name: str) -> str:
    """The name of a reply's number among Flower's metrics."""
    return name.replace("_", "-")


def examples_of(metrics: Mapping[str, Any], key: str, limits: Limits) -> int:
    """A valid number of examples beside an evaluation, or `Refused`."""
    value = metrics.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 1:
        raise Refused("examples", detail=f"{key} = {value!r} is no whole number >= 1")
    if value != int(value) or value > limits.max_examples:
        raise Refused("examples", detail=f"{key} = {value!r}: a whole number up to {limits.max_examples:,} is needed")
    return int(value)


def cleaned(content: Any, drop: Collection[str]) -> Any:
    """The reply without metrics that are not finite or too long, and without those named in `drop`."""
    app = flwr("app")
    records = {key: record for key, record in content.items() if key not in content.metric_records}
    for key, record in content.metric_records.items():
        kept = {name: value for name, value in record.items() if name not in drop and _usable(value)}
        records[key] = app.MetricRecord(kept)
    return app.RecordDict(records)


def in_common(contents: list[Any]) -> list[Any]:
    """The replies with only the metrics that all have in the same form, which can be averaged."""
    forms = [{key: _form(value) for key, value in numbers_of(content).items()} for content in contents]
    common = {key for key, form in forms[0].items() if all(other.get(key) == form for other in forms[1:])}
    others = {key for form in forms for key in form} - common
    return [cleaned(content, others) for content in contents] if others else contents


def _usable(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return len(values) <= LONGEST_LIST and all(math.isfinite(number) for number in values)


def _form(value: Any) -> int:
    return len(value) if isinstance(value, list) else -1


def _number(metrics: Mapping[str, Any], name: str) -> Packed:
    value = metrics.get(metric_name(name), metrics.get(name))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused("missing_key", key=name, detail=f"this strategy needs the metric {metric_name(name)!r}")
    return arrays.to_bytes(torch.tensor(value, dtype=torch.float64))
