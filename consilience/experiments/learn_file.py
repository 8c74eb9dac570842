"""The file that `consilience learn` writes: weights, the state for an exact continuation, and what both depend on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from consilience.core.settings import Invalid
from consilience.meta.learning import Iteration
from consilience.meta.schedule import Schedule
from consilience.runs import identity
from consilience.runs.disk import replace_file
from consilience.runs.interrupts import Interrupts
from consilience.server.averaging.weighting.schedule import load_tensors

EVERY = 5.0  # seconds between two writings; iterations since the last one are repeated after a kill
_STATE = ("theta", "mean", "square", "losses", "moved")
_FACTS = "learning"  # the key of the facts among the file's metadata


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A schedule as far as it was learned."""

    path: Path
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]  # settings, code and fingerprints that the weights depend on

    @property
    def done(self) -> int:
        """Finished iterations."""
        return len(self.tensors["losses"])

    @property
    def state(self) -> dict[str, Tensor]:
        """For `learning(resume=...)`."""
        return {name: self.tensors[name] for name in _STATE}

    def schedule(self) -> Schedule:
        """The weights so far."""
        idle = torch.nonzero(~self.tensors["moved"]).flatten().tolist()
        return Schedule(
            weights=self.tensors["weights"],
            losses=self.tensors["losses"],
            gradient=str(self.facts.get("gradient", "")),
            idle_rounds=tuple(t + 1 for t in idle),
        )

    def refuse_changes(self, now: Mapping[str, Any]) -> None:
        """Refuse to continue if something changed that the weights depend on; compares the sections of `now`."""
        found = []
        for section, table in now.items():
            prefix = "" if section == "config" else f"{section}."
            found += identity.differences(self.facts.get(section, {}), table, prefix=prefix)
        if found:
            raise Invalid(
                f"{self.path} cannot be continued exactly, because something it depends on has changed:\n  "
                + "\n  ".join(found)
                + "\nundo the change, or learn anew with another --out"
            )


def read(path: Path) -> Saved:
    """A file that `learn` wrote, finished or not."""
    tensors = load_tensors(path)
    with safetensors.safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(_FACTS, "")
    try:
        facts = json.loads(text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or any(name not in tensors for name in _STATE):
        raise Invalid(f"{path} holds weights, but no state to continue from: learn anew with another --out")
    return Saved(path=path, tensors=tensors, facts=facts)


@dataclass(kw_only=True)
class Writer:
    """Writes iterations to the file every few seconds, at the end, and at a signal, which ends learning."""

    path: Path
    facts: Mapping[str, Any]
    engine: Any  # knows the lane, once it is measured
    stopped: int = 0  # the signal that ended learning early
    _written: float = field(default_factory=time.monotonic)

    def through(self, steps: Iterator[Iteration], iterations: int) -> Iterator[Iteration]:
        """Pass iterations on."""
        with Interrupts() as interrupts:
            for step in steps:
                last = step.number == iterations
                self.stopped = 0 if last else interrupts.asked
                if last or self.stopped or time.monotonic() - self._written >= EVERY:
                    self.write(step)
                yield step
                if self.stopped:
                    return

    def write(self, step: Iteration) -> None:
        """Replace the file by one with this iteration."""
        facts = {**self.facts, "gradient": step.gradient, "engine": self.engine.resolved_settings}
        tensors = {"weights": step.weights, **step.state}
        plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, safetensors.torch.save(plain, metadata={_FACTS: json.dumps(facts)}))
        self._written = time.monotonic()
