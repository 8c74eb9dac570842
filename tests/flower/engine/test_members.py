"""Client numbers are bound to node keys: a claim without the key is refused alone, and strangers are not even asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from declared import CLIENTS, build

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower_loopback import Loopback, apps
from flower_superlink import Superlink

from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.flower.deploy import keys, member_list
from consilience.flower.engine.engine import FlowerEngine
from consilience.flower.messages import wire
from consilience.flower.messages.mail import Waiting
from consilience.flower.messages.members import Member, fingerprint
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
WAITING = Waiting(deadline=20, wait=20, retries=0, pause=0.01)
SIZES = tiny.federation().train.sizes.tolist()


def task() -> Task:
    return Task(tiny.MODELS["mlp"]())


@pytest.fixture
def public(tmp_path: Path) -> list[Path]:
    """Public keys of one node for each client, and of two more."""
    return [Path(f"{keys.node_key(tmp_path / f'node-{number}')}.pub") for number in range(CLIENTS + 2)]


def deployed(shares: Any, public: list[Path], keys_of_nodes: list[int]) -> tuple[Superlink, list[int]]:
    """A SuperLink whose nodes authenticated with these keys."""
    clients = Loopback(apps(build("fedavg"), task, tiny.federation(), shares))
    link, nodes = Superlink(clients), sorted(clients.apps)
    link.keys = {node: public[key].read_bytes() for node, key in zip(nodes, keys_of_nodes)}
    return link, nodes


def engine_on(link: Superlink, members: Any, **settings: Any) -> FlowerEngine:
    options = {"dtype": "float64", "waiting": WAITING, "members": members, **settings}
    return FlowerEngine(link.grid(), task(), build("fedavg"), clients=CLIENTS, run="a-run", **options)


def listed(tmp_path: Path, public: list[Path], **declared: Any) -> dict[str, Member]:
    file = tmp_path / "members.toml"
    for client in range(CLIENTS):
        member_list.add(file, public[client], [client], **{name: [rows[client]] for name, rows in declared.items()})
    return member_list.read(file)


def test_a_node_that_says_it_is_another_client_is_refused_alone(tmp_path: Path, public: list[Path]) -> None:
    """Node 5 has a registered key, and says it is client 0, before client 0 itself has spoken."""
    link, nodes = deployed([[0], [1], [2], [3], [4], [0]], public, [0, 1, 2, 3, 4, 5])
    members = listed(tmp_path, public)
    engine = engine_on(link, {**members, fingerprint(public[5].read_bytes()): Member(clients=())})
    engine.meet()
    assert engine._registry.node_of == dict(enumerate(nodes[:5]))
    assert "identity: its key is that of client" in engine._registry._refused[nodes[5]]
    (only,) = run(build("fedavg"), engine, rounds=1, seed=5)
    assert only.cohort.ids.tolist() == list(range(CLIENTS)) and not only.cohort.refusals


def test_without_a_list_both_are_refused_as_before(public: list[Path]) -> None:
    link, _ = deployed([[0], [1], [2], [3], [4], [0]], public, [0, 1, 2, 3, 4, 5])
    engine = engine_on(link, None, min_available=4)
    engine.meet()
    assert 0 not in engine._registry.node_of


def test_a_thousand_strangers_are_not_asked(tmp_path: Path, public: list[Path], caplog: Any) -> None:
    link, nodes = deployed([[0], [1], [2], [3], [4]], public, [0, 1, 2, 3, 4])
    assert link.clients is not None
    strangers = range(1, 1001)
    link.clients.online |= set(strangers)
    link.keys |= dict.fromkeys(strangers, public[6].read_bytes())
    engine = engine_on(link, listed(tmp_path, public))
    with caplog.at_level("INFO", logger="consilience.flower"):
        engine.meet()
    assert len(link.clients.kinds) == CLIENTS  # five introductions
    assert set(engine._registry.node_of.values()) == set(nodes) and len(caplog.records) < 6


def test_rows_beyond_those_declared_are_refused(tmp_path: Path, public: list[Path]) -> None:
    link, nodes = deployed([[0], [1], [2], [3], [4]], public, [0, 1, 2, 3, 4])
    less = [*SIZES[:3], SIZES[3] - 1, SIZES[4] + 5]
    engine = engine_on(link, listed(tmp_path, public, train=less), min_available=4)
    engine.meet()
    assert engine._registry.present().tolist() == [True, True, True, False, True]
    assert f"says {SIZES[3]} train rows, and {SIZES[3] - 1} were declared" in engine._registry._refused[nodes[3]]


def test_rows_are_fixed_by_the_first_introduction(public: list[Path]) -> None:
    link, nodes = deployed([[0], [1], [2], [3], [4]], public, [0, 1, 2, 3, 4])
    engine = engine_on(link, None, min_available=4)
    engine.meet()
    assert link.clients is not None

    def grow(node: int, reply: Any) -> Any:
        if "introduction" in reply.content:
            said = wire.get_json(reply.content, "introduction")
            wire.put_json(reply.content, "introduction", {**said, "train": [10_000_000]})
        return reply

    link.clients.online.discard(nodes[2])
    engine.available(0, 5)
    link.clients.tamper, link.clients.online = grow, link.clients.online | {nodes[2]}
    assert engine._registry.present().tolist() == [True, True, False, True, True]
    assert "examples: client 2 had" in engine._registry._refused[nodes[2]] and engine.sizes.tolist() == SIZES


def test_a_reply_with_other_rows_than_the_introduction_is_refused(public: list[Path]) -> None:
    from test_flower_faults import engine_on as plain_engine
    from test_flower_faults import grid_of, node_of

    grid = grid_of("fedavg")
    engine, liar = plain_engine(grid, "fedavg"), node_of(grid, 3)

    def lie(node: int, reply: Any) -> Any:
        if node == liar and "answer" in reply.content:
            (said,) = wire.get_json(reply.content, "answer")
            wire.put_json(reply.content, "answer", [{**said, "examples": 10_000_000}])
        return reply

    grid.tamper = lie
    (only,) = run(build("fedavg"), engine, rounds=1, seed=5)
    assert only.cohort.ids.tolist() == [0, 1, 2, 4] and only.cohort.counts["examples"] == 1


def test_the_list_is_read_and_written(tmp_path: Path, public: list[Path]) -> None:
    file = tmp_path / "members.toml"
    member_list.add(file, public[0], [0, 1], train=[10, 20])
    member_list.add(file, public[1], [2])
    found = member_list.read(file)
    one = found[fingerprint(public[0].read_bytes())]
    assert one.clients == (0, 1) and one.train == {0: 10, 1: 20} and one.test == {}
    member_list.add(file, public[2], [2], test=[7])  # a new key for client 2
    assert {member.clients for member in member_list.read(file).values()} == {(0, 1), (2,)}
    with pytest.raises(Invalid, match="remove that entry"):
        member_list.add(file, public[3], [1])
    with pytest.raises(Invalid, match="is no public key"):
        member_list.add(file, tmp_path / "members.toml", [4])
    for text, why in (
        ("member = 3", r"\[\[member\]\]"),
        ("[[member]]\nkey = 'x'\nclients = [0]", "no public key"),
        ("[[member]]\nclients = [0]", "needs key and clients"),
        (f"[[member]]\nkey = '''{public[0].read_text().strip()}'''\nclients = [-1]", "whole numbers"),
        (f"[[member]]\nkey = '''{public[0].read_text().strip()}'''\nclients = [0]\ntrain = [1, 2]", "2 numbers for 1"),
    ):
        file.write_text(text)
        with pytest.raises(Invalid, match=why):
            member_list.read(file)
