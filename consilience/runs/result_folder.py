"""A result on disk, without a run folder: model, history and their description; and plots of the history."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilience.core import tree
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.runs import canonical
from consilience.runs.disk import explain, make_folder, read_file, replace_file
from consilience.runs.row_log import RecordError
from consilience.runs.tree_file import TreeLayout, chunks, describe, restore
from consilience.task.kinds import KINDS

if TYPE_CHECKING:
    from consilience.runs.result import Result

FACTS, MODEL, HISTORY = "result.json", "model.safetensors", "history.json"


@dataclass(frozen=True, kw_only=True)
class StoredResult:
    """What `write_result` wrote; `built_from` is there where the module was a model of the library."""

    module: str  # the name of its class
    built_from: dict[str, Any] | None
    kind: str  # of task; "" where it was the user's own
    loss: str
    label_names: tuple[str, ...]
    best: dict[str, Any] | None
    stopped: int
    values: Tree
    example: Any
    history: list[dict[str, Any]]


def is_result(folder: Path) -> bool:
    """Whether a folder holds a result that was saved."""
    return (folder / FACTS).exists()


def write_result(result: Result, folder: Path) -> Path:
    """Write a result; a folder that holds other files is refused."""
    if folder.exists() and not folder.is_dir():
        raise Invalid(f"{folder} is a file: name a folder to save the result in")
    if folder.is_dir() and any(folder.iterdir()) and not is_result(folder):
        raise Invalid(f"{folder} holds other files: save the result in a folder of its own")
    task = result.task
    kept = {"values": result.values}
    if result.example is not None:
        kept["example"] = result.example if isinstance(result.example, dict) else {"rows": result.example}
    flat, layout = describe(kept, "result")
    facts = {
        "format": 1,
        "module": type(task.module).__name__,
        "built_from": _plain(getattr(task.module, "built_from", None)),
        "kind": task.kind.name if task.kind.name in KINDS else "",
        "loss": task.loss_name,
        "label_names": list(result.label_names),
        "best": result.best,
        "stopped": result.stopped,
        "example_is_dict": isinstance(result.example, dict),
        "entries": list(layout.entries),
        "strides": {path: list(strides) for path, strides in layout.strides.items()},
    }
    encoded = {
        FACTS: canonical.encode(canonical.to_json_types(facts, "result", nonfinite_as_null=True), pretty=True),
        HISTORY: canonical.encode(canonical.to_json_types(result.history, "history", nonfinite_as_null=True)),
        MODEL: b"".join(bytes(part) for part in chunks(flat)),
    }
    make_folder(folder)
    for name in (HISTORY, MODEL, FACTS):  # the facts last: without them the folder is not a result
        replace_file(folder / name, encoded[name])
    return folder


def read_result(folder: Path) -> StoredResult:
    """Read what was written; damaged files are refused by name."""
    try:
        facts = canonical.decode(read_file(folder / FACTS))
        history = canonical.decode(read_file(folder / HISTORY))
        strides = {path: tuple(numbers) for path, numbers in facts["strides"].items()}
        kept = restore(read_file(folder / MODEL), TreeLayout(entries=tuple(facts["entries"]), strides=strides))
        example = kept.get("example")
        return StoredResult(
            module=str(facts["module"]),
            built_from=facts["built_from"],
            kind=str(facts["kind"]),
            loss=str(facts["loss"]),
            label_names=tuple(str(name) for name in facts["label_names"]),
            best=facts["best"],
            stopped=int(facts["stopped"]),
            values={"params": {}, "buffers": {}, **kept["values"]},
            example=example if example is None or facts["example_is_dict"] else example["rows"],
            history=list(history),
        )
    except OSError as problem:
        raise RecordError(explain("read the result in", folder, problem)) from problem
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise RecordError(f"the result in {folder} is damaged: {problem}") from problem


def refuse_other_model(values: Tree, fresh: Tree, folder: Path, module: str) -> None:
    """Refuse stored values that do not match this module, naming the first difference."""
    before, now = ({path: tuple(leaf.shape) for path, leaf in tree.flatten(t).items()} for t in (values, fresh))
    for path in (*before, *now):
        if before.get(path) != now.get(path):
            raise Invalid(
                f"{folder} holds a {module}, and the model given does not fit it: {path} is "
                f"{before.get(path, 'not there')}, the model's {now.get(path, 'not there')}"
            )


def draw(history: Sequence[Mapping[str, Any]], titles: Mapping[str, str], axes: Any = None) -> Any:
    """One curve for each metric, over rounds; the figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise ImportError('result.plot() needs matplotlib: pip install "consilience[report]"') from problem
    if axes is None:
        figure = _shown_in_notebooks(Figure)(figsize=(6.4, 2.4 * len(titles)), layout="constrained")
        places = list(figure.subplots(len(titles), 1, squeeze=False, sharex=True)[:, 0])
    else:
        figure, places = axes.figure, [axes]
    for place, (key, title) in zip(places, titles.items()):
        known = [(row["round"], row[key]) for row in history if isinstance(row.get(key), (int, float))]
        place.plot(*zip(*known), marker="o" if len(known) < 30 else None, markersize=3)
        place.set_ylabel(title)
        place.grid(alpha=0.3)
    places[-1].set_xlabel("round")
    return figure


def _shown_in_notebooks(figure: Any) -> Any:
    """The figure's class with a notebook representation, which otherwise only pyplot figures have."""

    class Drawing(figure):
        """A figure without a window."""

        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=90)
            return picture.getvalue()

    return Drawing


def _plain(built_from: Any) -> Any:
    """How the model was built, where that can be written down."""
    if built_from is None:
        return None
    try:
        return canonical.to_json_types(built_from, "built_from")
    except Invalid:
        return None
