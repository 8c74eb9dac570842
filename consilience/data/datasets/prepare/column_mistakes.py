"""Finds columns whose texts would become one feature each by mistake: dates, numbers with an error, notes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from consilience.core.settings import Invalid, nearest

FEW = 20  # a column with up to this many different texts is one of categories, whatever they are
MANY = 50  # different texts, more than half as many as rows: not categories
MOSTLY = 0.9  # of the cells
_DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})([T ].*)?")
_COMMA = re.compile(r"[+-]?\d+(,\d+)?")


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """What is wrong with a column of texts."""

    what: str  # "holds dates ('2024-05-01' ...)"
    fix: str
    row: int | None = None  # to correct
    no_feature: bool = False  # the column is useless as it is, rather than wrongly written


def mistaken_texts(cells: Sequence[str], missing: np.ndarray) -> Mistake | None:
    """Why texts are no categories, or None if they may be. cells: stripped, at least one of which is not a number."""
    known = [row for row, gap in enumerate(missing) if not gap]
    texts = [cells[row] for row in known]
    different = len(set(texts))
    if different <= FEW:
        return None
    first = f"({texts[0][:40]!r} ...)"
    if sum(_DATE.fullmatch(text) is not None for text in texts) >= MOSTLY * len(texts):
        return Mistake(what=f"holds dates {first}", fix="make them numbers, such as days since one", no_feature=True)
    if all(_COMMA.fullmatch(text) for text in texts):
        return Mistake(what=f"holds numbers with a decimal comma {first}", fix="write them with a point")
    numbers = [_is_number(text) for text in texts]
    if sum(numbers) >= MOSTLY * len(texts):
        row = known[numbers.index(False)]
        return Mistake(what=f"holds numbers, but here {cells[row][:40]!r}", fix="correct or empty that cell", row=row)
    if different > MANY and different > len(texts) / 2:
        what = f"holds {different:,} different texts in {len(texts):,} rows, which are no categories {first}"
        return Mistake(what=what, fix="", no_feature=True)
    return None


def refuse_no_classes(labels: Sequence[str], names: Sequence[str], where: object) -> None:
    """Refuse labels that are no classes: all equal, numbers with fractions, or nearly as many as there are rows.

    names: the distinct labels.
    """
    if len(names) == 1:
        raise Invalid(f"{where}: every row has the label {names[0]!r}: there is nothing to tell apart")
    if len(names) > FEW and all(map(_is_number, names)) and any(float(name) % 1 for name in names):
        raise Invalid(
            f"{where}: the labels are numbers with fractions ({names[0]} ...): predict them by target='number'"
        )
    if len(names) > MANY and len(names) > len(labels) / 2:
        number = ": if they are numbers to predict, say target='number'" if all(map(_is_number, names)) else ""
        raise Invalid(
            f"{where}: {len(labels):,} rows have {len(names):,} different labels: these are no classes{number}"
        )


def refuse_repeated(names: Sequence[str], label: str, weight: str | None = None) -> None:
    """Refuse the option `columns` with a name twice, or with the column to predict, which must not be a feature."""
    if isinstance(names, str):
        raise Invalid(f"columns = {names!r} must be a list of names: write [{names!r}]")
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise Invalid(f"columns names {twice!r} twice: leave one out")
    for name, what in ((label, "column to predict"), (weight, "weight of each row")):
        if name in names:
            raise Invalid(f"columns names {name!r}, which is the {what}: a model must not read it")


def refuse_unknown_categorical(categorical: Sequence[str] | None, columns: Mapping[str, Sequence[str]]) -> None:
    """Refuse a name in the option `categorical` that is no feature."""
    for name in categorical or ():
        if name not in columns:
            known = ", ".join(columns)
            raise Invalid(f"categorical names {name!r}, which is no feature{nearest(name, columns)}; those are {known}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
