"""`cs.diagnose`: the command `consilience diagnose` as a function, for a federation in memory, a config or a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from consilience import algorithms, models
from consilience.algorithms.fedavg import fedavg
from consilience.core import notebook
from consilience.core import task as contract
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.settings import Count, Invalid, Whole, check_value
from consilience.diagnose import diagnosis
from consilience.diagnose.advice import Advice, advise
from consilience.diagnose.diagnosis import Diagnosis
from consilience.diagnose.page import page
from consilience.diagnose.text import lines
from consilience.environments.environment import Environment
from consilience.experiments.config.catalogue import DEFAULTS, engine_options
from consilience.experiments.config.overrides import file_and_overrides
from consilience.experiments.model_checks import try_client, try_model
from consilience.options.parts import read_options
from consilience.runs import canonical
from consilience.runs.disk import make_folder, replace_file
from consilience.task.kinds import kind_of_targets
from consilience.task.task import Task


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class DiagnosisResult:
    """The numbers of a diagnosis, and the advice."""

    numbers: Diagnosis
    advice: list[Advice]

    def table(self) -> dict[str, Any]:
        """Every number and the advice in plain values, as in diagnosis.json."""
        return {**self.numbers.table(), "advice": [item._asdict() for item in self.advice]}

    def save(self, file: Path | str = "diagnosis.html") -> Path:
        """Write the page, and the numbers beside it as .json; the page."""
        out = Path(file)
        make_folder(out.parent)
        replace_file(out.with_suffix(".json"), canonical.encode(self.table(), pretty=True))
        replace_file(out, page(self.numbers, self.advice).encode())
        return out

    def __repr__(self) -> str:
        return notebook.line(repr(self.numbers))

    def _repr_html_(self) -> str:
        rows = [(line.what, line.found, line.chance, line.means) for line in lines(self.numbers)]
        rows += [(item.kind, item.what, "", item.because) for item in self.advice]
        head = ("", "found", "chance", "meaning")
        return notebook.table(f"{self.numbers.title}: {len(self.numbers.names)} clients", rows, head=head)


def diagnose(
    what: Federation | Sequence[tuple[Any, ...]] | Path | str | None = None,
    *overrides: str,
    model: nn.Module | Task | None = None,
    algorithm: Algorithm | str | None = None,
    environment: Environment | None = None,
    rounds: Count = 5,
    seed: Whole = 0,
    encoder: str = "random",
    title: str = "federation",
    progress: bool = False,
    **engine: Any,
) -> DiagnosisResult:
    """Say how heterogeneous a federation is, in which ways, and which methods fit it; `consilience diagnose`.

        found = cs.diagnose(federation, model=module)
        found.numbers.labels.mean, found.advice, found.save("diagnosis.html")

    what: a federation (or its clients), a config file, a run folder, or None for the default run, which may
        be left out before settings.
    overrides: settings, where `what` is a config or a run.
    model: for a federation, what its gradients are looked at with; by default a perceptron of two layers.
    algorithm: for a federation, FedAvg with the local work that you mean to do; by default lr 0.2, 3 epochs, batches of
        16, as in the default run.
    environment: for a federation, which clients are slow or unreliable.
    rounds: of FedAvg to look ahead (5); seed: of all draws; encoder: "random", or "model".
    progress: print what is being done.
    engine: for a federation, settings of `Vectorised`, such as `device="cpu"`.
    """
    say = print if progress else _silent
    what, overrides = file_and_overrides(what, overrides)
    if what is None or isinstance(what, (str, Path)):
        given = {"model": model, "algorithm": algorithm, "environment": environment, **engine}
        for name, value in given.items():
            if value is not None:
                raise Invalid(
                    f"{name} is for a federation in memory: a config or a run has its own, change it by overrides"
                )
        source = None if what is None else Path(what)
        more = [*overrides, *([f"seed={seed}"] if seed else [])]
        found = diagnosis.diagnose(source, more, rounds=rounds, encoder=encoder, say=say)
        return DiagnosisResult(numbers=found, advice=advise(found))
    if overrides:
        raise Invalid(
            f"{overrides[0]!r} is a setting of a config: a federation takes model=, algorithm= and environment="
        )
    federation = what if isinstance(what, Federation) else Federation.from_clients(what)
    rounds, seed = check_value("rounds", rounds, Count), check_value("seed", seed, Whole)
    task = _task(model, federation, seed)
    usual = {key: value for key, value in DEFAULTS["algorithm"].items() if key != "name"}
    plain = fedavg(**usual) if algorithm is None else algorithms.given(algorithm)
    tried = try_client(plain, try_model(task, federation, "the model", "the federation's data"), federation)
    found = diagnosis.examine(
        federation,
        tried,
        plain,
        environment=environment or Environment(),
        seed=seed,
        rounds=rounds,
        encoder=encoder,
        title=title,
        engine=read_options("diagnose", engine, engine_options(), "diagnose"),
        say=say,
    )
    return DiagnosisResult(numbers=found, advice=advise(found))


def _silent(text: str) -> None:
    """Print nothing."""


def _task(model: nn.Module | Task | None, federation: Federation, seed: int) -> contract.Task:
    if isinstance(model, Task):
        return model
    kind = kind_of_targets(federation.train.y, federation.classes)
    if model is None:
        x = federation.train.x
        if isinstance(x, Mapping) or not x.is_floating_point():
            raise Invalid("the rows are not plain numbers: give the model that will read them, model=...")
        outputs = kind.outputs(federation.train.y, federation.classes)
        model = models.build("mlp", tuple(x.shape[1:]), outputs, seed=seed)
    return Task(model, kind)
