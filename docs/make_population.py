"""Writes the plot and the table of cost against population from docs/results/population.json.

`python docs/make_population.py` writes docs/population.svg and the table in performance.md; with `--check` it fails if
the table is not up to date. The results come from `python benchmarks/population.py --device cpu --json
docs/results/population.json`, and the peers' from the same with `--peer`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE, PLOT, RESULTS = DOCS / "performance.md", DOCS / "population.svg", DOCS / "results" / "population.json"
BEGIN, END = "<!-- population: written by docs/make_population.py -->", "<!-- end of population -->"
NAMES = {"pfl": "pfl-research, `fedavg`", "flower": "Flower's simulation, `fedavg`"}
DRAWN = ("fedavg", "scaffold", "pfl", "flower")


def main(arguments: list[str]) -> int:
    """Write or check."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = before + BEGIN + "\n" + table(rows) + END + after
    if "--check" in arguments:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    draw(rows)
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """One line per case."""
    lines = [
        "| | clients | round | peak memory | checkpoint | bytes of it | memories | resumed run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    last = ""
    order = list(dict.fromkeys(row["name"] for row in rows))
    for row in sorted(rows, key=lambda row: (order.index(row["name"]), row["clients"])):
        name = NAMES.get(row["name"], f"`{row['name']}`") if row["name"] != last else ""
        last = row["name"]
        if "left_out" in row:
            lines.append(f"| {name} | {row['clients']:,} | {row['left_out']} | | | | | |")
            continue
        memory = f"{row.get('all_gib', row['host_gib']):.2f} GiB"
        saved = [f"{1e3 * row['save']:.0f} ms", f"{row['save_bytes'] / 1e6:.1f} MB"] if "save" in row else ["", ""]
        kept = f"{row['memories'] / 2**30:.2f} GiB" if row.get("memories") else ""
        exact = {True: "equal bits", False: "other bits"}.get(row.get("exact"), "")  # type: ignore[arg-type]
        cells = [name, f"{row['clients']:,}", f"{1e3 * row['round']:,.0f} ms", memory, *saved, kept, exact]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]]) -> None:
    """Round time and memory against the population."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "population"
    from matplotlib import font_manager, pyplot

    # a machine may have other versions of Matplotlib's fonts, whose glyphs have other numbers in the file
    font_manager.fontManager.ttflist.clear()
    for font in sorted(Path(matplotlib.get_data_path(), "fonts", "ttf").glob("*.ttf")):
        font_manager.fontManager.addfont(font)

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, scale, title in ((axes[0], 1e3, "median round [ms]"), (axes[1], 1, "peak memory [GiB]")):
        for name in DRAWN:
            mine = sorted((row for row in rows if row["name"] == name and "round" in row), key=lambda r: r["clients"])
            values = [scale * row["round"] if scale > 1 else row.get("all_gib", row["host_gib"]) for row in mine]
            label = NAMES.get(name, f"consilience, {name}").replace("`", "")
            axis.plot([row["clients"] for row in mine], values, marker="o", label=label)
        axis.set(xscale="log", yscale="log", xlabel="clients in the federation (50 a round)", ylabel=title)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(PLOT, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
