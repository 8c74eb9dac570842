"""Writes the table of models.md from docs/results/layers_cpu.json and layers_cuda.json.

`python docs/make_models.py` writes it; with `--check` it fails if it is not up to date. The results come from
`python benchmarks/layers.py --store docs/results/layers_cpu.json`, and on a GPU from the same with `--device cuda`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "models.md"
RESULTS = {device: DOCS / "results" / f"layers_{device}.json" for device in ("cpu", "cuda")}
BEGIN, END = "<!-- layers: written by docs/make_models.py -->", "<!-- end of layers -->"
LANES = ("serial", "streams", "batched")
FAMILIES = {
    "recurrent": "Recurrent",
    "attention": "Attention",
    "normalisation": "Normalisation",
    "embedding": "Embedding",
    "random": "Dropout and other randomness",
}
REASONS = (  # what an error says, and what it means
    ("Invalid: ", "refused"),
    ("autograd.Function", "no: a gradient of its own in the old style"),
    ("depends on values", "no: lengths are values"),
    ("stack expects each tensor", "no: lengths are values"),
)


def main(arguments: list[str]) -> int:
    """Write or check."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = before + BEGIN + "\n" + table() + END + after
    if "--check" in arguments:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def table() -> str:
    """One table for each family of layers; a cell is a lane on a device."""
    stored: dict[str, Any] = {
        device: json.loads(file.read_text(encoding="utf-8")) for device, file in RESULTS.items() if file.exists()
    }
    rows = {device: {row["layer"]: row for row in found["rows"]} for device, found in stored.items()}
    machines = [f"{found['device']}: {found['machine']}, torch {found['torch']}" for found in stored.values()]
    lines = [f"Measured in float64 ({'; '.join(machines)}). A dash was not measured.", ""]
    layers = {row["layer"]: row["family"] for found in stored.values() for row in found["rows"]}
    refused: list[str] = []
    for family, title in FAMILIES.items():
        lines += [f"| {title} | " + " | ".join(f"{device} `{lane}`" for device in RESULTS for lane in LANES) + " |"]
        lines += ["|---" * (1 + len(LANES) * len(RESULTS)) + "|"]
        for layer in (name for name, of in layers.items() if of == family):
            cells = [cell(rows.get(device, {}).get(layer), lane) for device in RESULTS for lane in LANES]
            lines.append(f"| {layer} | {' | '.join(cells)} |")
            row = rows["cpu"].get(layer)
            if row and row["serial"].startswith("Invalid: "):
                refused.append(f"- {layer}: {row['serial'].removeprefix('Invalid: ')}")
        lines.append("")
    return "\n".join([*lines, "Refused, with the message:", "", *refused, ""])


def cell(row: dict[str, Any] | None, lane: str) -> str:
    """What a cell of the table says."""
    if row is None or lane not in row:
        return "-"
    found = str(row[lane])
    if found.startswith("works"):
        return "yes"
    return next((words for part, words in REASONS if part in found), found.partition(":")[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
