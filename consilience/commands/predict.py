"""The command `consilience predict`: a trained run on new rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from consilience.runs.failures import guarded


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    data: Annotated[Path, typer.Option(help="New rows in the form of the run's data: a table, texts, .npz, pictures.")],
    out: Annotated[Path | None, typer.Option(help="The CSV file to write; by default it is printed.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best model on the validation rows.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Predict new rows with a run's model: CSV with the class names and the probability of each class."""

    def work() -> int:
        from consilience.experiments import predicting
        from consilience.runs.disk import make_folder, replace_file
        from consilience.runs.names import plain

        found = predicting.predict(run, data, best=best)
        if found.unused:
            print(f"note: not read: {', '.join(plain(name) for name in found.unused)}", file=sys.stderr)
        if out is None:
            sys.stdout.write(found.csv())
        else:
            make_folder(out.parent)
            replace_file(out, found.csv().encode())
            print(f"{out}: {len(found.rows)} predictions of the model after round {found.round}", file=sys.stderr)
        return 0

    guarded(work, debug)
