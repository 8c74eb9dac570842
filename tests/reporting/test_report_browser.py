"""The page in a real browser, from a file: figures answer, nothing is fetched, nothing runs over the edge."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_runs import real, replace_rows, written

from consilience.reporting import report
from consilience.runs.folder import RunFolder

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytest.importorskip("matplotlib", reason='needs pip install "consilience[report]"')
pytest.importorskip("plotly", reason='needs pip install "consilience[report]"')

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")]

LOSS = "consilience.figures.get('loss').plot"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        found = started.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens a file and hands back the page; what it asks for or complains about fails the test."""
    seen: list[str] = []
    pages = []

    def open_(file: Path, width: int = 1400) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        page.on("request", lambda r: None if r.url.startswith(("file:", "blob:", "data:")) else seen.append(r.url))
        page.on("pageerror", lambda problem: seen.append(str(problem)))
        page.on("console", lambda said: seen.append(said.text) if said.type == "error" else None)
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-figures=ready]")
        return page

    yield open_
    for page in pages:
        page.close()
    assert seen == []


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("many")
    rising = tuple(0.1 * n for n in range(1, 9))
    for name in ("fedavg", "fedprox"):
        for seed in (0, 1):
            written(root, f"{name}{seed}", algorithm=name, seed=seed, accuracies=rising)
    return report.write([root], pictures=False)


def test_curves_answer_together(many: Path, opened: Any) -> None:
    page = opened(many)
    figure = page.locator("figure[data-figure=accuracy]")
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for()
    box = figure.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.3)
    page.wait_for_function(f"{LOSS}.data.some((trace) => trace.opacity < 0.2)")  # hover in one marks the other
    assert "0.4" in figure.locator(".hoverlayer").text_content()
    page.mouse.move(1, 1)
    chip = page.locator(".chips button", has_text="fedprox")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    hidden = f"{LOSS}.data.filter((trace) => trace.link === 'method:fedprox').every((trace) => trace.visible !== true)"
    page.wait_for_function(hidden)
    figure.get_by_role("button", name="log").click()
    page.wait_for_function("consilience.figures.get('accuracy').plot.layout.yaxis.type === 'log'")
    before = page.evaluate(f"{LOSS}.data.length")
    page.get_by_label("smoothing").fill("0.8")
    page.wait_for_function(f"{LOSS}.data.length > {before}")  # the curves as they were stay, thin
    figure.get_by_role("button", name="numbers").click()
    assert figure.locator(".numbers tbody tr").count() == 16
    for kind, start in (("CSV", b"series,round,"), ("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as waiting:
            figure.get_by_role("button", name=kind).click()
        assert waiting.value.suggested_filename == f"accuracy.{kind.lower()}"
        assert Path(waiting.value.path()).read_bytes().startswith(start)


def test_maps_move_over_rounds_and_mark_a_client_everywhere(tmp_path: Path, opened: Any) -> None:
    run = real(tmp_path / "swap", "algorithm=simfedswap", "rounds=4")
    page = opened(report.write([run], pictures=False))
    figure = page.locator("figure[data-figure=map]")
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for()
    where = "JSON.stringify(consilience.figures.get('map').plot.data.map((trace) => trace.x))"
    last = page.evaluate(where)
    figure.locator("input[type=range]").fill("0")
    assert figure.locator("output").text_content() == "round 1"
    page.wait_for_function(f"{where} !== {last!r}")
    figure.get_by_label("colour").select_option("accuracy")
    page.wait_for_function("Boolean(consilience.figures.get('map').plot.data[0].marker.colorbar)")
    page.locator("select.client").select_option("3")
    page.wait_for_function("(consilience.figures.get('transfer').plot.layout.shapes || []).length === 2")
    swaps = page.locator("figure[data-figure=swaps]")
    swaps.scroll_into_view_if_needed()
    assert swaps.locator("output").text_content() == "all rounds"


def test_few_rounds_have_a_tick_each(tmp_path: Path, opened: Any) -> None:
    written(tmp_path, "short", accuracies=(0.2, 0.4, 0.6))
    page = opened(report.write([tmp_path], pictures=False))
    figure = page.locator("figure[data-figure=accuracy]")
    figure.locator(".main-svg").first.wait_for()
    assert figure.locator(".xtick text").all_text_contents() == ["1", "2", "3"]


def test_a_phone_breaks_names_between_words(tmp_path: Path, opened: Any) -> None:
    for name in ("simfedswap", "fedprox_fedsplit"):
        written(tmp_path, name, algorithm=name)
    page = opened(report.write([tmp_path], pictures=False), 390)
    lines = page.evaluate(_LINES)
    assert lines and all(len(found) == words for found, words in lines), lines


_LINES = """[...document.querySelector('table').querySelectorAll('tbody th')].map((cell) => {
  const text = [...cell.childNodes].find((node) => node.nodeType === 3), range = document.createRange();
  range.selectNodeContents(text);
  const tops = new Set([...range.getClientRects()].map((box) => box.top));
  return [[...tops], text.textContent.trim().split(' ').length];
})"""


def test_a_value_that_never_changes_is_drawn_on_its_own_scale(tmp_path: Path, opened: Any) -> None:
    run = written(tmp_path, "a_name_of_64_characters_" + 40 * "x", accuracies=(0.0, 0.0, 0.0))
    replace_rows(run, [{**row, "silent": 2} for row in RunFolder.open(run).metrics.read().rows])
    page = opened(report.write([run], pictures=False), 390)
    page.locator("figure[data-figure=accuracy]").scroll_into_view_if_needed()
    page.locator("figure[data-figure=accuracy] .main-svg").first.wait_for()
    low, high = page.evaluate("consilience.figures.get('accuracy').plot.layout.yaxis.range")
    assert -0.01 <= low < 0 < high <= 0.2  # not -1 to 1
    missing = page.locator("figure[data-figure=missing]")
    missing.scroll_into_view_if_needed()
    assert missing.locator(".legend").text_content() == "silent"  # the only reason is named
    assert page.evaluate("document.documentElement.scrollWidth") == 390  # the name is broken


def test_the_names_of_many_methods_are_all_in_sight(tmp_path: Path, opened: Any) -> None:
    for number in range(45):
        written(tmp_path, f"method{number}", algorithm=f"a_long_method_{number}")
    page = opened(report.write([tmp_path], pictures=False))
    figure = page.locator("figure[data-figure=accuracy]")
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for()
    assert figure.locator(".legendtext").count() == 45
    assert int(figure.locator(".legend .scrollbar").get_attribute("height") or 0) == 0
    page.set_viewport_size({"width": 718, "height": 1000})
    page.emulate_media(media="print")
    assert figure.locator(".drawing svg").bounding_box()["height"] > 600  # pixels: 16 cm of a sheet of A4


def test_the_bar_of_many_methods_leaves_the_screen_of_a_phone_free(tmp_path: Path, opened: Any) -> None:
    for number in range(20):
        written(tmp_path, f"method{number}", algorithm=f"a_long_method_{number}")
    page = opened(report.write([tmp_path], pictures=False), 390)
    assert page.locator(".figurebar").bounding_box()["height"] < 0.2 * 900  # it stays in sight
    last = page.locator(".chips button").last
    last.focus()
    chips, box = (place.bounding_box() for place in (page.locator(".chips"), last))
    assert chips["y"] <= box["y"] and box["y"] + box["height"] <= chips["y"] + chips["height"] + 1


@pytest.mark.parametrize("length", [12, 16, 22, 34])
def test_names_in_the_legend_of_a_picture_are_not_cut(tmp_path: Path, opened: Any, length: int) -> None:
    for number in range(6):
        written(tmp_path, f"method{number}", algorithm=f"method_{number}".ljust(length, "m"))
    page = opened(report.write([tmp_path], pictures=False), 718)
    page.emulate_media(media="print")
    beyond = """() => {
      const svg = document.querySelector("figure[data-figure=accuracy] .drawing svg");
      const whole = svg.getBoundingClientRect();
      const boxes = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
      return boxes.map((box) => Math.max(box.right - whole.right, whole.left - box.left));
    }"""
    assert max(page.evaluate(beyond)) <= 1


def test_a_marked_level_is_named_above_the_bars(tmp_path: Path, opened: Any) -> None:
    page = opened(report.write([real(tmp_path / "run")], pictures=False))
    figure = page.locator("figure[data-figure=rows]")
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for()
    name, bars = figure.locator(".annotation-text").bounding_box(), figure.locator(".bars").bounding_box()
    assert name["y"] + name["height"] <= bars["y"] + 1
    first = figure.locator(".bars .point").first.bounding_box()
    page.mouse.move(first["x"] + first["width"] / 2, first["y"] + first["height"] - 4)
    figure.locator(".hoverlayer text").first.wait_for()
    assert re.fullmatch(r"client 0training rows: \d+", figure.locator(".hoverlayer").text_content())


def test_axe_finds_nothing_in_light_and_dark(many: Path, opened: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    page = opened(many)
    page.locator("figure[data-figure=accuracy] .main-svg").first.wait_for()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = axe.run(page).response["violations"]
        assert not found, [(one["id"], [node["html"][:150] for node in one["nodes"][:3]]) for one in found]


def test_nothing_runs_over_the_edge_and_paper_has_pictures(many: Path, opened: Any) -> None:
    for width in (1400, 390):
        page = opened(many, width)
        page.locator("figure[data-figure=accuracy] .main-svg").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for row in page.evaluate(_HEIGHTS):
            assert max(row) - min(row) <= 1
    shown = "getComputedStyle(document.querySelector('figure.interactive {}')).display"
    assert page.evaluate(shown.format(".drawing")) == "none"
    page.emulate_media(media="print")
    assert page.evaluate(shown.format(".drawing")) == "block" and page.evaluate(shown.format(".plot")) == "none"


_HEIGHTS = """[...document.querySelectorAll('.cards, .grid')].flatMap((grid) => {
  const rows = new Map();
  for (const child of grid.children) {
    const box = child.getBoundingClientRect();
    rows.set(box.top, [...(rows.get(box.top) || []), box.height]);
  }
  return [...rows.values()];
})"""


def test_on_paper_no_border_is_cut_and_maps_are_as_large_as_fits(tmp_path: Path, opened: Any) -> None:
    page = opened(report.write([real(tmp_path / "swap", "algorithm=simfedswap", "rounds=4")], pictures=False), 718)
    page.emulate_media(media="print")
    sides = """() => [...document.querySelectorAll("figure, .cards li")].map((part) => {
      const box = part.getBoundingClientRect();
      return Math.min(box.left, document.documentElement.clientWidth - box.right);
    })"""
    assert min(page.evaluate(sides)) >= 1  # what lies on the edge of the paper's print area is cut
    heights = [
        page.locator(f"figure[data-figure={name}] .drawing svg").bounding_box()["height"] for name in ("map", "loss")
    ]
    assert heights[0] > 1.2 * heights[1]
    gaps = """() => [...document.querySelectorAll("figure")].map((figure) => {
      const drawn = figure.querySelector(".drawing svg").getBoundingClientRect();
      return figure.querySelector("figcaption").getBoundingClientRect().top - drawn.bottom;
    })"""
    assert max(page.evaluate(gaps)) < 15  # captions stand below their drawings, however high the card is
    assert page.evaluate("getComputedStyle(document.querySelector('pre')).overflowX") == "visible"
