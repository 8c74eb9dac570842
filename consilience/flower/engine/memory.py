"""Storage of a client's memory between messages: at its node, by digest, never at the server.

The server keeps digests only. A node keeps the last two memories of each client in Flower's `Context.state`, so that a
client whose reply did not count returns to the one before; and, if it was given a folder, the last few on disk, so
that a run that is resumed under another Flower run finds the memory of the round it resumes from.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch

from consilience.core import tree
from consilience.core.refusal import Refused, plain
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.flower.messages import wire
from consilience.runs.disk import read_file, replace_file
from consilience.wire import arrays
from consilience.wire.template import Template

GENERATIONS = ("now", "before")
LARGEST = 1 << 34  # bytes of a memory on disk


class FoundMemory(NamedTuple):
    """A client's memory, and whether the requested one is missing, so that it starts anew."""

    memory: Tree
    lost: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryStore:
    """The memories of one node's clients in one run."""

    state: Any  # Flower's RecordDict
    run: str
    folder: Path | None = None
    kept: int = 4  # memories of each client on disk

    def __post_init__(self) -> None:
        if not re.fullmatch(
            r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", str(self.run)
        ):  # checked: the server chooses it, and it names a folder
            raise Invalid(f"{plain(self.run)!r} is no name of a run: letters, digits, '.', '_' and '-' only")

    def find(self, client: int, digest: str, initial: Tree) -> FoundMemory:
        """The memory of that digest; `initial` is a client's memory before its first round."""
        if not tree.flatten(initial):
            return FoundMemory({}, False)
        if not digest:
            return FoundMemory(initial, False)
        template = Template.of(initial)
        for candidate in self._candidates(client, digest):
            with contextlib.suppress(Refused):
                memory = template.check(candidate)
                if arrays.digest(memory) == digest:
                    return FoundMemory(memory, False)
        return FoundMemory(initial, True)

    def keep(self, client: int, before: Tree, now: Tree) -> str:
        """Store a memory and the one before it; returns its digest."""
        if not tree.flatten(now):
            return ""
        for generation, memory in zip(GENERATIONS, (now, before)):
            flat = tree.flatten(memory)
            self.state[self._key(client, generation)] = wire.array_record(
                {path: arrays.to_bytes(leaf) for path, leaf in flat.items()}
            )
        digest = arrays.digest(now)
        if self.folder is not None:
            self._write(client, digest, now)
        return digest

    def _candidates(self, client: int, digest: str) -> Any:
        for generation in GENERATIONS:
            record = self.state.get(self._key(client, generation))
            if record is not None:
                parts = wire.packed(record)
                flat = {path: arrays.from_bytes(one.data, one.shape, one.dtype) for path, one in parts.items()}
                yield tree.unflatten(flat)
        path = self._path(client, digest)
        if path is not None:
            with contextlib.suppress(OSError, safetensors.SafetensorError):
                yield tree.unflatten(safetensors.torch.load(read_file(path, most=LARGEST)))

    def _write(self, client: int, digest: str, memory: Tree) -> None:
        """Write one file per memory, atomically; the oldest are removed."""
        path = self._path(client, digest)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flat = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tree.flatten(memory).items()}
        replace_file(path, safetensors.torch.save(flat))
        files = sorted(path.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
        for old in files[: -self.kept]:
            old.unlink(missing_ok=True)

    def _path(self, client: int, digest: str) -> Path | None:
        if self.folder is None or not re.fullmatch("[0-9a-f]{64}", digest):
            return None
        return self.folder / self.run / f"client-{client}" / f"{digest}.safetensors"

    def _key(self, client: int, generation: str) -> str:
        return f"consilience.{self.run}.{client}.{generation}"
