"""What a worker of the Ray engine asks for, what a cluster can never give, and where workers run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from declared import build
from ray_machines import Machines, machines

from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.engines.ray import cluster as ray_cluster
from consilience.engines.ray import session
from consilience.engines.ray.cluster import RayCluster, worker_device
from consilience.engines.ray.resources import WorkerResources, asked_resources, parsed_resources
from consilience.engines.ray.serving import Serving
from consilience.task.task import Task

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'consilience[ray]'")

SETTINGS: dict[str, Any] = {"dtype": "float64", "lane": "serial", "device": "cpu"}


def test_room_is_counted_machine_by_machine() -> None:
    """Two halves of a core on different machines are no core, and a machine without the resource holds nobody."""
    half = WorkerResources(cpus=0.5, gpus=0.25)
    assert half.capacity([{"CPU": 8, "GPU": 1}, {"CPU": 1, "GPU": 2}, {"CPU": 64}]) == 4 + 2
    assert WorkerResources(cpus=2).capacity([{"CPU": 3}, {"CPU": 3}]) == 2
    assert WorkerResources(cpus=1, custom=(("site_a", 0.1),)).capacity([{"CPU": 64, "site_a": 0.3}]) == 3


@pytest.mark.parametrize(
    ("given", "needed", "why"),
    [
        ({"cpus": 4.0}, 1, r"no machine of the cluster has more than 2 CPU.*engine\.num_cpus.*--num-cpus"),
        ({"cpus": 1.0, "gpus": 0.5}, 1, r"no machine .* more than 0 GPU.*engine\.num_gpus.*--num-gpus"),
        ({"cpus": 1.0, "custom": (("a100", 1.0),)}, 1, r"more than 0 a100.*engine\.resources.*'{\"a100\": 1}'"),
        ({"cpus": 1.0}, 5, r"5 workers with 1 CPU each, but the 2 machines .*\(4 CPU in all\) hold 4.*min_workers"),
    ],
)
def test_what_a_cluster_can_never_hold_is_refused(given: dict[str, Any], needed: int, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        WorkerResources(**given).refuse_too_few([{"CPU": 2.0}, {"CPU": 2.0}], needed)


@pytest.mark.parametrize("given", ["site", "site=", "site=many", "=1", "site=0", "CPU=1", "site=inf"])
def test_resources_are_a_name_and_an_amount(given: str) -> None:
    assert parsed_resources(["site_a=0.5", "disk=2"]) == (("site_a", 0.5), ("disk", 2.0))
    with pytest.raises(Invalid, match=r"write name=amount"):
        parsed_resources([given])
    with pytest.raises(Invalid, match="twice"):
        parsed_resources(["a=1", "a=2"])


def test_gpus_are_shared_unless_a_share_is_given() -> None:
    settings: dict[str, Any] = {"cpus": 1.0, "custom": (), "placing": "spread", "workers": 3, "devices": 2.0}
    assert asked_resources(gpus=None, on_gpu=True, **settings).gpus == 0.6666
    assert asked_resources(gpus=None, on_gpu=True, **{**settings, "devices": 8.0}).gpus == 1.0
    assert asked_resources(gpus=None, on_gpu=False, **settings).gpus == 0.0
    assert asked_resources(gpus=0.25, on_gpu=True, **settings).bundle == {"CPU": 1.0, "GPU": 0.25}
    with pytest.raises(Invalid, match="whole number or less than 1"):
        asked_resources(gpus=1.5, on_gpu=True, **settings)
    with pytest.raises(Invalid, match="Ray has no GPU"):
        asked_resources(gpus=None, on_gpu=True, **{**settings, "devices": 0.0})
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [worker_device(cpu, gpus) for gpus in (None, 0.0, 0.5)] == ["cpu", "cpu", "cuda"]
    assert [worker_device(cuda, gpus) for gpus in (None, 0.0, 0.5)] == ["cuda", "cpu", "cuda"]


def test_more_than_all_workers_cannot_be_the_least() -> None:
    with pytest.raises(Invalid, match=r"min_workers = 3 must be from 1 to workers = 2"):
        RayCluster(Task(tiny.mlp()), tiny.federation(), workers=2, min_workers=3)


class _Process:
    """Stands in for a worker's process: notes which shares it is told to leave."""

    def __init__(self, node: str = "") -> None:
        self.node, self.left = node, list[int]()
        self.actor = self
        self.close = self
        self.remote = self.left.append


def test_shares_move_to_processes_that_join_until_none_has_less_to_do() -> None:
    opened: list[tuple[int, Any]] = []
    serving = Serving([5.0, 4.0, 3.0, 2.0], [None] * 4, WorkerResources(cpus=1), lambda *move: opened.append(move))
    first, second = _Process(), _Process()
    serving.processes.running = [first]  # type: ignore[list-item]
    serving._assign(range(4))
    assert serving.by == [first] * 4 and not serving.unserved
    serving.processes.running.append(second)  # type: ignore[arg-type]
    serving._balance()
    loads = sorted(serving._load(process)[0] for process in serving.processes.running)
    assert loads == [6.0, 8.0]
    assert first.left == [share for share, process in opened[4:]] and len(first.left) >= 1
    before = list(serving.by)
    serving._balance()
    assert serving.by == before  # nothing moves twice


def test_a_share_goes_only_to_a_machine_that_has_its_rows() -> None:
    serving = Serving([1.0, 9.0], [frozenset("a"), frozenset("bc")], WorkerResources(cpus=1), lambda *_: None)
    one, other = _Process("a"), _Process("c")
    serving.processes.running = [one, other]  # type: ignore[list-item]
    serving._assign([0, 1])
    assert serving.by == [one, other]
    serving.by, serving.processes.running = [None, None], [other]  # type: ignore[list-item]
    serving._assign([0, 1])
    assert serving.by == [None, other] and serving.unserved == [0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Machines]:
    """Two machines, of which one has (so it says) a GPU and belongs to a site."""
    with machines(num_cpus=2) as made:
        made.add(num_cpus=4, num_gpus=1, resources={"site_b": 1})
        session.join(made.address, 1)
        yield made
        session.leave()


def _engine(cluster: Machines, **more: Any) -> RayCluster:
    return RayCluster(Task(tiny.mlp()), tiny.federation(), address=cluster.address, **{**SETTINGS, **more})


@pytest.mark.slow
def test_workers_get_what_they_ask_for(cluster: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "worker_device", lambda *_: "cpu")  # the GPU is none
    total = ray.cluster_resources()
    engine = _engine(cluster, workers=4, num_cpus=0.5, num_gpus=0.25, resources=("site_b=0.2",))
    next(run(build("fedavg"), engine, rounds=1, seed=0))
    (gpu_machine,) = (key for key, value in session.machines().items() if value.get("GPU"))
    assert engine._pool is not None
    assert {process.node for process in engine._pool.serving.processes.running} == {gpu_machine}
    left = ray.available_resources()
    assert [round(total[name] - left.get(name, 0.0), 3) for name in ("CPU", "GPU", "site_b")] == [2.0, 1.0, 0.8]
    engine.close()
    with pytest.raises(Invalid, match=r"5 workers with .*hold 4"):
        next(run(build("fedavg"), _engine(cluster, workers=5, num_gpus=0.25), rounds=1, seed=0))
    with pytest.raises(Invalid, match="no machine of the cluster has more than 1 GPU"):
        next(run(build("fedavg"), _engine(cluster, workers=1, num_gpus=2), rounds=1, seed=0))


@pytest.mark.slow
def test_a_gpu_that_pytorch_does_not_see_is_named(cluster: Machines) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Invalid, match="device = 'cuda' cannot be used here"):
        next(run(build("fedavg"), _engine(cluster, workers=1, num_gpus=0.5), rounds=1, seed=0))


@pytest.mark.slow
def test_workers_are_spread_over_machines_or_packed(cluster: Machines) -> None:
    for placement, count in (("spread", 2), ("pack", 1)):
        engine = _engine(cluster, workers=2, num_cpus=0.5, placement=placement)
        next(run(build("fedavg"), engine, rounds=1, seed=0))
        assert engine._pool is not None
        assert len({process.node for process in engine._pool.serving.processes.running}) == count
        engine.close()
