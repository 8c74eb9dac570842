"""The diagnosis as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

import numpy as np

from consilience.diagnose.advice import Advice
from consilience.diagnose.diagnosis import Diagnosis
from consilience.diagnose.drawings import bars, heat_map
from consilience.diagnose.text import lines

_STYLE = """
:root { color-scheme: light dark; --ink: #1b2733; --paper: #fff; --colour: #2b6cb0; --faint: #d5dde5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e9ef; --paper: #14191f; --colour: #63a4e8; --faint: #333d47; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 62rem; padding: 1rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .6rem .3rem 0;
  border-bottom: 1px solid var(--faint); vertical-align: top; } td.n { white-space: nowrap; }
.wide { overflow-x: auto; } figure { margin: 0 0 1.5rem; break-inside: avoid; } figcaption { font-size: .9rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
svg { width: 100%; } svg text { font-size: 9px; fill: var(--ink); } .cell { fill: var(--colour); }
.mark { stroke: var(--ink); stroke-dasharray: 3 2; } .advice dt { font-weight: 600; } .advice dd { margin: 0 0 .8rem; }
"""


def page(of: Diagnosis, advice: Sequence[Advice]) -> str:
    """The whole file."""
    rows = "".join(
        f"<tr><td>{escape(line.what)}</td><td class=n>{escape(line.found)}</td>"
        f"<td class=n>{escape(line.chance or '—')}</td><td>{escape(line.means)}</td></tr>"
        for line in lines(of)
    )
    counsel = "".join(
        f"<dt>{escape(item.kind)}: {escape(item.what)}</dt><dd>{escape(item.because)}</dd>" for item in advice
    )
    data = json.dumps(of.table(), sort_keys=True).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(of.title)}: diagnosis</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>Heterogeneity report: {escape(of.title)} ({len(of.names)} clients)</h1>"
        '<div class="wide"><table><tr><th>measured</th><th>found</th><th>by chance</th><th>meaning</th></tr>'
        f"{rows}</table></div><p>“By chance” is what clients of the same sizes show when the rows are dealt to "
        "them at random: what is not above it is luck, not heterogeneity.</p>"
        f'<h2>What follows</h2><dl class="advice">{counsel}</dl>'
        f'<h2>Pictures</h2><div class="figures">{"".join(figures(of))}</div>'
        f'<script type="application/json" id="diagnosis">{data}</script></body></html>\n'
    )


def figures(of: Diagnosis) -> list[str]:
    """Who holds what, how far each is from the whole, and how alike gradients and models are."""
    names = list(of.names)
    probed = [names[k] for k in of.probed]
    sizes = np.maximum(of.labels.counts.sum(1, keepdims=True), 1)
    classes = [str(c) for c in range(of.labels.counts.shape[1])]
    found = [
        ("Labels: share of each client's rows (down) in each class (across)", _labels(of, sizes, names, classes)),
        (
            "Rows of each client; the line is the mean",
            bars(of.quantity.sizes.astype(float), names, line=float(of.quantity.sizes.mean()), form=".0f"),
        ),
        (
            "Distance of each client's labels from all (total variation); the line is the mean by chance",
            bars(of.labels.total_variation, names, line=of.labels.chance_mean),
        ),
    ]
    if of.features is not None:
        caption = "Distance of each client's mean features from all, in deviations of rows within clients"
        found.append((caption, bars(of.features.distances, names)))
    found += [
        (
            "Cosines between clients' gradients at the start (faint: opposed, full: the same)",
            heat_map(of.start.cosines, probed, probed, low=-1, high=1),
        ),
        (
            f"Cosines between clients' gradients after {of.later_round} rounds",
            heat_map(of.later.cosines, probed, probed, low=-1, high=1),
        ),
        (
            "Likeness of client models (linear CKA; faint: the least alike pair)",
            heat_map(of.likeness.matrix, probed, probed, low=float(of.likeness.matrix.min()), high=1),
        ),
        ("Local steps of each client in a round", bars(of.effort.steps, names, form=".0f")),
    ]
    if of.effort.seconds.max(initial=0) > 0:
        found.append(("Simulated seconds to a reply", bars(of.effort.seconds, names)))
    return [f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for caption, svg in found]


def _labels(of: Diagnosis, sizes: np.ndarray, names: list[str], classes: list[str]) -> str:
    return heat_map(of.labels.counts / sizes, names, classes, low=0, high=1)
