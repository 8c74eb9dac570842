"""The style of figures: colours for colour-blind readers, and SVG that takes its colours from the page.

A figure is drawn once with the light colours. For the page, each colour becomes a CSS variable of the same role, so
that one drawing suits light and dark mode; a PNG keeps the light colours on white.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from consilience.reporting.charts import Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

INK, SOFT, RULE = "#1f2430", "#5c6370", "#d5d9e0"

LINES = ("#0072b2", "#d55e00", "#009e73", "#b0568e", "#9a6a00", "#3c9dd0", "#56606e", "#7a4fbf")
"""After Okabe and Ito's palette; yellow and sky blue are darkened to stand out on white."""

DASHES = ("-", "--", "-.", ":")
EMPTY = "#e4e7ec"  # behind a heat map, where nobody was: no colour of a scale; black in the dark

_NAMES = {
    EMPTY: "--empty",
    INK: "--ink",
    SOFT: "--soft",
    RULE: "--rule",
    **{hue: f"--line-{n}" for n, hue in enumerate(LINES)},
}
_COLOURS = re.compile("|".join(_NAMES), re.IGNORECASE)

RC: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, selectable, in the reader's own font
    "text.parse_math": False,  # a client may be called $x$
    "font.size": 9.2,
    "axes.titlesize": 9.5,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 6),
}


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib with our settings instead of the user's; not thread-safe."""
    try:
        import matplotlib
    except ImportError as problem:
        raise ImportError('figures need matplotlib: pip install "consilience[report]"') from problem
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams
        parameters.update(RC)
        yield


def blank(*, height: float = 2.85, layout: Literal["constrained", "compressed"] = "constrained") -> Canvas:
    """An empty figure, as wide as a phone, so that text keeps its size there."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(4.3, height), layout=layout)


def line(number: int) -> dict[str, Any]:
    """Colour and dashes of the n-th curve: 32 that differ."""
    return {"color": LINES[number % len(LINES)], "linestyle": DASHES[number // len(LINES) % len(DASHES)]}


def heat(*, diverging: bool = False) -> Any:
    """The colours of heat maps, which colour-blind readers can tell apart: cividis, without its darkest end, which is
    hard to tell from the empty places on a dark page; or red to blue, which meet in white."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    if diverging:
        return matplotlib.colormaps["RdBu"]
    return ListedColormap(matplotlib.colormaps["cividis"]([0.08 + 0.92 * step / 255 for step in range(256)]))


def whole_numbers(axis: Any, most: int = 7) -> None:
    """Ticks of rounds and client numbers are whole."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=most, min_n_ticks=1))


def legend(figure: Canvas, axes: Any) -> None:
    """Below the axes, out of the way of the curves; the figure grows with it. None where one curve has no name."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    longest = max(map(len, labels))
    columns = 1 if longest > 22 else 2 if longest > 12 else 3  # what fits the width in DejaVu Sans, a wide font
    lines = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * lines)
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=8.5, handlelength=2.4, columnspacing=1.2
    )


def svg(picture: Figure) -> str:
    """The figure as SVG for a page: scales to its container, colours from the page, no style or id of its own."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": picture.name}):  # the same drawing gives the same text
        picture.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    picture.figure.set_layout_engine("none")  # the layout is done: not again for the PNG
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[a-zA-Z0-9]+(?:\.[a-z]+)?_\d+"', "", text)  # ids such as figure_1 would occur in every figure
    text = re.sub(r"font: (\d[\d.]*)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"(?<=[ \"\-,(])(\d+\.\d{2})\d+", r"\1", text)
    text = _COLOURS.sub(lambda hit: f"var({_NAMES[hit[0].lower()]})", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg[^>]*?) height="[^"]*"', r"\1\2", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    return text.strip()


def png(picture: Figure) -> bytes:
    """The figure on white, at twice the size of a screen."""
    out = io.BytesIO()
    picture.figure.savefig(out, format="png", dpi=180, facecolor="white", metadata={"Software": None})
    return out.getvalue()
