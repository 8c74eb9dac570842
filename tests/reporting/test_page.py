"""The templates: found in the package, escaping everything; tables that fit, figures with axes and captions."""

from __future__ import annotations

import html
import importlib.resources
import re
import tomllib
from pathlib import Path

import pytest
from html_pages import EVIL, alone, without_scripts
from sample_runs import real, replace_rows, written

from consilience.compare.tables import TextTable
from consilience.reporting import interactive, page, static, style
from consilience.reporting.charts import Axis, Heat, Scale
from consilience.reporting.figure_set import compiled
from consilience.reporting.figures.by_client import bars
from consilience.reporting.groups import grouped
from consilience.reporting.report import write
from consilience.reporting.runs import find
from consilience.reporting.tables import Table
from consilience.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
TEMPLATES = importlib.resources.files("consilience.reporting") / "templates"
WIDE = ("client_accuracy_mean", "client_accuracy_worst_tenth", "client_accuracy_spread", "local_accuracy_mean")
WIDE += ("personal_accuracy_mean", "personal_accuracy_worst_tenth", "personal_loss", "f1", "drift_relative")


def test_the_wheel_has_every_template_and_script() -> None:
    used = {entry.name for folder in (TEMPLATES, TEMPLATES / "../scripts") for entry in folder.iterdir()}
    assert {"base.html", "macros.html", "style.css", "report.html", "comparison.html", "diagnosis.html"} <= used
    assert {entry.name for entry in (TEMPLATES / "../scripts").iterdir()} == set(interactive.SCRIPTS)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["consilience"]
    packed = {path.name for pattern in declared for path in (ROOT / "consilience").glob(pattern)}
    assert used <= packed


def test_no_template_switches_escaping_off() -> None:
    for entry in TEMPLATES.iterdir():
        text = entry.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe|autoescape|Markup", text.replace("because autoescape is on", "")), entry.name
    assert page._environment().autoescape is True


def test_every_slot_of_a_page_is_escaped() -> None:
    table = Table(head=(EVIL, EVIL), lines=((EVIL, EVIL),), words=frozenset({1}))
    facts = [page.Fact(EVIL, EVIL, EVIL)]
    values = {"heading": EVIL, "made_by": EVIL, "cards": facts, "warnings": [EVIL], "notes": [EVIL], "pictures": []}
    sheets = [(TextTable(title=EVIL, head=(), rows=(), reading=EVIL), table)]
    text = page.render("comparison.html", title=EVIL, sheets=sheets, no_figures=EVIL, **values)
    alone(text)
    assert text.count(html.escape(EVIL)) == 16  # one is the name of the table
    text = page.render("tuning.html", title=EVIL, best=table, reading=EVIL, **values)
    alone(text)
    assert text.count(html.escape(EVIL)) == 11


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(Exception, match="'cards' is undefined"):
        page.render("report.html", title="a")


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """Two seeds of three methods with long names that have every column there is."""
    for algorithm in ("fedavg", "fedprox", "per_fedavg_with_a_long_name"):
        for seed in (0, 1):
            run = written(tmp_path, f"{algorithm}{seed}", algorithm=algorithm, seed=seed)
            rows = RunFolder.open(run).rows().rows
            more = dict.fromkeys(WIDE, 0.1234 + seed / 10)
            replace_rows(run, [{**row, **more} for row in rows])
    return tmp_path


def width(text: str, *, bold: bool) -> float:
    """In units of the font's size: DejaVu Sans is the widest of the fonts that the stylesheet names."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    prop = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=100, prop=prop).get_extents().width) / 100


def test_a_comparison_with_every_column_fits_1400_pixels_and_a4_paper(wide: Path) -> None:
    """The least width of a table: in each column the longest piece that cannot be broken, plus padding."""
    pytest.importorskip("matplotlib")
    text = write([wide], pictures=False).read_text()
    text = without_scripts(text)
    table = text[text.index("<table>") : text.index("</table>")]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.split(r"<tr[^>]*>", table)[1:]]
    cells = [[html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in row] for row in rows]
    assert "personal: mean" in cells[0] and len(cells[0]) >= 14 and "±\N{NO-BREAK SPACE}" in cells[1][3]
    longest = [
        max(width(piece, bold=not row) for row, cell in enumerate(column) for piece in cell.split(" ") if piece)
        for column in zip(*(line[1:] for line in cells))
    ]
    screen, paper = ((first + sum(size * em + 2 * pad for em in longest)) for first, size, pad in LAYOUTS)
    assert screen <= 1400 - 2 * 2.5 * 16 - 2  # the body's padding and the box's border
    assert paper <= (21 - 2) / 2.54 * 96 - 2  # A4 within margins of 1 cm


LAYOUTS = ((7 * 16, 0.87 * 16, 0.6 * 16), (4 * 16, 9.5, 0.2 * 16))
"""On a screen and on paper: least width of the first column, which breaks anywhere; font size; padding of a cell."""


def test_the_stylesheet_is_what_the_widths_were_computed_with() -> None:
    screen, _, paper = (TEMPLATES / "style.css").read_text(encoding="utf-8").partition("@media print")
    assert "--cell: 0.38rem 0.6rem" in screen and "--cell: 0.15rem 0.2rem" in paper and "margin: 1cm" in screen
    assert re.search(r"table \{[^}]*font-size: 0.87rem", screen) and "table { font-size: 9.5px; }" in paper
    assert re.search(r"th:first-child \{[^}]*min-width: 7rem[^}]*overflow-wrap: anywhere", screen)
    assert re.search(r"th:first-child \{[^}]*min-width: 4rem", paper) and "nowrap" not in screen + paper
    assert re.search(r"\.table \{[^}]*overflow-x: auto", screen) and ".table { overflow: visible; }" in paper


def test_every_figure_has_axes_with_titles_and_a_caption_of_several_sentences(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = real(tmp_path / "swap", "algorithm=simfedswap", "rounds=3")
    with style.drawing():
        pictures = compiled(grouped(find([run])[0])).pictures()
        assert len(pictures) > 12
        for picture in pictures:
            assert len(re.findall(r"\.(?: |$)", picture.caption)) >= 2, (picture.name, picture.caption)
            if picture.name != "swaps":  # clients on a circle
                drawing = style.svg(picture)
                named = [axes for axes in picture.figure.axes if axes.get_xlabel() or axes.get_ylabel()]
                assert named and "</text>" in drawing, picture.name
        labelled = {p.name: [a.get_ylabel() for a in p.figure.axes] for p in pictures}
        across = {p.name: p.figure.axes[0].get_xlabel() for p in pictures}
    assert labelled["traffic"] == ["traffic so far (kB)"]
    assert across["accuracy_against_traffic"] == "traffic, up and down (kB)"
    assert across["accuracy_against_time"] == "wall-clock time (s)"
    assert labelled["partition"] == ["client", "share of the client's rows"]
    assert labelled["weights"] == ["client", "aggregation weight"]
    assert labelled["similarity"][-1] == "similarity"


def test_heat_maps_and_bars_show_the_values_where_they_belong() -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("matplotlib")
    with style.drawing():
        values = np.array([[0.0, 1.0, 2.0], [3.0, np.nan, 5.0]])
        names = ("long name", "b")
        down, across = Axis("client", names), Axis("round", first=1)
        figure = static.draw(Heat(values=values, down=down, across=across, scale=Scale("weight", low=-1)))
        axes, scale = figure.axes
        image = axes.get_images()[0]
        assert image.get_array().tolist() == [[0.0, 1.0, 2.0], [3.0, None, 5.0]] and image.get_clim() == (-1, 5)
        assert image.get_extent() == [0.5, 3.5, 1.5, -0.5] and scale.get_ylabel() == "weight"
        assert [label.get_text() for label in axes.get_yticklabels()] == ["long name", "b"]
        chart = bars(np.array([2.0, np.nan, 4.0]), across=Axis("client"), up="rows", line=("mean", 3.0))
        axes = static.draw(chart).axes[0]
        assert [bar.get_height() for bar in axes.patches] == [2.0, 0.0, 4.0]
        assert list(axes.lines[0].get_ydata()) == [3.0, 3.0]
