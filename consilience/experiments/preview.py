"""Preview of a run before it starts: its size, warnings, and a cost estimate from measured steps."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from consilience.core import tree
from consilience.core.exchange import Pool
from consilience.core.federation import Federation, Rows
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.stored_rows import is_stored
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.experiments.assembly import Simulation
from consilience.experiments.cohort_size import lone_client
from consilience.experiments.config.catalogue import engine_options
from consilience.experiments.evaluation import evaluate

STEPS = (1, 3)  # local steps of the two measured rounds: their difference is two steps without the overhead of a round
REPEATS = 3  # of a measured round; the fastest one counts, as the first also prepares memory and kernels
ENOUGH = 2.0  # seconds after which a round is not measured again
ROUNDS = 20  # over which selections and workloads are averaged
TEST_ROWS = 512  # that the model is timed on
NAMED = 5  # clients that a warning names


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained, and how much is sent and stored."""

    clients: int
    clients_a_round: float  # mean of the first rounds
    rows: int
    rows_a_client: tuple[int, int, int]  # least, median, most
    test_rows: int
    classes: int | None
    label_names: tuple[str, ...]
    parameters: int
    rounds: int
    steps_a_round: float  # of all chosen clients together
    data_bytes: int
    model_bytes: int
    memory_bytes_a_client: int  # kept between rounds by each client
    server_bytes: int  # kept by the server


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Measurements of two short rounds, and the estimate for the run."""

    bytes_down: float  # to one client in a round
    bytes_up: float
    step_seconds: float
    round_seconds: float  # of a whole round, by its number of steps
    test_seconds: float  # of one test of the global model
    run_seconds: float
    peak_bytes: int  # of this process, or on the GPU
    how: str


def size(simulation: Simulation) -> Size:
    """The numbers that need no training."""
    federation, config, start = simulation.federation, simulation.config, simulation.engine.start()
    if not isinstance(federation.train, Rows):
        raise Invalid("data.name = 'node_files' leaves rows where they lie: there is nothing to estimate from here")
    sizes = federation.train.sizes.numpy()
    algorithm = simulation.algorithm
    counts, steps = zip(*_work(simulation))
    splits = [split for split in (federation.train, federation.test) if split is not None]
    rows = [leaf for split in splits for leaf in (*tree.leaves(split.x), split.y) if not is_stored(leaf)]
    kept = sum(tree.nbytes(part.init(start)) for part in (algorithm.client, algorithm.channel))
    return Size(
        clients=len(federation),
        clients_a_round=float(np.mean(counts)),
        rows=int(sizes.sum()),
        rows_a_client=(int(sizes.min()), int(np.median(sizes)), int(sizes.max())),
        test_rows=0 if federation.test is None else len(federation.test.y),
        classes=federation.classes,
        label_names=federation.label_names,
        parameters=simulation.experiment.parameters,
        rounds=config.rounds,
        steps_a_round=float(np.mean(steps)),
        data_bytes=sum(leaf.numel() * leaf.element_size() for leaf in rows),
        model_bytes=tree.nbytes(start),
        memory_bytes_a_client=kept,
        server_bytes=tree.nbytes(algorithm.server.init(start, len(federation))),
    )


def _work(simulation: Simulation) -> Iterator[tuple[int, float]]:
    """(clients, steps) of the first rounds, as selection and environment draw them; losses are not known yet."""
    federation, environment = simulation.federation, simulation.environment
    sizes, seed = federation.train.sizes.numpy(), simulation.config.seed
    work = simulation.algorithm.client.work
    for number in range(ROUNDS):
        there = environment.available(number, len(sizes), seed)
        pool = Pool(sizes=sizes, losses=np.full(len(sizes), np.nan), available=there)
        ids = simulation.algorithm.selection.choose(number, pool, seed) if there.any() else np.arange(0)
        per_epoch = work.steps_per_epoch(sizes[ids])
        steps = environment.work(number, ids, seed, epochs=work.epochs, steps_per_epoch=per_epoch)
        yield len(ids), float(np.sum(steps))


def warnings(simulation: Simulation) -> list[str]:
    """Settings that are allowed but probably not intended."""
    federation, algorithm = simulation.federation, simulation.algorithm
    sizes = federation.train.sizes.numpy()
    alone = lone_client(algorithm, len(federation), simulation.config.seed)
    found = [] if alone is None else [f"algorithm.selection: {alone}"]
    found += _of_clients(federation, sizes == 0, "no training rows: they never reply")
    found += _of_clients(federation, sizes == 1, "one training row each")
    single = _single_class(federation)
    found += _of_clients(federation, single, "rows of one class alone: their models forget the others in every round")
    batch = algorithm.client.work.batch_size
    if batch is not None:
        short = (sizes < batch) & (sizes > 0)
        found += _of_clients(federation, short, f"fewer rows than algorithm.batch_size = {batch}: one step an epoch")
    if federation.test is not None and bool(federation.test.sizes.sum()):
        untested = federation.test.sizes.numpy() == 0
        found += _of_clients(federation, untested, "no test rows of their own: they are left out of means over clients")
    return found + _of_classes(federation)


def _of_clients(federation: Federation, which: np.ndarray, what: str) -> list[str]:
    names = [federation.names[k] for k in np.flatnonzero(which).tolist()]
    if not names:
        return []
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"{len(names)} of {len(federation)} clients ({', '.join(names[:NAMED])}{more}) have {what}"]


def _single_class(federation: Federation) -> np.ndarray:
    train = federation.train
    found = np.zeros(len(federation), dtype=bool)
    if federation.classes and federation.classes > 1 and train.y.dim() == 1:
        for k, (start, count) in enumerate(zip(train.starts.tolist(), train.sizes.tolist())):
            mine = train.y[start : start + count]
            found[k] = count > 1 and bool((mine == mine[0]).all())
    return found


def _of_classes(federation: Federation) -> list[str]:
    if not federation.classes or federation.train.y.dim() != 1:
        return []
    counts = torch.bincount(federation.train.y[federation.train.y >= 0], minlength=federation.classes)
    absent = [_class_name(federation, c) for c in torch.nonzero(counts == 0).flatten().tolist()]
    return [f"no client has training rows of the class {', '.join(absent[:NAMED])}"] if absent else []


def _class_name(federation: Federation, number: int) -> str:
    return repr(federation.label_names[number]) if federation.label_names else str(number)


def cost(simulation: Simulation, size: Size) -> Cost:
    """Measure rounds of one and of three local steps for each chosen client; nothing is kept of them.

    The environment's faults are left out, so that every chosen client replies. The cost of a round of the run is the
    cost of a round without steps plus that of its steps.
    """
    seconds, rounds = [], []
    for steps in STEPS:
        best, done = _timed(simulation, steps)
        seconds.append(best)
        rounds.append(done)
    replies = max(1, len(rounds[0].cohort))
    met = [max(1.0, float(np.sum(done.cohort.steps))) for done in rounds]
    step = (seconds[1] - seconds[0]) / max(1.0, met[1] - met[0])
    if step <= 0:  # too short to measure beside the overhead of a round: an upper bound
        step = seconds[1] / met[1]
    fixed = max(0.0, seconds[0] - met[0] * step)
    a_round = fixed + step * size.steps_a_round
    tested = _test_seconds(simulation)
    every = simulation.config.evaluation.every
    tests = -(-size.rounds // every) if every else 0
    return Cost(
        bytes_down=rounds[0].bytes_down / max(1, len(rounds[0].chosen)),
        bytes_up=rounds[0].bytes_up / replies,
        step_seconds=step,
        round_seconds=a_round,
        test_seconds=tested,
        run_seconds=size.rounds * a_round + tests * tested,
        peak_bytes=_peak(simulation.engine.start()),
        how=f"measured: rounds of {STEPS[0]} and {STEPS[1]} local steps for {replies} clients on "
        f"{_device(simulation)}, and a test of {min(TEST_ROWS, size.test_rows)} rows; extrapolated by steps and rows",
    )


def _timed(simulation: Simulation, steps: int) -> tuple[float, Any]:
    """(seconds of the fastest round, the last round) in which every chosen client does so many steps."""
    config, federation = simulation.config, simulation.federation
    options = {key: value for key, value in config.engine.items() if key in engine_options()}
    if options.get("lane", "auto") == "auto" and _device(simulation) == "cpu":
        options["lane"] = "serial"  # measuring lanes would take longer than the round
    equal = Environment(steps=(steps,) * len(federation), silent=simulation.environment.silent)
    engine = Vectorised(simulation.task, federation, environment=equal, **options)
    rounds = run(simulation.algorithm, engine, rounds=REPEATS, seed=config.seed)
    found = list[float]()
    while len(found) < REPEATS and (len(found) < 2 or sum(found) < ENOUGH):
        began = time.perf_counter()
        done = next(rounds)
        found.append(time.perf_counter() - began)
    return min(found), done


def _test_seconds(simulation: Simulation) -> float:
    """Of one test on all rows, by the time that some of them take."""
    test = simulation.engine.test_rows
    if test is None or not len(test.y):
        return 0.0
    some = min(TEST_ROWS, len(test.y))
    none = torch.zeros_like(test.sizes)
    few = dataclasses.replace(test, x=tree.rows(test.x, slice(0, some)), y=test.y[:some], starts=none, sizes=none)
    task, model = simulation.engine.task, simulation.engine.start()
    evaluate(task, model, few)
    began = time.perf_counter()
    evaluate(task, model, few)
    return (time.perf_counter() - began) * len(test.y) / some


def _device(simulation: Simulation) -> str:
    return str(simulation.engine.resolved_settings.get("device", "cpu"))


def _peak(start: tree.Tree) -> int:
    """The most memory in use so far: of the GPU where the model is there, else of this process."""
    where: Sequence[torch.Tensor] = list(tree.leaves(start))
    if where and where[0].is_cuda:
        return int(torch.cuda.max_memory_allocated(where[0].device))
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
