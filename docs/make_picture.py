"""Draw the picture of the README from the tuned comparison: python docs/make_picture.py

One panel for each task: points of accuracy above tuned FedAvg, mean and 95 % interval over five seeds. Plain SVG.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = HERE / "_static" / "methods.svg"
TASKS = {
    "tuned_digits_skew": "digits, label skew",
    "tuned_banking77": "Banking77, label and size skew",
    "tuned_domains": "digits, feature shift",
}
METHODS = ("feddyn", "fedavgm", "fedadam", "fedyogi", "simprox", "fedprox", "scaffold", "moon")
WIDTH, LEFT, PANEL, GAP, ROW, TOP = 860, 92, 220, 40, 24, 64
MINUS, PLUS = -50.0, 20.0  # points shown
SHOWN, HIDDEN, ZERO = "#0b6e4f", "#8a8f98", "#c3c7cd"


def gains(name: str) -> dict[str, dict[str, Any]]:
    """Per method the difference of accuracy from FedAvg, in one task."""
    found = json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return {entry["label"]: entry["against"].get("accuracy", {}) for entry in found["methods"]}


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'


def place(points: float, left: float) -> float:
    """Where so many points stand in a panel that begins at `left`."""
    return left + PANEL * (points - MINUS) / (PLUS - MINUS)


def drawing() -> str:
    """The whole picture."""
    bottom = TOP + ROW * len(METHODS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 52}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#24292f">',
        "<title>Accuracy of tuned methods above tuned FedAvg on three tasks</title>",
        f'<rect width="{WIDTH}" height="{bottom + 52}" rx="8" fill="#ffffff"/>',
        text(16, 24, "Points of accuracy above tuned FedAvg", 'font-size="15" font-weight="600"'),
    ]
    lines += [text(LEFT - 10, TOP + ROW * (k + 0.68), name, 'text-anchor="end"') for k, name in enumerate(METHODS)]
    for panel, (name, title) in enumerate(TASKS.items()):
        left, found = LEFT + panel * (PANEL + GAP), gains(name)
        lines.append(text(left + PANEL / 2, TOP - 12, title, 'text-anchor="middle" fill="#57606a"'))
        for mark in range(int(MINUS), int(PLUS) + 1, 10):
            x = place(mark, left)
            stroke = 'stroke="#57606a"' if mark == 0 else f'stroke="{ZERO}" stroke-dasharray="2 3"'
            lines.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" {stroke}/>')
            lines.append(text(x, bottom + 16, f"{mark:+d}" if mark else "0", 'text-anchor="middle" font-size="11"'))
        for k, method in enumerate(METHODS):
            gain, y = found.get(method, {}), TOP + ROW * (k + 0.5)
            if not gain:
                continue
            low, mean, high = (100 * gain[key] for key in ("low", "mean", "high"))
            colour = SHOWN if low > 0 or high < 0 else HIDDEN
            a, b, x = place(low, left), place(high, left), place(mean, left)
            lines.append(f'<line x1="{a:.1f}" y1="{y}" x2="{b:.1f}" y2="{y}" stroke="{colour}" stroke-width="2"/>')
            lines.append(
                f'<circle cx="{x:.1f}" cy="{y}" r="4.5" fill="{colour}"><title>{method}: {mean:+.1f}</title></circle>'
            )
    note = "eight of 47 to 51 methods, tuned with equal budgets; mean and 95 % interval, five seeds; "
    note += "grey: no difference shown"
    lines.append(text(16, bottom + 40, note, 'font-size="12" fill="#57606a"'))
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    TARGET.write_text(drawing(), encoding="utf-8")
    print(TARGET.relative_to(HERE.parent))
