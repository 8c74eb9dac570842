"""Take the screenshots of the documentation: python docs/make_screenshots.py

Makes runs and a comparison on embedded data in a temporary folder (about two minutes), opens their pages and the
dashboard in Chromium, and writes docs/_static/*.png, each below 150 kB. Needs `consilience[dashboard,dev]`
and Chromium on the PATH. The times in the pictures are those of the day.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = HERE / "_static"
RECIPES = HERE.parent / "recipes"
MOST_BYTES = 150_000
SIZE = {"width": 1200, "height": 860}
TALL = {"width": 1200, "height": 1150}  # with the table of runs
WIDE = {"width": 1400, "height": 860}  # three figures side by side
SMALL = ("threads=1", "engine.lane=serial", "engine.device=cpu")


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium on the PATH: install it, on Debian by apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        top = Path(place)
        make_runs(top)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto((top / "runs/swap/report.html").as_uri())
        keep(page, "report")
        page.set_viewport_size(WIDE)
        keep(page, "client_map", figures=("map", "transfer"))
        page.set_viewport_size(SIZE)
        page.goto((top / "runs/compare-methods/comparison.html").as_uri())
        keep(page, "comparison")
        with dashboard(top) as address:
            page.set_viewport_size(TALL)
            page.goto(address)
            page.locator("#runs tbody tr").first.wait_for()
            page.wait_for_timeout(4000)  # for the curves of the run in progress
            keep(page, "dashboard")
        browser.close()


def consilience(top: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "consilience", *arguments], cwd=top, check=True, stdout=subprocess.DEVNULL)


def make_runs(top: Path) -> None:
    """One run with swaps, a comparison of four methods over three seeds, and a run in progress is started later."""
    quick = str(RECIPES / "quickstart.toml")
    consilience(top, "run", quick, *SMALL, "algorithm=simfedswap", "rounds=12", "name=swap")
    methods = ("--algorithms", "fedavg,fedprox,scaffold,simprox", "--seeds", "0-2")
    consilience(top, "compare", quick, *SMALL, *methods, "rounds=12", "name=methods", "partition.alpha=0.2")


@contextmanager
def dashboard(top: Path) -> Iterator[str]:
    """The address of a dashboard that shows these runs and one in progress."""
    command = [sys.executable, "-m", "consilience"]
    long = [*command, "run", str(RECIPES / "quickstart.toml"), *SMALL, "rounds=2000", "name=in-progress", "-q"]
    running = subprocess.Popen(long, cwd=top)
    while not (top / "runs/in-progress/metrics.jsonl").exists() and running.poll() is None:
        time.sleep(0.2)
    shown = subprocess.Popen([*command, "dashboard", "--port", "0"], cwd=top, stdout=subprocess.PIPE, text=True)
    try:
        assert shown.stdout is not None
        address = re.search(r"http://\S+", shown.stdout.readline())
        assert address is not None
        yield address[0]
    finally:
        for process in (shown, running):
            process.terminate()
            process.wait()


def keep(page: Any, name: str, figures: tuple[str, ...] = ()) -> None:
    """Write what is in sight, or these figures side by side, as a small picture."""
    from PIL import Image

    for figure in figures:
        page.locator(f"figure[data-figure={figure}]").scroll_into_view_if_needed()
        page.locator(f"figure[data-figure={figure}] .main-svg").first.wait_for()
    page.wait_for_timeout(1500)  # for figures that are still being drawn
    page.evaluate("scrollTo(0, 0)")
    area: dict[str, Any] = {}
    if figures:
        boxes = [page.locator(f"figure[data-figure={figure}]").bounding_box() for figure in figures]
        left, upper = min(box["x"] for box in boxes), min(box["y"] for box in boxes)
        right, lower = (max(box[at] + box[size] for box in boxes) for at, size in (("x", "width"), ("y", "height")))
        area = {"x": left - 8, "y": upper - 8, "width": right - left + 16, "height": lower - upper + 16}
    shot = page.screenshot(full_page=True, clip=area) if figures else page.screenshot()
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    out = TARGET / f"{name}.png"
    picture.save(out, optimize=True)
    assert out.stat().st_size < MOST_BYTES, (name, out.stat().st_size)
    print(out, out.stat().st_size)


if __name__ == "__main__":
    main()
