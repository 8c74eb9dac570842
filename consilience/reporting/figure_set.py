"""The figures of a report, their order and headings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from consilience.reporting.charts import Figure
from consilience.reporting.figures import curves, effort, fairness, holdings, maps, similarity, weights
from consilience.reporting.groups import Group

MOST_DETAILED = 12
"""The most groups with figures of their own; the rest are in the common figures only."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FigureSet:
    """All figures of a report: of all groups together, by section, and of one run of each group."""

    sections: list[tuple[str, list[Figure]]]
    details: list[tuple[Group, list[Figure]]]
    left_out: int  # groups without details

    def pictures(self) -> list[Figure]:
        """All of them."""
        return [picture for _, pictures in (*self.sections, *self.details) for picture in pictures]


def compiled(groups: Sequence[Group], *, with_similarity: bool | None = None) -> FigureSet:
    """All figures for which there are data; similarity only if asked for or, with None, if clients are simulated.

    To be called within `style.drawing()`.
    """
    details, shared = [], len({_partition(group) for group in groups}) == 1
    sections = [
        ("Quality over rounds", curves.over_rounds(groups)),
        ("Cost", curves.against_costs(groups)),
        ("Clients", [*fairness.at_the_end(groups), *(holdings.partition(groups[0].first) if shared else [])]),
    ]
    for number, group in enumerate(groups[:MOST_DETAILED]):
        pictures = [] if shared else holdings.partition(group.first)
        pictures += _details(group, with_similarity)
        if len(groups) > 1:  # unique file names
            pictures = [replace(picture, name=f"{number + 1}_{picture.name}") for picture in pictures]
        details.append((group, pictures))
    sections = [(title, pictures) for title, pictures in sections if pictures]
    return FigureSet(sections=sections, details=details, left_out=max(0, len(groups) - MOST_DETAILED))


def _details(group: Group, with_similarity: bool | None) -> list[Figure]:
    run = group.first
    pictures = [*weights.learned(run), *weights.over_rounds(run)]
    if with_similarity or (with_similarity is None and run.is_simulated):
        pictures += [*maps.drawn(run), *similarity.over_rounds(run), *similarity.swaps(run)]
    return [*pictures, *fairness.over_rounds(run), *effort.over_rounds(run)]


def _partition(group: Group) -> str:
    """The data and partition of the group's shown run."""
    prints = group.first.facts.get("prints", {})
    return f"{prints.get('data')} {prints.get('partition')}" if prints else group.label
