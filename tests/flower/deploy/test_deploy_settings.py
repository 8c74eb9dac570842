"""What a deployment's config says and refuses, before anything is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import declared
import numpy as np
import pytest
import torch

from consilience import algorithms
from consilience.core.settings import Invalid
from consilience.experiments.config.config import from_table
from consilience.flower.deploy import template
from consilience.flower.deploy.hosting import hosts_of, settings_of, site_of
from consilience.flower.deploy.local_deployment import LocalDeployment
from consilience.flower.deploy.processes import alive, end
from consilience.flower.deploy.programs import is_loopback
from consilience.flower.deploy.serving import CONNECTION, refuse_plain_text
from consilience.flower.deploy.settings import from_given, load
from consilience.flower.deploy.sources import OwnFederation, source_of
from consilience.flower.deploy.up import shares
from consilience.flower.deploy.verify import ALGORITHMS, STANDARD, Outcome, differing, verify

FEDAVG = {"algorithm": {"name": "fedavg", "lr": 0.1}, "deploy": {"clients": 3, "classes": 2}}


def test_the_template_is_a_whole_app_whose_settings_can_be_read(tmp_path: Path) -> None:
    files = template.init(tmp_path / "hospital", clients=3)
    assert {file.name for file in files} >= {"pyproject.toml", "server_app.py", "client_app.py", "federation.py"}
    config = load(tmp_path / "hospital")
    assert (config.label, config.deploy.clients, config.own) == ("hospital", 3, True)
    assert config.table()["data"] == config.table()["model"] == {"name": "federation.py"}
    source = source_of(tmp_path / "hospital", config)
    held = source.held(np.array([0, 2]), {})
    assert len(held) == 2 and held.test is not None and held.names == ("0", "2")
    assert source.test() is None
    with pytest.raises(Invalid, match="is not empty"):
        template.init(tmp_path / "hospital")
    with pytest.raises(Invalid, match="name"):
        template.init(tmp_path / "a b")


def test_the_model_starts_the_same_wherever_it_is_built(tmp_path: Path) -> None:
    template.init(tmp_path / "app")
    config = load(tmp_path / "app")
    torch.manual_seed(1)
    one = OwnFederation(tmp_path / "app", config).task.start()
    torch.manual_seed(2)
    other = OwnFederation(tmp_path / "app", config).task.start()
    for name, value in one["params"].items():
        assert torch.equal(value, other["params"][name])


def test_data_and_model_come_from_one_place_only() -> None:
    with pytest.raises(Invalid, match=r"data comes from federation.py"):
        from_given({**FEDAVG, "data": "digits"}, own=True)
    assert from_given({**FEDAVG, "data": "digits"}, own=False).data.name == "digits"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": 0}, r"deploy.clients = 0 is out of range"),
        ({"dedline": 3}, r"deploy.dedline is not a setting \(did you mean 'deadline'\?\)"),
        ({"deadline": -1}, r"Deploy.deadline|deploy.deadline"),
        ({"min_available": 9}, r"deploy.min_available = 9 is more than deploy.clients = 3"),
    ],
)
def test_bad_settings_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        from_given({**FEDAVG, "deploy": {**FEDAVG["deploy"], **changes}}, own=True)


def test_overrides_reach_the_deploy_section() -> None:
    config = from_given(FEDAVG, ["deploy.deadline=7", "rounds=9"], own=True)
    assert (config.deploy.deadline, config.rounds) == (7.0, 9)


# --- secure sums (FAULTS 62) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reader"), [("simprox", "SimProx"), ("krum", "Krum"), ("coordinate_median", "Median")]
)
def test_a_secure_sum_is_refused_with_who_reads_single_replies(name: str, reader: str) -> None:
    given = {"algorithm": {"name": name}, "deploy": {"clients": 9, "secure_aggregation": True}}
    with pytest.raises(Invalid, match=rf"delivers only the sum of the replies, but \w*{reader}\w* reads each"):
        from_given(given, own=True)


def secret(name: str, **changes: Any) -> dict[str, Any]:
    """A config that asks for secure sums; algorithms get what they cannot do without."""
    options = {
        "duw_fedavg": {"weighting": {"name": "schedule", "table": [[1 / 9] * 9]}},
        "duw_fednova": {"weighting": {"name": "schedule", "table": [[1 / 9] * 9]}},
        "fedaf": {"shape": [1, 6, 6]},
        "feddf": {"public": {"name": "noise_rows", "shape": [1, 6, 6]}},
        "feddm": {"shape": [1, 6, 6]},
        "fedsplit": {"step": 1.0, "keeps_z": True},
        "fedprox_fedsplit": {"step": 1.0},
        "hetlora": {"ranks": [4, 2]},
    }
    algorithm = {"name": name, **options.get(name, {}), **changes.pop("algorithm", {})}
    return {
        "algorithm": algorithm,
        **changes,
        "deploy": {"clients": 9, "secure_aggregation": True, **changes.get("deploy", {})},
    }


APART = ("centralised", "dp_fedavg")  # one client; a rule of its own, which test_private_sums tests
READERS = [name for name in algorithms.names() if name not in APART and declared.build(name).server.needs_each_reply]
OFFERED = {
    **dict.fromkeys(["ditto", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedbn", "fedper"], "examples"),
    **dict.fromkeys(["fedit", "fedprox", "fedrep", "fedyogi", "ffa_lora", "moon"], "examples"),
    **dict.fromkeys(["feddc", "feddyn", "scaffold"], "uniform"),
}
OTHERS = {
    "duw_fedavg": "ScheduleWeights",
    "duw_fednova": "PacedAveraging",
    "fedasync": "Buffered",
    "fedbuff": "Buffered",
    "fedprox_fedsplit": "Splitting",
    "local_only": "NoServer",
}


@pytest.mark.parametrize("name", READERS)
def test_every_algorithm_that_reads_single_replies_refuses_a_secure_sum(name: str) -> None:
    with pytest.raises(Invalid, match=r"only the sum of the replies, but \w+( and \w+)* reads each reply"):
        from_given(secret(name), own=True)


@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_ages_or_broadcasts_refuse_it_by_name(name: str) -> None:
    with pytest.raises(Invalid, match=rf"one mean, by example counts or uniform, and {OTHERS[name]} needs"):
        from_given(secret(name), own=True)


@pytest.mark.parametrize("name", OFFERED)
def test_a_secure_sum_is_offered_where_it_will_do(name: str) -> None:
    terms = from_given(secret(name), own=True).build_terms()
    assert terms is not None and terms.weights == OFFERED[name]
    assert (terms.clip, terms.levels, terms.threshold) == (8.0, 2**22, 0.5)


def test_every_algorithm_is_offered_or_refused() -> None:
    assert {*READERS, *OFFERED, *OTHERS, *APART} == set(algorithms.names())
    assert from_given({**FEDAVG}, own=True).build_terms() is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"deploy": {"clients": 2}}, r"deploy.clients = 2, but .* at least 3 clients"),
        ({"deploy": {"min_available": 2}}, r"deploy.min_available = 2, but .* at least 3 clients"),
        ({"deploy": {"secure_clip": 0}}, r"deploy.secure_clip = 0.0 is out of range: it must be > 0"),
        ({"deploy": {"secure_levels": 10}}, r"deploy.secure_levels = 10 is out of range: it must be >= 256"),
        ({"deploy": {"secure_threshold": 0.3}}, r"deploy.secure_threshold = 0.3 is out of range: it must be >= 0.5"),
        ({"deploy": {"secure_levels": 2**29}}, r"secure_levels = 536870912 is too much .* at most 477218588"),
        ({"deploy": {"secure_clipp": 1}}, r"did you mean 'secure_clip'"),
        ({"limits": {"max_norm": 1.0}}, r"limits.max_norm = 1 measures each update at the server"),
        ({"evaluation": {"local": True}}, r"evaluation.local = true tests each client's model"),
        (
            {"algorithm": {"selection": {"name": "power_of_choice", "count": 3}}},
            r"hides each client's loss, by which PowerOfChoice",
        ),
        ({"algorithm": {"channel": "quantise"}}, r"sums numbers, and channel Quantise"),
        ({"algorithm": {"channel": "over_the_air"}}, r"sums numbers, and channel OverTheAir"),
        ({"algorithm": {"combine": "median"}}, r"Median reads each"),
    ],
)
def test_what_a_secure_sum_cannot_have_is_refused_with_the_reason(given: dict[str, Any], why: str) -> None:
    with pytest.raises(Invalid, match=why):
        from_given(secret("fedavg", **given), own=True)


def test_ledgers_need_the_mean_that_the_model_takes() -> None:
    with pytest.raises(Invalid, match=r"ControlVariates needs another one: use uniform weights"):
        from_given(secret("scaffold", algorithm={"weighting": "by_examples"}), own=True)


# --- who and where ---------------------------------------------------------------------------------------------------


def test_a_node_computes_as_the_config_says_and_on_its_own_device(tmp_path: Path) -> None:
    """What decides the bits holds on every node: with another lane, its replies would not be those of a simulation."""
    template.init(tmp_path / "app", clients=3)
    shared = {"lane": "serial", "dtype": "float64", "precision": "full", "deterministic": True}
    told = " ".join(f"engine.{key}={str(value).lower()}" for key, value in shared.items())
    for node, device in (({"clients": "0", "device": "cpu"}, "cpu"), ({"clients": "1"}, "auto")):
        context = SimpleNamespace(node_config=node, run_config={"settings": told}, run_id=5)
        assert site_of(tmp_path / "app", context, "").engine == {**shared, "device": device}


def test_a_node_says_which_clients_it_holds() -> None:
    assert hosts_of({"clients": "3,0"}, 4).tolist() == [0, 3]
    assert hosts_of({"clients": 2}, 4).tolist() == [2]
    assert hosts_of({"partition-id": 1, "num-partitions": 4}, 4).tolist() == [1]
    for wrong in ({}, {"clients": "4"}, {"clients": "-1"}, {"clients": "a"}, {"clients": ""}):
        with pytest.raises(Invalid):
            hosts_of(wrong, 4)
    assert settings_of({"settings": "rounds=3  algorithm.lr=0.1"}) == ["rounds=3", "algorithm.lr=0.1"]


def test_clients_are_shared_out_evenly() -> None:
    assert shares(5, 2) == [[0, 1, 2], [3, 4]]
    with pytest.raises(Invalid, match="--local 6"):
        shares(5, 6)


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "localhost:1", "::1"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["10.0.0.5:8000", "0.0.0.0", "[2001:db8::1]:80", "hospital.example:8000"])
def test_not_loopback(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize("connection", ["", "plain", "TLS", "tls ", "unknown"])
def test_plain_text_to_another_machine_is_refused_unless_asked_for(connection: str, tmp_path: Path) -> None:
    """Whatever the launcher has not called safe is not."""
    with pytest.raises(Invalid, match="the connection is not known to be encrypted"):
        refuse_plain_text(connection, allowed=False)
    refuse_plain_text(connection, allowed=True)
    for safe in ("tls", "loopback"):
        refuse_plain_text(safe, allowed=False)


def test_without_tls_nothing_but_loopback_is_served(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="without TLS and node keys anybody could join"):
        LocalDeployment(tmp_path, shares=[[0]], place=tmp_path, secure=False, host="10.0.0.5")


def test_a_server_of_an_undeclared_connection_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ServerApp that plain Flower starts has no such variable; a grid's own attributes do not count."""
    from types import SimpleNamespace

    from consilience.flower.deploy.serving import serve

    template.init(tmp_path / "app", clients=2)
    grid = SimpleNamespace(_insecure=False, _addr="127.0.0.1:8000")
    monkeypatch.delenv(CONNECTION, raising=False)
    for given in ({}, {"insecure": False}, {"insecure": "no"}, {"insecure": 1}):
        with pytest.raises(Invalid, match="the connection is not known to be encrypted"):
            serve(grid, tmp_path / "app", {"runs": str(tmp_path / "runs"), **given})
    assert not (tmp_path / "runs").exists()


def test_a_dead_process_is_known_as_such_and_a_live_one_is_ended_by_its_id() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert alive(child.pid) and alive(os.getpid())
    end(child.pid)
    assert not alive(child.pid)  # though nobody has collected it yet
    assert child.wait(10) == -signal.SIGTERM


# --- keys ------------------------------------------------------------------------------------------------------------


def test_keys_are_private_and_the_certificate_names_its_hosts(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="comes with Flower")
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    from consilience.flower.deploy import keys

    made = keys.make(tmp_path / "keys", hosts=("127.0.0.1", "localhost"), nodes=2)
    for secret in (made.certificate_key, *made.nodes, tmp_path / "keys" / "ca.key"):
        assert secret.stat().st_mode & 0o077 == 0
    certificate = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["127.0.0.1", "localhost"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    private = load_ssh_private_key(made.nodes[0].read_bytes(), None)
    public = load_ssh_public_key(Path(f"{made.nodes[0]}.pub").read_bytes())
    assert private.public_key() == public


# --- verify ----------------------------------------------------------------------------------------------------------


def test_every_algorithm_that_verify_compares_can_be_configured() -> None:
    from consilience.flower.deploy.verify import _table

    for name in ALGORITHMS:
        config = from_table(_table(STANDARD, name, 2))
        assert (config.algorithm.name, config.engine["dtype"], config.threads) == (name, "float64", 1)


def test_an_option_of_another_algorithm_does_not_stop_verify() -> None:
    from consilience.flower.deploy.verify import _table

    given = {**STANDARD, "algorithm": {"name": "fedprox", "mu": 0.3, "lr": 0.05}}
    assert from_table(_table(given, "fedprox", 1)).algorithm.options["mu"] == 0.3
    assert from_table(_table(given, "fedavg", 1)).algorithm.options["lr"] == 0.05


def test_differences_are_found_and_skips_are_none() -> None:
    same = [Outcome("a", "x", "1", "2"), Outcome("a", "y", "1", "2"), Outcome("a", "z", why="no", skipped=True)]
    assert differing(same) == []
    assert differing([*same, Outcome("b", "x", "1", "2"), Outcome("b", "y", "1", "3")]) == ["b"]
    assert differing([*same, Outcome("b", "x", why="it broke")]) == ["b"]


def test_verify_in_process_agrees_with_itself_and_knows_its_engines() -> None:
    once, again = (verify(STANDARD, algorithms=["scaffold"], engines=["vectorised"], rounds=1) for _ in range(2))
    assert once[0].model == again[0].model and once[0].metrics == again[0].metrics and not once[0].why
    with pytest.raises(Invalid, match="did you mean 'flower'"):
        verify(STANDARD, engines=["flowr"])
    with pytest.raises(Invalid, match=r"partition.clients is missing"):
        verify({"data": "digits"}, engines=["vectorised"])
