"""The audit log of a deployed run: what it holds, what it survives, and which changes of it are found."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower_loopback import Loopback

from consilience.cli import app as cli
from consilience.core.rounds import TooFewClients
from consilience.core.settings import Invalid
from consilience.flower import client_app
from consilience.flower.audit.checking import AuditReport, check
from consilience.flower.audit.comparing import compare
from consilience.flower.audit.log import KEYS, AuditLog
from consilience.flower.audit.receipts import RECEIPTS
from consilience.flower.audit.signing import Head, Signer, is_signed
from consilience.flower.deploy import keys, template
from consilience.flower.deploy.serving import CONNECTION, serve
from consilience.flower.messages import wire
from consilience.runs import canonical
from consilience.runs.row_log import RecordError, RowLog

CLIENTS = 3
FEDERATION = """
import torch
from torch import nn


def model():
    return nn.Linear(4, 3)


def data(client, node):
    draw = torch.Generator().manual_seed(client)
    y = torch.randint(0, 3, (14 + 5 * client,), generator=draw)
    x = torch.randn(len(y), 4, generator=draw) + y[:, None]
    return x[6:], y[6:], x[:6], y[:6]
"""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Deployed:
    """A run that was served here, its keys, and the receipts of its nodes."""

    place: Path

    @property
    def folder(self) -> Path:
        return self.place / "runs" / "there"

    @property
    def log(self) -> Path:
        return self.folder / "audit.jsonl"

    @property
    def authority(self) -> Path:
        return self.place / "keys" / "ca.crt"

    @property
    def signer(self) -> Signer:
        made = keys.load(self.place / "keys")
        return Signer(made.certificate, made.certificate_key)

    def receipts(self, node: int) -> Path:
        return self.place / "receipts" / str(node) / "there.jsonl"

    def report(self, log: Path | None = None, *nodes: int, **settings: Any) -> AuditReport:
        found = check(log or self.folder, **{"authority": self.authority, **settings})
        compare(found, [self.receipts(node) for node in nodes])
        return found

    def serve(self, tamper: Callable[[Loopback, int, Any], Any] | None = None, settings: str = "") -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CONNECTION, "loopback")
            patch.setenv(KEYS, str(self.place / "keys") if (self.place / "keys").exists() else "")
            made = []
            for node in range(CLIENTS):
                patch.setenv(RECEIPTS, str(self.place / "receipts" / str(node)))
                made.append(client_app(self.place / "app"))
            given = {"runs": str(self.place / "runs"), "settings": settings}
            grid = Loopback(made, [{"clients": str(k)} for k in range(CLIENTS)], given)
            if tamper is not None:
                grid.tamper = lambda node, reply: tamper(grid, node, reply)
            serve(grid, self.place / "app", given)


def deployed(place: Path, *, signed: bool = True, more: str = "", algorithm: str = "fedavg") -> Deployed:
    template.init(place / "app", clients=CLIENTS)
    (place / "app" / "config.toml").write_text(
        f"""
name = "there"
rounds = 2
threads = 1
algorithm = {{ name = "{algorithm}", lr = 0.1, epochs = 1, batch_size = 8, selection = "everyone" }}
engine = {{ device = "cpu" }}
deploy = {{ clients = {CLIENTS}, classes = 3, deadline = 5, wait = 0.3, retries = 0{more} }}
"""
    )
    (place / "app" / "federation.py").write_text(FEDERATION)
    if signed:
        keys.make(place / "keys")
    return Deployed(place)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    made = deployed(tmp_path_factory.mktemp("audited"))
    made.serve()
    yield made


def rewritten(run: Deployed, file: Path, change: Callable[[Rows], Rows | None], signer: Signer | None) -> Path:
    """The log with other rows, chained anew, and signed anew where there is a signer: what its owner could do."""
    rows = RowLog(run.log, chained=True).read().rows
    rows = change(rows) or rows
    file.write_bytes(b"")
    log = RowLog(file, chained=True)
    for number, row in enumerate(rows):
        row = {**row, "n": number}
        if row["event"] == "started" and signer is not None:
            row["certificate"] = signer.certificate
        if row["event"] == "signed":
            head = Head(id=run.report().id, rows=number, chain=log.chain, signature=row["signature"])
            row |= {"of": head.chain, "rows": number}
            if signer is not None and not is_signed(head, signer.certificate):
                row["signature"] = signer.sign(head)
        log.append(row)
    return file


def place_of(rows: Rows, event: str, **facts: Any) -> int:
    (first, *_) = [k for k, row in enumerate(rows) if row["event"] == event and facts.items() <= row.items()]
    return first


# --- what it holds ----------------------------------------------------------------------------------------------------


def test_it_tells_who_joined_what_was_sent_what_counted_and_every_model(run: Deployed) -> None:
    report = run.report(None, 0, 1, 2)
    assert report.problems == [] and report.notes == [] and report.receipts == 2 * 2 * CLIENTS
    events = [row["event"] for row in report.rows if row["event"] != "signed"]
    a_round = ["sent", "received", "sent", "received", "round"]  # training, and the clients' tests
    assert events == ["started", *["joined"] * CLIENTS, *a_round, *a_round, "ended"]
    started, ended = report.rows[0], report.rows[-2]
    assert started["run"] == "there" and len(started["settings"]) >= 16 and set(started["code"]) >= {"source", "torch"}
    assert {client for row in report.rows if row["event"] == "joined" for client in row["clients"]} == {"0", "1", "2"}
    trained = report.rows[place_of(report.rows, "received", rule="train")]
    receipt = RowLog(run.receipts(1), chained=True).read().rows[0]
    assert trained["replies"]["1"] == receipt["replies"]["1"] and len(set(trained["replies"].values())) == CLIENTS
    assert [row["used"] for row in report.rows if row["event"] == "round"] == [[0, 1, 2]] * 2
    assert ended["status"] == "finished" and "model.safetensors" in ended["files"]


@pytest.mark.parametrize("algorithm", ["scaffold", "simprox", "simfedswap", "fedavgm", "ditto", "fedbuff"])
def test_every_kind_of_algorithm_fits(tmp_path: Path, algorithm: str) -> None:
    """Control variates, own parts for each client, momentum, models of their own, and a server with a buffer."""
    made = deployed(tmp_path, algorithm=algorithm)
    made.serve()
    report = made.report(None, 0, 1, 2)
    assert report.problems == [] and len([row for row in report.rows if row["event"] == "round"]) == 2


def test_a_refused_reply_is_in_the_log_with_its_reason(tmp_path: Path) -> None:
    made = deployed(tmp_path)

    def lie(grid: Loopback, node: int, reply: Any) -> Any:
        if node == sorted(grid.apps)[1] and "answer" in reply.content:
            (said,) = wire.get_json(reply.content, "answer")
            wire.put_json(reply.content, "answer", [{**said, "examples": 10_000}])
        return reply

    made.serve(lie)
    report = made.report(None, 0, 1, 2)
    assert report.problems == []
    trained = report.rows[place_of(report.rows, "received", rule="train")]
    assert [(one["client"], one["reason"]) for one in trained["refused"]] == [("1", "examples")]
    assert [row["used"] for row in report.rows if row["event"] == "round"] == [[0, 2]] * 2
    assert any("round 1, train: the reply of client 1 was refused: examples" in note for note in report.notes)


def test_secure_sums_leave_digests_of_masked_replies(tmp_path: Path) -> None:
    made = deployed(tmp_path, more=", secure_aggregation = true")
    made.serve(settings="rounds=1")
    report = made.report(None, 0, 1, 2)
    assert report.problems == [] and report.notes == []
    trained = report.rows[place_of(report.rows, "received", rule="train")]
    assert trained["masked"] is True and len(set(trained["replies"].values())) == CLIENTS


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_killed_server_continues_the_chain_also_after_a_torn_row(tmp_path: Path) -> None:
    made = deployed(tmp_path)

    def killed(grid: Loopback, node: int, reply: Any) -> Any:
        if grid.kinds.count("train") > CLIENTS:  # in the second round
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        made.serve(killed)
    before = made.log.read_bytes()
    assert any("does not end with the end of the run" in why for why in made.report(None, 0, 1).problems)
    assert made.report(None, 0, 1, unfinished=True).problems == []
    with made.log.open("ab") as file:
        file.write(b'{"chain":"12ab')  # a write that was cut
    assert any("is torn" in why for why in made.report(unfinished=True).problems)
    made.serve()
    assert made.log.read_bytes().startswith(before)
    report = made.report(None, 0, 1, 2)
    assert report.problems == []
    assert [row["round"] for row in report.rows if row["event"] == "started"] == [0, 1]
    assert any("the server started again, after round 1" in note for note in report.notes)
    with pytest.raises(
        RecordError, match=r"audit.jsonl, line 2 is damaged"
    ):  # a server does not build on a changed log
        made.log.write_bytes(made.log.read_bytes().replace(b'"rows":1,', b'"rows":2,'))
        made.serve(settings="rounds=3")


# --- changes afterwards -----------------------------------------------------------------------------------------------


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.started(done=0, model={}, asynchronous=False)
    log.ended("finished")
    data = log._log.path.read_bytes()
    assert check(log._log.path).problems == [] and 500 < len(data) < 3000
    draw = random.Random(1)
    for place in range(len(data)):
        other = draw.choice([byte for byte in range(256) if byte != data[place]])
        log._log.path.write_bytes(data[:place] + bytes([other]) + data[place + 1 :])
        assert check(log._log.path).problems, (place, other)


def test_deleted_swapped_repeated_and_cut_lines_are_found(run: Deployed, tmp_path: Path) -> None:
    lines, file = run.log.read_bytes().splitlines(keepends=True), tmp_path / "audit.jsonl"
    changes = []
    for k in range(len(lines)):
        changes += [lines[:k] + lines[k + 1 :], lines[:k], [*lines[: k + 1], *lines[k:]], [*lines[:k], lines[k][:-9]]]
        if k + 1 < len(lines):
            changes.append([*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]])
    for changed in changes:
        file.write_bytes(b"".join(changed))
        assert check(file).problems
    file.write_bytes(b"".join(lines))
    assert check(file).problems == []


def no_longer_used(rows: Rows) -> None:
    rows[place_of(rows, "round", round=1)]["used"] = [0, 1]


def test_a_log_written_anew_without_the_servers_key_is_found_by_its_signatures(run: Deployed, tmp_path: Path) -> None:
    found = run.report(rewritten(run, tmp_path / "audit.jsonl", no_longer_used, None))
    assert "the signature is not that of the server's certificate" in found.problems[0]


def test_a_signature_by_another_key_is_refused(run: Deployed, tmp_path: Path) -> None:
    made = keys.make(tmp_path / "other")
    log = rewritten(run, tmp_path / "audit.jsonl", no_longer_used, Signer(made.certificate, made.certificate_key))
    assert run.report(log, authority=None).problems == []  # whose signature it is, only the CA can tell
    assert "certificate is refused: it was not issued by the CA" in run.report(log).problems[0]
    with pytest.raises(Invalid, match=r"is no certificate"):
        run.report(authority=run.log)


def test_a_log_that_the_server_itself_writes_anew_is_found_by_receipts(run: Deployed, tmp_path: Path) -> None:
    log = rewritten(run, tmp_path / "audit.jsonl", no_longer_used, run.signer)
    assert run.report(log).problems == []  # the chain and the signatures are right
    for node in range(CLIENTS):
        problems = run.report(log, node).problems
        assert len(problems) == 2 and all(
            "told another history, under a signature of its certificate" in one for one in problems
        )


@pytest.mark.parametrize("signed", [True, False])
def test_rows_cut_off_at_the_end_are_found_by_receipts(run: Deployed, tmp_path: Path, signed: bool) -> None:
    def cut(rows: Rows) -> Rows:
        return [*rows[: place_of(rows, "sent", rule="train", round=2)], *rows[-2:]]

    log = rewritten(run, tmp_path / "audit.jsonl", cut, run.signer if signed else None)
    assert any("was cut" in why or "another history" in why or "cut off" in why for why in run.report(log, 0).problems)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda replies: replies.update({"0": "0" * 64}), "round 1, test: the reply of client 0 was replaced"),
        (lambda replies: replies.pop("0"), "round 1, test: the reply of client 0 was dropped"),
    ],
)
def test_a_reply_that_was_dropped_or_replaced_after_the_last_head_is_found(
    run: Deployed, tmp_path: Path, change: Any, why: str
) -> None:
    def tamper(rows: Rows) -> None:
        change([row for row in rows if row["event"] == "received"][-1]["replies"])

    log = rewritten(run, tmp_path / "audit.jsonl", tamper, run.signer)
    assert run.report(log, 1, 2).problems == []
    assert [why in one for one in run.report(log, 0).problems] == [True]


def test_two_members_that_were_told_different_histories_find_it_together(run: Deployed, tmp_path: Path) -> None:
    """A server with two logs: each member alone finds that its own fits."""
    other = rewritten(run, tmp_path / "audit.jsonl", no_longer_used, run.signer)
    history, fork = RowLog(other, chained=True).read(), tmp_path / "fork.jsonl"
    fork.write_bytes(b"")
    log = RowLog(fork, chained=True)
    for row in RowLog(run.receipts(1), chained=True).read().rows:
        head = Head(id=history.rows[0]["id"], rows=row["head"]["rows"], chain=history.chains[row["head"]["rows"] - 1])
        log.append({**row, "head": asdict(head) | {"signature": run.signer.sign(head)}})
    assert run.report(run.log, 0).problems == []
    mine = check(other, authority=run.authority)
    compare(mine, [fork])
    assert mine.problems == []
    report = run.report(run.log, 0)
    compare(report, [run.receipts(0), fork])
    assert any("were told different histories at row" in why for why in report.problems)


def test_what_does_not_follow_is_found_although_it_is_signed(run: Deployed, tmp_path: Path) -> None:
    cases: dict[str, Callable[[Rows], Any]] = {
        "round 2 was trained from model": lambda rows: rows[place_of(rows, "sent", round=2)].update(model="0" * 64),
        "from whom nothing was received": lambda rows: rows[place_of(rows, "round", round=2)].update(used=[0, 7]),
        "which has not joined as them": lambda rows: rows.pop(place_of(rows, "joined")) and None,
        "replies of clients that were not asked": lambda rows: rows[place_of(rows, "received")]["replies"].update(
            {"9": ""}
        ),
        "clients tested model": lambda rows: rows[place_of(rows, "sent", rule="test")].update(model="0" * 64),
        "has rows that no server writes": lambda rows: rows[place_of(rows, "round")].pop("used") and None,
        "'problem' is nothing that happens": lambda rows: rows[place_of(rows, "round")].update(event="problem"),
        "does not begin with the start": lambda rows: rows.pop(0) and None,
    }
    for why, change in cases.items():
        log = rewritten(run, tmp_path / "audit.jsonl", lambda rows, change=change: change(rows) and None, run.signer)
        assert any(why in one for one in run.report(log).problems), (why, run.report(log).problems)


def test_a_result_that_is_not_the_one_the_run_ended_with_is_found(run: Deployed) -> None:
    file = run.folder / "model.safetensors"
    before = file.read_bytes()
    try:
        file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert ["model.safetensors is not the file" in why for why in run.report().problems] == [True]
    finally:
        file.write_bytes(before)


def unsigned(since: int) -> Callable[[Rows], Rows]:
    """All rows from one of the server's starts on without certificate and signatures."""

    def change(rows: Rows) -> Rows:
        starts = [k for k, row in enumerate(rows) if row["event"] == "started"]
        for row in rows[starts[since] :]:
            row |= {"certificate": ""} if row["event"] == "started" else {}
            row |= {"signature": ""} if row["event"] == "signed" else {}
        return rows

    return change


def test_a_log_without_signatures_is_none_of_a_server_with_a_certificate(run: Deployed, tmp_path: Path) -> None:
    log = rewritten(run, tmp_path / "audit.jsonl", unsigned(0), None)
    assert "certificate is refused: there is none" in run.report(log).problems[0]
    assert any("it is not signed (no TLS)" in note for note in run.report(log, authority=None).notes)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    """A run that found too few clients after its first round, and was continued."""
    made = deployed(tmp_path_factory.mktemp("twice"))

    def gone(grid: Loopback, node: int, reply: Any) -> Any:
        grid.deaf |= set(grid.apps) if grid.kinds.count("evaluate") == CLIENTS else set()
        return reply

    with pytest.raises(TooFewClients):
        made.serve(gone)
    made.serve()
    assert made.report(None, 0, 1, 2).problems == []
    return made


def test_signatures_that_stop_are_found(twice: Deployed, tmp_path: Path) -> None:
    log = rewritten(twice, tmp_path / "audit.jsonl", unsigned(1), None)
    for authority in (None, twice.authority):
        assert any("from here on nothing is signed" in why for why in twice.report(log, authority=authority).problems)


def test_a_log_cut_back_to_an_earlier_end_is_not_that_of_the_folder(twice: Deployed, tmp_path: Path) -> None:
    lines = twice.log.read_bytes().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    first = place_of(rows, "ended")
    assert rows[first]["status"] == "too few clients" and rows[first]["files"] == {}
    folder = Path(shutil.copytree(twice.folder, tmp_path / "there"))
    (folder / "audit.jsonl").write_bytes(b"".join(lines[: first + 2]))  # whole and signed in itself
    assert any("it is another run's log, or rows were cut off" in why for why in twice.report(folder).problems)
    assert any(": cut off" in why for why in twice.report(folder / "audit.jsonl", 0).problems)


def test_the_log_of_another_run_of_the_same_server_is_not_that_of_the_folder(run: Deployed, tmp_path: Path) -> None:
    other = Deployed(tmp_path)
    shutil.copytree(run.place / "keys", tmp_path / "keys")
    shutil.copytree(run.place / "app", tmp_path / "app")
    with pytest.raises(TooFewClients):
        other.serve(lambda grid, node, reply: grid.deaf.update(grid.apps) or reply)
    folder = Path(shutil.copytree(run.folder, tmp_path / "there"))
    shutil.copy(other.log, folder / "audit.jsonl")
    assert any("it is another run's log" in why for why in run.report(folder).problems)


def test_rows_after_the_last_signature_are_told(run: Deployed, tmp_path: Path) -> None:
    log = rewritten(run, tmp_path / "audit.jsonl", lambda rows: rows[: place_of(rows, "received") + 1], run.signer)
    assert any(
        "are not signed: anyone could have added them" in note for note in run.report(log, unfinished=True).notes
    )


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_found_and_exports_it(run: Deployed, tmp_path: Path) -> None:
    words = [
        "audit",
        str(run.folder),
        "--root-certificates",
        str(run.authority),
        "--receipts",
        str(run.place / "receipts"),
    ]
    for name in ("out.json", "out.csv"):
        said = CliRunner().invoke(cli, [*words, "--export", str(tmp_path / name)])
        assert said.exit_code == 0 and "12 receipts were compared" in said.output and "everything fits" in said.output
    rows = RowLog(run.log, chained=True).read().rows
    found = json.loads((tmp_path / "out.json").read_text())
    assert [{k: v for k, v in row.items() if k != "chain"} for row in found["rows"]] == rows
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["event"] for row in table] == [row["event"] for row in rows]
    assert CliRunner().invoke(cli, [*words, "--export", "x.txt"]).exit_code == 2
    bad = tmp_path / "audit.jsonl"
    bad.write_bytes(run.log.read_bytes().replace(b'"used":[0,1,2]', b'"used":[0,1]', 1))
    said = CliRunner().invoke(cli, ["audit", str(bad)])
    assert said.exit_code == 1 and "PROBLEM:" in said.output and "is damaged" in said.output
    empty = tmp_path / "empty"
    empty.mkdir()
    said = CliRunner().invoke(cli, [*words[:2], "--receipts", str(empty)])
    assert said.exit_code == 2


def test_damaged_receipts_are_named(run: Deployed, tmp_path: Path) -> None:
    file = tmp_path / "there.jsonl"
    file.write_bytes(run.receipts(0).read_bytes().replace(b'"round":2', b'"round":3', 1))
    report = run.report()
    compare(report, [file])
    assert "there.jsonl, line 3 is damaged" in report.problems[0]
    file.write_bytes(b"")
    RowLog(file, chained=True).append({"event": "answered", "head": {}})
    report = run.report()
    compare(report, [file])
    assert "row 0 is no receipt" in report.problems[0] and canonical.decode(file.read_bytes())["head"] == {}
