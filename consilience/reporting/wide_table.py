"""A table for the terminal that is never cut: columns that do not fit come in a further table below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2  # between columns


@dataclass(frozen=True, kw_only=True)
class WideTable:
    """A table whose first column is repeated in a further table below, where the terminal is too narrow for all."""

    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    first: Literal["left", "right"] = "right"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        for number, block in enumerate(_blocks(widths, options.max_width)):
            drawn = Table(header_style="bold", box=None, pad_edge=False)
            whole = {n: max(widths[n], len(self.heads[n])) for n in (0, *block)}
            fits = sum(_GAP + width for width in whole.values()) - _GAP <= options.max_width
            for n in (0, *block):
                side = "right" if n else self.first
                drawn.add_column(
                    Text(self.heads[n]), justify=side, width=whole[n] if fits else widths[n], overflow="fold"
                )
            for line in self.lines:
                drawn.add_row(*(Text(line[n]) for n in (0, *block)))
            if number:
                yield ""
            yield drawn

    def _widths(self, most: int) -> list[int]:
        """A head wraps between words, a cell only where it is wider than what the first column leaves."""
        longest = [max((len(line[n]) for line in self.lines), default=0) for n in range(len(self.heads))]
        wanted = [max(least, *map(len, head.split() or [""])) for least, head in zip(longest, self.heads)]
        first = min(wanted[0], max(most // 2, 1))
        return [first, *(min(width, max(most - first - _GAP, 1)) for width in wanted[1:])]


def _blocks(widths: Sequence[int], most: int) -> list[list[int]]:
    """The numbers of the further columns, in groups that fit beside the first."""
    blocks: list[list[int]] = [[]]
    for n in range(1, len(widths)):
        if blocks[-1] and widths[0] + sum(_GAP + widths[k] for k in (*blocks[-1], n)) > most:
            blocks.append([])
        blocks[-1].append(n)
    return blocks
