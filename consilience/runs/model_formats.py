"""A trained module as files that other programs read: safetensors, torch.export, ONNX, or a Hugging Face folder."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from consilience.core import tree
from consilience.core.settings import Invalid, nearest
from consilience.layers.adapters import folded, has_merged
from consilience.runs import canonical
from consilience.runs.disk import replace_file

Format = Literal["safetensors", "torch-export", "onnx", "hugging_face"]
Adapters = Literal["merged", "separate"]
FORMATS: tuple[str, ...] = get_args(Format)
FILES = {"safetensors": "model.safetensors", "torch-export": "model.pt2", "onnx": "model.onnx", "hugging_face": ""}
MANIFEST = "model.json"


def write_model(
    module: nn.Module,
    folder: Path,
    format: str,
    *,
    example: Any = None,
    label_names: Sequence[str] = (),
    adapters: str = "merged",
    facts: dict[str, Any] | None = None,
) -> Path:
    """Write a module in evaluation mode into a folder, with a manifest `model.json`; the file, or the folder.

    example: some rows that the module reads, for the formats that record its operations; the number of rows stays
    free where the module allows it. adapters: of a Hugging Face folder, whether low-rank adapters are "merged" into the
    weights or "separate", which is PEFT's own format.
    """
    if format not in FORMATS:
        raise Invalid(f"format = {format!r} is not one of {', '.join(FORMATS)}{nearest(format, FORMATS)}")
    if adapters not in get_args(Adapters):
        raise Invalid(f"adapters = {adapters!r} is not one of {', '.join(get_args(Adapters))}")
    if format in ("torch-export", "onnx") and example is None:
        raise Invalid(f"format = {format!r} records the module on rows: give some as example=...")
    if adapters == "separate" and has_merged(module):
        raise Invalid("adapters = 'separate' is not supported for FLoRA, which has changed the weights: use 'merged'")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILES[format]
    module = folded(module.eval())
    free_rows = True
    if format == "safetensors":
        _write_safetensors(module, file)
    elif format == "hugging_face":
        save: Any = getattr(module, "save_pretrained", None)
        if save is None:
            raise Invalid(
                f"{type(module).__name__} is no model of Hugging Face: use one of {', '.join(FORMATS[:3])}, or train "
                'model.name = "hugging_face"'
            )
        save(folder, label_names=label_names, merged=adapters == "merged")
    else:
        rows = tree.cast_floating(tree.to(example, "cpu"), _dtype(module))
        free_rows = (_write_exported if format == "torch-export" else _write_onnx)(module, rows, file)
    described = {"format": format, "classes": list(label_names), "any_number_of_rows": free_rows, **(facts or {})}
    text = canonical.encode(canonical.to_json_types(described, "manifest", nonfinite_as_null=True), pretty=True)
    replace_file(folder / MANIFEST, text)
    return file


def _dtype(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def _write_safetensors(module: nn.Module, file: Path) -> None:
    from safetensors.torch import save_model

    save_model(module, str(file))  # tied weights are stored once


def _write_exported(module: nn.Module, rows: Any, file: Path) -> bool:
    program, free = _exported(module, rows)
    torch.export.save(program, file)
    return free


def _write_onnx(module: nn.Module, rows: Any, file: Path) -> bool:
    _require_onnx()
    program, free = _exported(module, rows)
    with _quietly():
        made: Any = torch.onnx.export(program, (), dynamo=True, verbose=False, optimize=True)
        made.save(str(file))
    return free


def _exported(module: nn.Module, rows: Any) -> tuple[Any, bool]:
    """(the recorded program, whether it takes any number of rows)."""
    count = torch.export.Dim("rows", min=1, max=2**20)
    free = tree.map_leaves(lambda leaf: {0: count}, rows)
    with torch.no_grad(), _quietly():
        try:
            return torch.export.export(module, (rows,), dynamic_shapes=(free,)), True
        except Exception:  # something in the module depends on the number of rows
            return torch.export.export(module, (rows,)), False


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporters' messages about their own progress."""
    names = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")
    before = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as problem:
        raise Invalid('format = "onnx" needs two packages: pip install "consilience[onnx]"') from problem
