"""200 nodes on one SuperLink, a fifth of them hostile or slow: do rounds keep their deadline, and does memory stay?

python -m many_nodes --minutes 60            (in benchmarks/; a few minutes are enough to see it work)

SuperLink, gateway and ServerApp are the real ones, each in its own process, with TLS, registered keys and a list of
members. The nodes are threads of this process: Flower's connection, our client code, a model of 39
parameters. Hostile nodes take turns through the attacks of `attacks.py`. The table comes last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from consilience.flower.deploy import template
from consilience.flower.deploy.local_deployment import LocalDeployment
from consilience.flower.deploy.settings import load
from consilience.flower.deploy.sources import source_of
from many_nodes.attacks import ATTACKS
from many_nodes.node import Node

SLACK = 6.0  # seconds beyond the deadline: 5 for fetching what was sent before it, and the round's own arithmetic
CONFIG = """
name = "many"
rounds = 1000000
threads = 1
defence = "auto"
untrusted = {hostile}
algorithm = {{ name = "fedavg", lr = 0.1, epochs = 1, selection = {{ name = "uniform", count = {each} }} }}
engine = {{ dtype = "float32", device = "cpu", lane = "serial" }}
evaluation = {{ every = 5 }}
deploy = {{ clients = {clients}, classes = 3, min_available = {least}, deadline = {deadline}, wait = 300 }}
"""
FEDERATION = """
import torch
from torch import nn


def model():
    return nn.Linear(12, 3)


def data(client, node):
    draw = torch.Generator().manual_seed(client)
    y = torch.randint(0, 3, (60,), generator=draw)
    x = torch.randn(60, 12, generator=draw) + y[:, None]
    return x[20:], y[20:], x[:20], y[:20]
"""


class Crowd(LocalDeployment):
    """The server's side of a deployment; its nodes are threads of this process."""

    def start_node(self, number: int, **settings: Any) -> Any:
        return None

    def register(self, public_key: Path) -> Any:
        """In this process: two hundred of Flower's commands at once would need more memory than the run."""
        from flwr.cli.supernode.register import try_load_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        assert self.keys is not None
        authority = self.keys.authority.read_bytes()
        version = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
        with ControlHttpClient.from_server_address(f"127.0.0.1:{self.control_port}", False, authority, version) as line:
            found = line.RegisterNode(RegisterNodeRequest(public_key=try_load_public_key(public_key)))
        return SimpleNamespace(wait=lambda seconds: 0 if found.node_id else 1, tail=lambda: "")


def rss(pid: int | None) -> float:
    """Megabytes of a process; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return 0.0


def descriptors(pid: int | None) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def rows_of(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def watch(stage: Crowd, folder: Path, minutes: float, nodes: list[Node], every: float = 30.0) -> list[dict[str, Any]]:
    """Samples of memory, descriptors and rounds until the time is over or the run ends."""
    found, end, began = [], time.monotonic() + 60 * minutes, time.monotonic()
    while time.monotonic() < end:
        time.sleep(min(every, max(0.0, end - time.monotonic())))
        facts = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else {}
        server = facts.get("server_pid")
        link, gateway = stage.link.pid if stage.link else None, stage._beside[-1].pid
        found.append(
            {
                "minute": round((time.monotonic() - began) / 60, 1),
                "rounds": len(rows_of(folder / "metrics.jsonl")),
                "superlink_mb": round(rss(link)),
                "serverapp_mb": round(rss(server)),
                "gateway_mb": round(rss(gateway)),
                "driver_mb": round(rss(os.getpid())),
                "serverapp_fds": descriptors(server),
                "superlink_fds": descriptors(link),
                "answers": sum(node.answered for node in nodes),
            }
        )
        print(json.dumps(found[-1]), flush=True)
        if facts.get("status") not in (None, "running"):
            print("the run has ended:", facts.get("status"), facts.get("reason"), flush=True)
            break
        stage.check()
    return found


def report(folder: Path, samples: list[dict[str, Any]], nodes: list[Node], deadline: float) -> int:
    """The tables; how many rounds missed their deadline."""
    rows, times = rows_of(folder / "metrics.jsonl"), rows_of(folder / "timing.jsonl")
    seconds = [row["seconds"] for row in times]
    missed = [row["round"] for row, took in zip(rows, seconds) if took > deadline + SLACK]
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row["rejected"])
        reasons.update({name: row.get(name, 0) for name in ("silent", "clipped_updates", "capped_examples")})
    hostile = {node.client for node in nodes if node.attack is not None}
    counted: Counter[str] = Counter()
    for row in rows:
        for client in row["cohort"]:
            attack = nodes[client].attack
            counted[attack.__name__ if attack else "honest"] += 1
    honest = [sum(client not in hostile for client in row["cohort"]) for row in rows]
    print(
        f"\nrounds {len(rows)}; deadline {deadline:g} s, missed by more than {SLACK:g} s: {len(missed)} {missed[:20]}"
    )
    if seconds:
        ordered = sorted(seconds)
        print(f"seconds of a round: median {ordered[len(ordered) // 2]:.1f}, longest {ordered[-1]:.1f}")
        print(f"honest replies a round: fewest {min(honest)}, most {max(honest)}, of {len(nodes) - len(hostile)}")
    print("refused, missing or clipped:", json.dumps(dict(reasons.most_common())))
    print("replies that reached the server rule, by kind of node:", json.dumps(dict(counted.most_common())))
    tested = [(row["round"], row["accuracy"]) for row in rows if row.get("accuracy") is not None]
    print("accuracy, first and last:", tested[:1], tested[-1:])
    failed = Counter(node.problem for node in nodes if node.failed)
    print("failures of nodes:", sum(node.failed for node in nodes), dict(failed.most_common(4)))
    print("\n| minute | rounds | SuperLink MB | ServerApp MB | gateway MB | fds ServerApp | fds SuperLink |")
    print("|---|---|---|---|---|---|---|")
    for one in samples[:: max(1, len(samples) // 12)] + samples[-1:]:
        print("| " + " | ".join(str(one[key]) for key in (
            "minute", "rounds", "superlink_mb", "serverapp_mb", "gateway_mb", "serverapp_fds", "superlink_fds"
        )) + " |")  # fmt: skip
    return len(missed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--hostile", type=int, default=40)
    parser.add_argument("--each", type=int, default=100, help="nodes that are asked in a round")
    parser.add_argument("--deadline", type=float, default=90)
    parser.add_argument("--poll", type=float, default=8, help="seconds between two questions of a node")
    parser.add_argument("--place", type=Path, help="a new folder for everything that is written")
    given = parser.parse_args()
    place = given.place or Path(tempfile.mkdtemp(prefix="many-nodes-"))
    app = place / "app"
    template.init(app, clients=given.nodes)
    settings = {"hostile": given.hostile, "clients": given.nodes, "deadline": given.deadline, "least": given.nodes // 2}
    (app / "config.toml").write_text(CONFIG.format(**settings, each=given.each))
    (app / "federation.py").write_text(FEDERATION)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    config = load(app)
    source = source_of(app, config)
    print(f"{given.nodes} nodes, {given.hostile} of them hostile or slow; everything is in {place}", flush=True)
    step = given.nodes // max(1, given.hostile)
    attacks = itertools.cycle(ATTACKS)
    plan = {client: next(attacks) for client in list(range(step - 1, given.nodes, step))[: given.hostile]}
    with Crowd(app, shares=[[client] for client in range(given.nodes)], place=place / "stage") as stage:
        assert stage.keys is not None
        nodes = [
            Node(
                client,
                config=config,
                source=source,
                key=stage.keys.nodes[client],
                attack=plan.get(client),
                address=f"127.0.0.1:{stage.port}",
                authority=stage.keys.authority,
                poll=given.poll,
            )
            for client in range(given.nodes)
        ]
        for node in nodes:
            node.start()
        stage.run(runs=str(place / "runs"))
        folder = place / "runs" / "many"
        samples = watch(stage, folder, given.minutes, nodes)
        for node in nodes:
            node.end()
        if (folder / "run.json").exists():
            stage.servers.add(json.loads((folder / "run.json").read_text())["server_pid"])
        missed = report(folder, samples, nodes, given.deadline)
        (place / "samples.json").write_text(json.dumps(samples))
    return 1 if missed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Flower's heartbeat threads of two hundred nodes have nothing left to do
