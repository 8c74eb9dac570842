"""Golden hashes of every recipe's results in every lane, to compare before and after a change of the code.

    python benchmarks/golden.py record before.json     # on the old code
    python benchmarks/golden.py compare before.json    # on the new code: code 1 if any number differs by a bit

Hashes depend on the processor and on PyTorch's version, so a file is only good on the machine that wrote it. Names of
tensors in server states and client memories are not part of a hash, so that they may be renamed. For Ray and Flower,
compare the digests that `consilience verify` prints.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny
from declared import build, model_of

from consilience import algorithms
from consilience.core import tree
from consilience.core.rounds import run
from consilience.engines.vectorised import traced
from consilience.environments.environment import Environment

LANES = ("serial", "streams", "batched", "batched-matmul")
UNEVEN = Environment(steps=(5, 0, 1, 2, 9), communication=0.8, silent="broadcast_model")
ROUNDS = 3


def main(mode: str, path: Path) -> int:
    """Record the hashes, or compare them with those in a file."""
    torch.set_num_threads(1)
    traced.HOT = 0  # traced functions are part of what is compared
    found: dict[str, str] = {}
    for name in algorithms.names():
        for lane in LANES:
            for model in tiny.MODELS:
                found[f"{name}/{lane}/{model}"] = outcome(name, lane, model)
        found[f"{name}/serial/uneven"] = outcome(name, "serial", "convnet", environment=UNEVEN)
        print(name, flush=True)
    if mode == "record":
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    before = json.loads(path.read_text(encoding="utf-8"))
    differing = [key for key in sorted({*before, *found}) if before.get(key) != found.get(key)]
    for key in differing:
        print(f"{key}: {before.get(key)} before, {found.get(key)} now")
    print(f"{len(found) - len(differing)} of {len(found)} are equal")
    return 1 if differing else 0


def outcome(name: str, lane: str, model: str, **options: Any) -> str:
    """A digest of all that a short run computes, or the error that ends it."""
    digest = hashlib.sha256()
    try:
        engine = tiny.engine(model_of(name, model), lane=lane, **options)
        for done in run(build(name), engine, rounds=ROUNDS, seed=1, max_bad_rounds=99):
            digest.update(named(done.model) + anonymous(done.snapshot.server) + anonymous(done.snapshot.memory))
            digest.update(anonymous(done.cohort.reply) + done.cohort.ids.tobytes() + done.snapshot.losses.tobytes())
            digest.update(f"{done.bytes_up} {done.bytes_down} {done.clock}".encode())
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return digest.hexdigest()[:16]


def named(values: tree.Tree) -> bytes:
    """Tensors with their names."""
    return b"".join(path.encode() + raw(leaf) for path, leaf in sorted(tree.flatten(values).items()))


def anonymous(values: tree.Tree) -> bytes:
    """Tensors without their names, in an order that does not depend on them."""
    return b"".join(sorted(hashlib.sha256(raw(leaf)).digest() for leaf in tree.leaves(values)))


def raw(leaf: torch.Tensor) -> bytes:
    """Type, shape and bytes."""
    whole = leaf.detach().cpu().contiguous()
    return f"{leaf.dtype} {tuple(leaf.shape)}".encode() + whole.view(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("record", "compare"):
        sys.exit("usage: golden.py record|compare FILE")
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
