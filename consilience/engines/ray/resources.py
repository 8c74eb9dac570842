"""Resources of one worker (cores, GPUs and others), and how many such workers fit into a cluster."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from consilience.core.settings import Invalid

Placing = Literal["spread", "pack"]
"""Workers over as many machines as there are, or on as few as can hold them."""
_STRATEGIES = {"spread": "SPREAD", "pack": "DEFAULT"}
_SLACK = 1e-6  # Ray counts in units of 1/10000
log = logging.getLogger(__name__)


class WorkerResources(NamedTuple):
    """The resources of one worker, as Ray counts them."""

    cpus: float
    gpus: float = 0.0
    custom: tuple[tuple[str, float], ...] = ()
    placing: Placing = "spread"

    @property
    def bundle(self) -> dict[str, float]:
        """By Ray's names, without what is not asked for."""
        asked = {"CPU": self.cpus, "GPU": self.gpus, **dict(self.custom)}
        return {name: amount for name, amount in asked.items() if amount > 0}

    def options(self, node: str | None) -> dict[str, Any]:
        """As an actor's options: on this machine alone, or wherever there is room."""
        strategy: Any = _STRATEGIES[self.placing]
        if node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "resources": dict(self.custom),
            "scheduling_strategy": strategy,
        }

    def capacity(self, machines: Iterable[Mapping[str, float]]) -> int:
        """How many workers fit into the machines' whole resources."""
        return sum(self._fit(machine) for machine in machines)

    def refuse_too_few(self, machines: Sequence[Mapping[str, float]], needed: int) -> None:
        """Raise `Invalid` if the machines can never hold this many workers."""
        if self.capacity(machines) >= needed:
            return
        one = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        short = [name for name in self.bundle if not any(self._fit(machine, name) for machine in machines)]
        total = {name: sum(machine.get(name, 0.0) for machine in machines) for name in self.bundle}
        has = ", ".join(f"{amount:g} {name}" for name, amount in total.items())
        if short:
            most = max((machine.get(short[0], 0.0) for machine in machines), default=0.0)
            raise Invalid(
                f"a worker of engine = 'ray' asks for {one}, but no machine of the cluster has more than {most:g} "
                f"{short[0]}: lower {_setting(short[0])}, or start a machine that has it{_start_option(short[0])}"
            )
        raise Invalid(
            f"engine = 'ray' needs room for {needed} workers with {one} each, but the {len(machines)} machines of the "
            f"cluster ({has} in all) hold {self.capacity(machines)}: lower engine.workers or what each asks for, add "
            "machines, or set engine.min_workers to begin with fewer"
        )

    def _fit(self, machine: Mapping[str, float], only: str | None = None) -> int:
        asked = self.bundle if only is None else {only: self.bundle[only]}
        return min(math.floor(machine.get(name, 0.0) / amount + _SLACK) for name, amount in asked.items())


def asked_resources(
    *,
    cpus: float,
    gpus: float | None,
    custom: Sequence[str],
    placing: Placing,
    on_gpu: bool,
    workers: int,
    devices: float,
) -> WorkerResources:
    """From the settings; where GPUs are used and no share is given, the cluster's are divided among all workers."""
    if gpus is not None and gpus > 1 and gpus != int(gpus):
        raise Invalid(f"engine.num_gpus = {gpus:g} must be a whole number or less than 1: workers share single GPUs")
    if gpus is None:
        gpus = min(1.0, devices / workers) if on_gpu else 0.0
        gpus = math.floor(gpus * 10_000) / 10_000
        if on_gpu and not gpus:
            raise Invalid(
                "engine.device = 'cuda', but Ray has no GPU: start it on a machine that has, or use device = cpu"
            )
    return WorkerResources(cpus, gpus, parsed_resources(custom), placing)


def parsed_resources(given: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """[("site_a", 0.5)] of ["site_a=0.5"]."""
    found: dict[str, float] = {}
    for entry in given:
        name, equals, amount = entry.partition("=")
        try:
            value = float(amount) if equals else math.nan
        except ValueError:
            value = math.nan
        if not name or not 0 < value < math.inf or name in ("CPU", "GPU", "memory"):
            raise Invalid(
                f"engine.resources has {entry!r}: write name=amount of a resource that machines were started with, "
                "such as site_a=1; cores and GPUs are engine.num_cpus and engine.num_gpus"
            )
        if name in found:
            raise Invalid(f"engine.resources names {name!r} twice: give one amount")
        found[name] = value
    return tuple(found.items())


def request(bundles: Sequence[dict[str, float]]) -> None:
    """Ask the cluster's autoscaler to make room for these bundles; where there is none, nothing happens."""
    from ray.autoscaler import sdk

    try:
        sdk.request_resources(bundles=list(bundles))
    except Exception as problem:  # a cluster without one may refuse
        log.warning("the autoscaler did not take the request: %s", str(problem).partition("\n")[0])


def _setting(name: str) -> str:
    return {"CPU": "engine.num_cpus (or engine.threads)", "GPU": "engine.num_gpus"}.get(name, "engine.resources")


def _start_option(name: str) -> str:
    options = {"CPU": " (ray start --num-cpus)", "GPU": " (ray start --num-gpus)"}
    return options.get(name, f" (ray start --resources '{{\"{name}\": 1}}')")
