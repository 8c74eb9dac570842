"""A run's metrics and how they are shown: the stored metric rows, and the columns derived from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from consilience.core.metrics import SHARE, Better, MetricRow, loss_metric
from consilience.runs.names import plain
from consilience.task.kinds import KINDS
from consilience.task.losses import squared_error
from consilience.task.measures import ON_ALL_ROWS

FACT = "metrics"
"""Under which name `run.json` holds the rows."""

Role = Literal["metric", "clients", "local", "personal", "training"]
_MOST = 200  # metrics of a run that are read
_LONGEST = 300  # characters of a caption


@dataclass(frozen=True, kw_only=True)
class Column:
    """A field of the record as it is shown.

    better: "" if neither direction is. heading, axis, caption: of its figure, if it has one. detail: left out of
    overviews.
    """

    key: str
    title: str
    role: Role
    unit: str = ""
    better: Better | Literal[""] = ""
    heading: str = ""
    axis: str = ""
    caption: str = ""
    detail: bool = False

    @property
    def has_figure(self) -> bool:
        """Whether a report draws it over rounds."""
        return bool(self.axis) and not self.detail


def stored(rows: Iterable[MetricRow]) -> list[dict[str, Any]]:
    """The rows as facts of a run; "key" is renamed, since it would be redacted as a secret."""
    found = [asdict(row) for row in rows]
    return [{"name": row.pop("key"), **row} for row in found]


def read(facts: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> tuple[MetricRow, ...]:
    """The metrics of a run; of an old one, whose facts do not list them, the built-in ones that its record has."""
    found = facts.get(FACT)
    rows = [row for entry in found[:_MOST] if (row := _row(entry)) is not None] if isinstance(found, list) else []
    if not rows:
        known = {key for row in history for key, value in row.items() if value is not None}
        rows = [row for row in _built_in() if row.key in known or row.key == "loss"]
    once = {row.key: row for row in reversed(rows)}
    return _one_main([once[key] for key in dict.fromkeys(row.key for row in rows)])


def merged(tables: Iterable[Sequence[MetricRow]]) -> tuple[MetricRow, ...]:
    """The metrics of several runs, each once; several kinds of task have several main ones."""
    found: dict[str, MetricRow] = {}
    for row in (row for table in tables for row in table):
        found[row.key] = replace(row, main=row.main or (row.key in found and found[row.key].main))
    return tuple(found.values())


def main_of(rows: Sequence[MetricRow]) -> MetricRow:
    """The metric that clients are compared by."""
    return next((row for row in rows if row.main), rows[0])


def by_importance(rows: Sequence[MetricRow]) -> list[MetricRow]:
    """The main metric first, then the loss, then the others."""
    return sorted(rows, key=lambda row: (not row.main, row.key != "loss"))


def columns(rows: Sequence[MetricRow]) -> tuple[Column, ...]:
    """All fields of the record that are shown, in the order of a table."""
    found = [_own(row) for row in rows]
    for main in (row for row in rows if row.main):
        found += _derived(main)
    for row in rows:
        if row.main or row.key == "loss":
            found.append(
                Column(
                    key=f"validation_{row.key}",
                    title=f"validation: {row.title}",
                    role="training",
                    unit=row.unit,
                    better=row.better,
                    heading=f"Validation: {row.title}",
                    axis=f"validation {row.title}",
                    caption="Of the global model on the rows that were held back from training.",
                )
            )
    if rows:
        found.append(
            Column(
                key="personal_loss",
                title="personal: loss",
                role="personal",
                better="lower",
                heading="Loss of personal models",
                axis="test loss",
                caption="Each client's own model on its own test rows.",
            )
        )
    return tuple({column.key: column for column in (*found, *TRAINING)}.values())


TRAINING = (
    Column(
        key="train_loss",
        title="train loss",
        role="training",
        heading="Training loss",
        axis="training loss",
        caption="Mean training loss of the clients in this round, weighted by their rows.",
    ),
    Column(
        key="drift_relative",
        title="drift",
        role="training",
        heading="Client drift",
        axis="drift / model length",
        caption="How far clients' models moved from the model they were sent.",
    ),
    Column(
        key="epsilon",
        title="epsilon",
        role="training",
        caption="The privacy guarantee so far: epsilon of (epsilon, delta) differential privacy.",
    ),
    Column(key="bound", title="bound", role="training", detail=True),
)


def _own(row: MetricRow) -> Column:
    return Column(
        key=row.key,
        title=row.title,
        role="metric",
        unit=row.unit,
        better=row.better,
        heading=row.title[:1].upper() + row.title[1:],
        axis=axis_of(row),
        caption=row.caption or ON_ALL_ROWS,
        detail=row.detail,
    )


def _derived(main: MetricRow) -> list[Column]:
    """What is recorded of clients, by the main metric."""
    own = "Each client's own model on its own test rows"
    known: tuple[tuple[Role, str, str, str, str], ...] = (
        ("clients", "mean", "clients: mean", "", "Mean over clients of the global model on their own test rows."),
        ("clients", "worst_tenth", "worst tenth", "Worst tenth", "Mean over the tenth of clients that do worst."),
        ("clients", "spread", "spread", "", "Standard deviation over clients of the values on their own test rows."),
        ("local", "mean", "local: mean", "Local models", "Clients' models before they were merged."),
        ("personal", "mean", "personal: mean", "Personal models", f"{own}; mean over clients."),
        ("personal", "worst_tenth", "personal: worst tenth", "", f"{own}; mean over the tenth that do worst."),
    )
    return [
        Column(
            key=f"{'client' if role == 'clients' else role}_{main.key}_{name}",
            title=title,
            role=role,
            unit=main.unit,
            better="" if name == "spread" else main.better,
            heading=heading,
            axis=axis_of(main) if heading else "",
            caption=caption,
        )
        for role, name, title, heading, caption in known
    ]


def axis_of(row: MetricRow) -> str:
    """'test accuracy', 'test error (mm)'."""
    return f"test {row.title}" + (f" ({row.unit})" if row.unit not in ("", SHARE) else "")


def _built_in() -> list[MetricRow]:
    found = [loss_metric(squared_error).row()]
    for kind in KINDS.values():
        found += [metric.row(main=metric.key == kind.main) for metric in kind.knowing(2).metrics]
    return found


def _one_main(rows: Sequence[MetricRow]) -> tuple[MetricRow, ...]:
    main = main_of(rows).key
    return tuple(replace(row, main=row.key == main) for row in rows)


def _row(entry: Any) -> MetricRow | None:
    """A stored row; None if it is malformed, since the file is not trusted."""
    if not isinstance(entry, Mapping) or not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", str(entry.get("name"))):
        return None
    key, better = str(entry["name"]), entry.get("better")
    title, unit, caption = (plain(entry.get(name) or "", most=_LONGEST) for name in ("title", "unit", "caption"))
    return MetricRow(
        key=key,
        title=title or key,
        unit=unit,
        better="lower" if better == "lower" else "higher",
        caption=caption,
        detail=entry.get("detail") is True,
        main=entry.get("main") is True,
    )
