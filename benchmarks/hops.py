"""Functions, files and generators that a round passes through, call depth, and how often objects are built.

    python benchmarks/hops.py

Counted in two runs of two rounds: `consilience run`, and a deployment in one process (tests/flower_loopback.py), in
which every message really goes through Flower's serialisation. Only functions of the package count, each once.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import consilience
from consilience.engines.vectorised import traced

PACKAGE = Path(consilience.__file__).parent
LOOP = ("run", PACKAGE / "core" / "rounds.py")
STEP = ("LocalTraining.step", PACKAGE / "client" / "local_training.py")
RECIPE = ("fedavg", PACKAGE / "algorithms" / "fedavg.py")
RUN = ["rounds=2", "model=logistic", "partition.clients=4", "threads=1", "algorithm=fedavg", "engine.lane=serial"]
FEDERATION = """
import torch
from torch import nn


def model():
    return nn.Linear(6, 3)


def data(client, node):
    draw = torch.Generator().manual_seed(client)
    return torch.randn(20, 6, generator=draw), torch.randint(0, 3, (20,), generator=draw)
"""
CONFIG = """
name = "hops"
rounds = 2
threads = 1
algorithm = { name = "fedavg", lr = 0.1, epochs = 1, batch_size = 4, selection = "everyone" }
engine = { device = "cpu" }
evaluation = { every = 0 }
deploy = { clients = 2, classes = 3, deadline = 5, wait = 1, retries = 0 }
"""


class Hops:
    """Counts calls while `counting()`: by round of the loop, and by anything that is opened with `part()`."""

    def __init__(self) -> None:
        self.parts: dict[str, set[CodeType]] = {}
        self.calls: Counter[CodeType] = Counter()
        self.recipes: Counter[str] = Counter()
        self.generators: list[str] = []  # from the command line to the loop, as they stand in the second round
        self.depth = 0  # functions of the package around a client's step, itself included; lambdas are left out
        self._open: list[set[CodeType]] = []
        self._rounds = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count from here on, the second round like all later ones: with traced functions around training."""
        hot, traced.HOT = traced.HOT, 0
        threading.setprofile(self._seen)  # of threads that start from now on: the deployed server waits in some
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            traced.HOT = hot

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is called inside is counted under this name; of several with one name, the last stays."""
        self.parts[name] = found = set()
        self._open.append(found)
        try:
            yield
        finally:
            self._open.remove(found)

    def built(self, kind: str) -> int:
        """How often an object of the package's class of that name was made."""
        return sum(count for code, count in self.calls.items() if code.co_qualname == f"{kind}.__init__")

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not counts(code):
            return
        if (code.co_name, Path(code.co_filename)) == LOOP:
            self._rounds += 1
            if self._rounds == 2:
                self.parts["round"] = found = set()
                self._open.append(found)
                self.generators = nested(frame)
            elif self._rounds == 3:
                self._open.remove(self.parts["round"])
        self.calls[code] += 1
        if not self.depth and (code.co_qualname, Path(code.co_filename)) == STEP:
            self.depth = sum(counts(inner) for inner in stack(frame))
        if (code.co_name, Path(code.co_filename)) == RECIPE:
            self.recipes["config" if reads_config(frame) else "run"] += 1
        for found in self._open:
            found.add(code)


def counts(code: CodeType) -> bool:
    """Whether it is a function of the package; lambdas and comprehensions are part of the function around them."""
    return not code.co_name.startswith("<") and code.co_filename.startswith(str(PACKAGE))


def stack(frame: FrameType | None) -> Iterator[CodeType]:
    """What is being called, the innermost first."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def reads_config(frame: FrameType | None) -> bool:
    """Whether a config is being read, which tries recipes to tell their defaults and what contradicts itself."""
    return any(code.co_name == "from_table" for code in stack(frame))


def nested(frame: FrameType | None) -> list[str]:
    """The generators of the package that are at work in a stack, the outermost first."""
    found = [code.co_qualname for code in stack(frame) if counts(code) and code.co_flags & inspect.CO_GENERATOR]
    return found[::-1]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be printed."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def simulated(folder: Path) -> Hops:
    """`consilience run`, two rounds."""
    from consilience.cli import app

    hops = Hops()
    with quiet(), contextlib.suppress(SystemExit), hops.counting():
        app(["run", *RUN, f"runs={folder}", "--no-report"], standalone_mode=False)
    return hops


def deployed(folder: Path) -> Hops:
    """The same over Flower's messages: a server and two nodes in one process."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from flower_loopback import Loopback

    from consilience.flower import client_app
    from consilience.flower.deploy import template
    from consilience.flower.deploy.serving import serve

    hops = Hops()

    class Counted(Loopback):
        def answer(self, message: Any) -> Any:
            with hops.part("message" if message.metadata.message_type == "train" else "other"):
                return super().answer(message)

    app = folder / "app"
    template.init(app, clients=2)
    (app / "config.toml").write_text(CONFIG)
    (app / "federation.py").write_text(FEDERATION)
    given = {"runs": str(folder / "runs"), "insecure": True}  # the messages stay in this process
    grid = Counted([client_app(app)] * 2, [{"clients": str(k)} for k in range(2)], given)
    with quiet(), hops.counting():
        serve(grid, app, given)
    return hops


def table(hops: Hops, parts: dict[str, str]) -> None:
    """Print what was counted."""
    for part, title in parts.items():
        codes = hops.parts[part]
        files = {code.co_filename for code in codes}
        print(f"{title:58} {len(codes):4} functions in {len(files):3} files")
    print(f"{'generators around the loop, itself included':58} {len(hops.generators):4} {' > '.join(hops.generators)}")
    print(f"{'functions from the command to a step of a client':58} {hops.depth:4}")
    print(f"{'algorithms built for the run':58} {hops.recipes['run']:4}")
    print(f"{'algorithms tried while its config was read':58} {hops.recipes['config']:4}")
    print(f"{'vectorised engines built':58} {hops.built('Vectorised'):4}")


def main() -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as place:
        print("consilience run, 2 rounds")
        table(simulated(Path(place) / "runs"), {"round": "one round: trained, tested, recorded, saved"})
        print("\na deployment, 2 rounds, 2 nodes")
        parts = {"round": "one round, server and clients", "message": "one training message to a client"}
        table(deployed(Path(place)), parts)


if __name__ == "__main__":
    main()
