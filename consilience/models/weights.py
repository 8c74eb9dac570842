"""Pre-trained weights from files without code (.safetensors, .npz), by the names that other libraries use."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from consilience.core.refusal import plain
from consilience.core.settings import Invalid, nearest

MOST_GROWTH = 100  # of an archive when it is unpacked; weights hardly shrink when they are packed
COUNTER = "num_batches_tracked"  # absent from older files, never needed to compute


def load_weights(module: nn.Module, file: str | Path, *, head: bool = True) -> None:
    """Copy the tensors of a .safetensors or .npz file into `module`; `head=False` spares its last layer.

    Understands torchvision's names (fc., classifier., features.) and the `module.` prefix of DataParallel.
    """
    own, kind = module.state_dict(), type(module).__name__
    wanted = {name: tensor for name, tensor in own.items() if head or not name.startswith("head.")}
    given = {_own_name(name, own): tensor for name, tensor in _read(Path(file).expanduser()).items()}
    if not head:
        given = {name: tensor for name, tensor in given.items() if not name.startswith("head.")}
    for name, tensor in given.items():
        if name not in wanted:
            raise Invalid(f"{file} holds {name!r}, which {kind} lacks{nearest(name, wanted)}")
        if tensor.shape != wanted[name].shape:
            raise Invalid(
                f"{file} holds {name!r} of shape {tuple(tensor.shape)}, but {kind} needs "
                f"{tuple(wanted[name].shape)}: build the model with the options the weights were trained with"
            )
    missing = [name for name in wanted if name not in given and not name.endswith(COUNTER)]
    if missing:
        raise Invalid(f"{file} lacks {missing[0]!r} and {len(missing) - 1} more that {kind} needs")
    module.load_state_dict(given, strict=False)


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix not in (".safetensors", ".npz"):
        raise Invalid(
            f"weights file {str(file)!r} must end in .safetensors or .npz: formats that can run code when "
            "read (.pt, .pth, .bin) are refused; convert with safetensors.torch.save_file(state_dict, ...)"
        )
    if not file.is_file():
        raise FileNotFoundError(f"no weights file {file.absolute()}: give the path of a .safetensors or .npz file")
    try:
        return _tensors(file)
    except Exception as problem:  # both parsers raise many kinds of exceptions on damaged files
        reason = plain(f"{type(problem).__name__}: {problem}", most=200)
        raise Invalid(f"weights file {str(file)!r} cannot be read ({reason}): it is damaged or cut off") from problem


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    with zipfile.ZipFile(file) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > MOST_GROWTH * max(1 << 20, file.stat().st_size):
        raise ValueError(f"it unpacks to {size:,} bytes")
    with np.load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _own_name(name: str, own: dict[str, Tensor]) -> str:
    """Our name for a tensor: the given one where we have it, else the given one translated."""
    if name in own:
        return name
    name = name.removeprefix("module.").removeprefix("features.")
    name = re.sub(r"^(fc|linear|classifier)\.", "head.", name)
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d)\.", r"\1\2.", name)  # torchvision's oldest files
