"""The dashboard in a real browser: what people see and do, by mouse and by keyboard, and what axe finds."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_runs import written
from test_server import TOKEN, Dashboard

from consilience.runs.folder import RunFolder

for needed in ("matplotlib", "starlette", "uvicorn", "playwright", "axe_playwright_python"):
    pytest.importorskip(needed, reason='needs pip install "consilience[dashboard,dev]"')
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
NAME = "<i>study</i>"
NODES = [
    {"node": "18034374593373855292", "clients": [0, 1], "online": True, "answered": 6, "failed": 0},
    {"node": "5297714276253461352", "clients": [2, 3], "online": False, "answered": 2, "failed": 1, "problem": "<b>"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("browser")
    names = {"names": ["<b>one</b>", "two", "three", "four"], "labels": ["cat", "dog"], "train_rows": [9, 2, 3, 4]}
    clients = tuple({"round": k, "accuracy": [0.1 * k, 0.2, 0.3, 0.4], "cohort_drift": [0.5, 0.25]} for k in (1, 2, 3))
    for seed in (0, 1):
        written(top / NAME, f"fedavg-{seed}", seed=seed, accuracies=(0.1, 0.5, 0.7 + seed / 10))
    run = written(top, "clinic", algorithm="fedprox", clients=clients, deployed=True)
    (run / "nodes.json").write_text(json.dumps({"nodes": NODES}))
    RunFolder.open(run).describe_clients({**names, "class_counts": [[4, 5], [1, 1], [3, 0], [0, 4]]})
    return top


@pytest.fixture(scope="module")
def dashboard(folder: Path) -> Iterator[Dashboard]:
    running = Dashboard(folder, "--refresh", "1", "--control", CONSILIENCE_DASHBOARD_TOKEN=TOKEN)
    yield running
    running.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


@pytest.fixture
def tab(browser: Any, dashboard: Dashboard, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that must not report any error; its colours and its width are the test's to choose."""
    look = getattr(request, "param", {})
    credentials = {"username": "me", "password": TOKEN}
    context = browser.new_context(
        base_url=dashboard.url.geturl(), http_credentials=credentials, reduced_motion="reduce", **look
    )
    page, problems = context.new_page(), []
    page.set_default_timeout(20_000)
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda problem: problems.append(str(problem)))
    yield page
    assert not problems, problems
    context.close()


def names(tab: Any) -> list[str]:
    """The runs in the table, as they stand there."""
    found: list[str] = tab.locator("#runs tbody th[scope=row] a").all_inner_texts()
    return found


def opened(tab: Any) -> None:
    tab.goto("/")
    tab.locator("#runs tbody tr").nth(2).wait_for()


def test_search_sort_group_and_compare(tab: Any) -> None:
    opened(tab)
    tab.locator("#chart polyline.curve").nth(2).wait_for(state="attached")
    tab.locator("#runs").get_by_role("button", name="accuracy").click()
    assert tab.locator("th[aria-sort=descending]").inner_text().startswith("accuracy")
    assert names(tab) == [f"{NAME}/fedavg-1", f"{NAME}/fedavg-0", "clinic"]
    tab.locator("#runs").get_by_role("button", name="accuracy").click()
    assert names(tab) == ["clinic", f"{NAME}/fedavg-0", f"{NAME}/fedavg-1"]

    tab.get_by_label("Search").fill("algorithm.name=fedavg -seed=1")
    assert names(tab) == [f"{NAME}/fedavg-0"]
    tab.get_by_label("Search").fill("")
    tab.get_by_label("Status").select_option("deployed")
    assert names(tab) == ["clinic"]
    tab.get_by_label("Status").select_option("")
    tab.get_by_label("Group by").select_option("settings")
    assert "2 runs; accuracy 0.7500 ± 0.0707" in tab.locator("tr.group").all_inner_texts()[1].replace("\n", " ")
    tab.get_by_label("Select the group fedavg on digits").check()
    tab.get_by_role("button", name="Compare 2 selected").click()
    tab.locator("#numbers tbody tr").nth(1).wait_for()
    assert tab.locator("#differ tbody td").all_inner_texts() == ["0", "1"]
    assert tab.locator("#curves figure").first.locator("polyline.curve").count() == 2
    tab.get_by_role("button", name=f"{NAME}/fedavg-0").first.click()  # the legend hides a line
    assert tab.locator("#curves figure").first.locator("polyline.curve").count() == 1


def test_a_client_by_keyboard(tab: Any) -> None:
    opened(tab)
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "search"
    tab.keyboard.type("clinic")
    tab.get_by_role("link", name="clinic").focus()
    tab.keyboard.press("Enter")
    tab.get_by_role("link", name="<b>one</b>").wait_for()
    tab.get_by_role("link", name="<b>one</b>").focus()
    tab.keyboard.press("Enter")
    tab.get_by_text("Client 0: <b>one</b>").wait_for()
    assert tab.locator("#cards").inner_text().split("\n")[:5] == [
        "accuracy",
        "0.3000",
        "at round 3",
        "training rows",
        "9",
    ]
    chart = tab.locator("figure", has_text="Drift").locator("svg")
    chart.focus()
    tab.keyboard.press("ArrowLeft")
    assert "round 3: 0.5000" in tab.locator("figure", has_text="Drift").locator(".readout").inner_text()
    assert tab.locator("#labels tbody tr").all_inner_texts()[1].split() == ["dog", "5", "56", "%"]


def test_a_new_round_comes_without_reloading_and_keeps_what_was_typed(tab: Any, folder: Path) -> None:
    run = RunFolder.open(written(folder, "live", accuracies=(0.111,)))
    run.record(status="running")
    with run.lock():
        opened(tab)
        tab.get_by_label("Search").fill("live")
        tab.locator("#runs").get_by_text("0.1110").first.wait_for()
        run.metrics.append({"round": 2, "accuracy": 0.4321, "loss": 0.1, "cohort": [0], "weights": [1.0]})
        tab.locator("#runs").get_by_text("0.4321").first.wait_for()
        assert tab.get_by_label("Search").input_value() == "live" and names(tab) == ["live"]
        assert tab.get_by_role("button", name="Stop live").is_visible()
        assert tab.locator("#curves-title").inner_text() == "Live curves"
    tab.get_by_role("button", name="Resume live").wait_for()
    tab.get_by_role("button", name="Resume live").click()
    tab.locator("#done", has_text="is being resumed").wait_for()  # it ends at once: such a run cannot be continued
    shutil.rmtree(run.path, ignore_errors=True)


LOOKS = [
    {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    for width in (1400, 390)
    for scheme in ("light", "dark")
]


@pytest.mark.parametrize("tab", LOOKS, indirect=True, ids=["wide-light", "wide-dark", "phone-light", "phone-dark"])
def test_long_numbers_keep_clear_of_the_axis_title(tab: Any) -> None:
    tab.goto("/")
    gaps = tab.evaluate(
        """async () => {
          const { Chart } = await import("/static/chart.js");
          const chart = new Chart(document.body, { title: "a chart", axis: "weight" });
          chart.set([{ name: "a", x: [1, 2], y: [0.01625, 0.01626], index: 0 }]);
          const texts = [...chart.figure.querySelectorAll("svg text")];
          const title = texts.find((text) => text.textContent === "weight").getBoundingClientRect();
          const numbers = texts.filter((text) => text.textContent.startsWith("0.01"));
          return numbers.map((text) => text.getBoundingClientRect().left - title.right);
        }"""
    )
    assert len(gaps) > 2 and min(gaps) > 0


def test_axes_have_numbers_also_for_few_rounds_and_on_a_log_scale(tab: Any) -> None:
    tab.goto("/")
    rounds, levels = tab.evaluate(
        """async () => {
          const { Chart, options } = await import("/static/chart.js");
          const chart = new Chart(document.body, { title: "a chart", axis: "accuracy" });
          options.log = true;
          chart.set([{ name: "a", x: [1, 2, 3], y: [0.61, 0.62, 0.66], index: 0 }]);
          const texts = [...chart.figure.querySelectorAll("svg text")].map((text) => text.textContent);
          return [texts.filter((text) => /^[0-9]+$/.test(text)), texts.filter((text) => text.startsWith("0."))];
        }"""
    )
    assert rounds == ["1", "2", "3"] and len(levels) > 2


@pytest.mark.parametrize("tab", [{"viewport": {"width": 718, "height": 1000}}], indirect=True, ids=["paper"])
def test_all_charts_zoom_together_by_mouse_and_by_keyboard(tab: Any, folder: Path) -> None:
    RunFolder.open(written(folder, "long", accuracies=tuple(0.01 * n for n in range(1, 41))))
    tab.goto("/runs/long")
    accuracy, loss = (tab.locator("#curves figure", has_text=title).first for title in ("Accuracy", "Loss"))
    loss.locator("polyline.curve").wait_for(state="attached")
    accuracy.scroll_into_view_if_needed()
    box = accuracy.locator("svg").bounding_box()
    left, middle = box["x"] + 60, box["y"] + 80
    tab.mouse.move(left, middle)
    tab.mouse.down()
    tab.mouse.move(left + 0.25 * box["width"], middle, steps=4)
    assert accuracy.locator("rect.area").count() == 1
    tab.mouse.up()
    points = "figure => figure.querySelector('polyline.curve').getAttribute('points').split(' ').length"
    assert 5 < accuracy.evaluate(points) < 20 and loss.evaluate(points) == accuracy.evaluate(points)
    loss.get_by_role("button", name="Show all rounds").click()
    assert accuracy.evaluate(points) == 40 and not loss.get_by_role("button", name="Show all rounds").is_visible()
    accuracy.locator("svg").focus()
    tab.keyboard.press("+")
    assert accuracy.evaluate(points) == 20
    tab.keyboard.press("Escape")
    assert accuracy.evaluate(points) == 40
    tab.goto("about:blank")  # an open page asks for the run's new rounds
    shutil.rmtree(folder / "long")


def test_on_paper_tables_and_charts_fit(tab: Any) -> None:
    tab.goto("/compare?run=clinic&run=%3Ci%3Estudy%3C/i%3E/fedavg-0")
    tab.locator("#curves figure svg").first.wait_for()
    tab.emulate_media(media="print")
    wide = tab.evaluate(
        "[...document.querySelectorAll('table')].map((t) => t.offsetWidth - t.parentElement.offsetWidth)"
    )
    assert max(wide) <= 0
    gaps = tab.evaluate(
        "[...document.querySelectorAll('.chart')].map((c) => c.offsetHeight - c.querySelector('svg').clientHeight)"
    )
    assert gaps and max(gaps) < 30, gaps  # no empty space below a drawing


@pytest.mark.parametrize("tab", [{"viewport": {"width": 1400, "height": 900}}], indirect=True, ids=["wide"])
def test_printing_draws_charts_for_paper_and_restores_them(tab: Any) -> None:
    tab.goto("/runs/clinic")
    tab.locator("#curves figure svg").first.wait_for()
    tab.evaluate(
        """() => addEventListener("beforeprint", () => {
          window.paper = [...document.querySelectorAll("#curves svg")].map((svg) => Number(svg.getAttribute("width")));
        })"""
    )
    before = tab.locator("#curves svg").first.get_attribute("width")
    tab.pdf()
    widths = tab.evaluate("window.paper")
    assert widths and set(widths) == {340} and before != "340", (widths, before)
    tab.wait_for_function(f"document.querySelector('#curves svg').getAttribute('width') === '{before}'")
    tab.goto("/")
    tab.locator("#runs .note").first.wait_for()
    assert tab.locator("#curves-title").inner_text() == "Curves"  # no run is in progress
    tab.emulate_media(media="print")
    size = "part => parseFloat(getComputedStyle(part).fontSize)"
    assert tab.locator("#runs .note").first.evaluate(size) < tab.locator("#runs th[scope=row]").first.evaluate(size)
    assert not tab.locator("#runs th", has_text="action").is_visible()


def test_rows_are_whole_pixels_high_and_names_break_after_folders(tab: Any) -> None:
    tab.goto("/")
    tab.locator("#runs tbody th[scope=row] a").first.wait_for()
    rows = tab.evaluate(
        """() => [...document.querySelectorAll("#runs tbody th[scope=row]")].map((cell) => ({
          height: cell.getBoundingClientRect().height,
          line: getComputedStyle(cell).borderTopWidth,
          parts: cell.querySelectorAll("a wbr").length,
          text: cell.querySelector("a").textContent,
        }))"""
    )
    assert rows and all(row["height"] % 1 == 0 and row["line"] == "1px" for row in rows), rows
    assert all(row["parts"] == row["text"].count("/") for row in rows)  # none before a long name


def test_nodes_say_which_clients_they_hold_and_how_long_ago_they_answered(tab: Any, folder: Path) -> None:
    seen = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=20)).isoformat(timespec="seconds")
    known = [{**NODES[0], "train_rows": [9, 1200]}, NODES[1]]  # the second is of an earlier version
    told = [{**node, "joined": "2026-01-31T00:00:00+00:00", "last_seen": seen, "refused": {}} for node in known]
    (folder / "clinic/nodes.json").write_text(json.dumps({"nodes": told}))
    tab.goto("/runs/clinic")
    tab.locator("#nodes tbody tr").nth(1).wait_for()
    heads, rows = (tab.locator(f"#nodes {part}").all_inner_texts() for part in ("th[scope=col]", "tbody tr"))
    assert heads[1:3] == ["client numbers", "training rows"] and tab.locator("#nodes-said").inner_text().startswith(
        "1 of 2 nodes"
    )
    cells = [row.split("\t") for row in rows]
    assert [cell[1:3] for cell in cells] == [["0, 1", "1,209"], ["2, 3", "–"]]
    assert [cell[3:5] for cell in cells] == [["online", "2026-01-31"], ["offline", "2026-01-31"]]
    assert [cell[8:] for cell in cells] == [["none", "none"], ["none", "<b>"]]
    number = tab.locator("#nodes tbody th").first.bounding_box()
    assert number["height"] < 40, "the number of a node breaks in two"
    before = cells[0][5]
    assert before.endswith(" s ago")
    tab.wait_for_function(  # nothing new is written meanwhile
        "before => document.querySelectorAll('#nodes tbody td.when')[1].textContent !== before", arg=before
    )


def test_axe_finds_nothing_and_no_page_is_wider_than_the_screen(tab: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for path, ready in (
        ("/", "#runs tbody tr"),
        ("/runs/clinic", "#clients tbody tr"),
        ("/client?run=clinic&client=0", "#curves figure svg"),
        ("/compare?run=clinic&run=%3Ci%3Estudy%3C/i%3E/fedavg-0", "#curves figure svg"),
    ):
        tab.goto(path)
        tab.locator(ready).first.wait_for()
        found = Axe().run(tab)
        told = [(one["id"], [node["html"][:150] for node in one["nodes"][:3]]) for one in found.response["violations"]]
        assert not told, (path, told)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
