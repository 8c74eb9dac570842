"""A run folder is there whole or not at all, its rows are reproducible bytes, and it holds no secrets."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.runs import canonical, checkpoint
from consilience.runs.folder import RecordError, RunFolder, redacted, runs
from consilience.runs.identity import changed_keys
from consilience.runs.lock import RunLocked
from consilience.runs.redact import REDACTED, secrets_in

CONFIG = 'rounds = 3\n\n[algorithm]\nname = "simprox"\n'


def make(root: Path, name: str = "run-1", **facts: Any) -> RunFolder:
    return RunFolder.create(root, name, CONFIG, facts)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_new_folder_holds_config_facts_and_empty_records(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs", device="cpu", partition=np.float32(0.5), lanes=("batched",))
    assert folder.path == tmp_path / "runs" / "run-1" and folder.name == "run-1"
    assert sorted(os.listdir(tmp_path / "runs")) == ["run-1"]
    assert sorted(os.listdir(folder.path)) == [
        "checkpoints",
        "clients.jsonl",
        "config.toml",
        "metrics.jsonl",
        "run.json",
        "timing.jsonl",
    ]
    assert folder.config_text() == CONFIG
    facts = folder.facts()
    assert facts["format"] == 2 and facts["name"] == "run-1" and facts["platform"] == platform.platform()
    assert facts["versions"]["torch"] == torch.__version__ and facts["versions"]["numpy"] == np.__version__
    assert facts["versions"]["python"] == platform.python_version() and facts["versions"]["consilience"]
    assert facts["device"] == "cpu" and facts["partition"] == 0.5 and facts["lanes"] == ["batched"]
    assert folder.rows().rows == [] and folder.partition == folder.path / "partition.npz"
    assert RunFolder.open(folder.path).facts() == facts


def test_a_folder_that_holds_a_run_is_never_overwritten(tmp_path: Path) -> None:
    folder = make(tmp_path)
    before = (folder.path / "run.json").read_bytes()
    with pytest.raises(Invalid, match=r"holds a run already.*resume.*another run name"):
        RunFolder.create(tmp_path, "run-1", "rounds = 9", {})
    assert (folder.path / "run.json").read_bytes() == before and folder.config_text() == CONFIG
    assert os.listdir(tmp_path) == ["run-1"]


def test_other_peoples_files_are_left_alone_and_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Invalid, match=r"chapter\.tex.*holds no run"):
        make(tmp_path, "thesis")
    with pytest.raises(Invalid, match="it is a file"):
        make(tmp_path, "file")
    assert make(tmp_path, "empty").config_text() == CONFIG
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "thesis"]


def test_drafts_of_dead_processes_are_removed_those_of_living_ones_are_not(tmp_path: Path) -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    (tmp_path / f".run-1.tmp-{dead}").mkdir()
    (tmp_path / f".run-1.tmp-{os.getppid()}").mkdir()
    (tmp_path / f".run-2.tmp-{dead}").mkdir()
    make(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([f".run-1.tmp-{os.getppid()}", f".run-2.tmp-{dead}", "run-1"])


def test_a_config_must_be_toml_without_secrets(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="TOML"):
        RunFolder.create(tmp_path, "a", "rounds = ", {})
    with pytest.raises(Invalid, match=r"hub\.token.*environment variable") as refusal:
        RunFolder.create(tmp_path, "a", 'rounds = 1\n[hub]\ntoken = "hf_12345"', {})
    assert "hf_12345" not in str(refusal.value) and os.listdir(tmp_path) == []


def test_opening_what_is_no_run_says_what_was_looked_for(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", Path(__file__)):
        with pytest.raises(FileNotFoundError, match=r"run\.json") as refusal:
            RunFolder.open(path)
        assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff", b'{"format": 2}', b'{"format": 3}', b'{"format": true}', b"[" * 100_000, b"{}"]
)
def test_a_damaged_or_foreign_run_json_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    folder = make(tmp_path)
    (folder.path / "run.json").write_bytes(text)
    with pytest.raises(RecordError, match=r"run\.json"):
        RunFolder.open(folder.path)


def test_facts_are_added_and_replaced(tmp_path: Path) -> None:
    folder = make(tmp_path, lane="serial")
    folder.record(lane="batched", partition_hash="abc", best=float("nan"), scores=torch.tensor([1.0, float("inf")]))
    facts = RunFolder.open(folder.path).facts()
    assert facts["lane"] == "batched" and facts["partition_hash"] == "abc" and facts["name"] == "run-1"
    assert facts["best"] is None and facts["scores"] == [1.0, None]
    with pytest.raises(Invalid, match="'name'"):
        folder.record(name="other")
    with pytest.raises(Invalid, match="'format'"):
        make(tmp_path, "run-2", format=7)
    with pytest.raises(Invalid, match=r"facts\.thing is object"):
        folder.record(thing=object())
    assert RunFolder.open(folder.path).facts() == facts


def test_rows_are_canonical_bytes_and_their_digest_is_told(tmp_path: Path) -> None:
    folder = make(tmp_path)
    length, sha = folder.metrics.append(
        {"round": 0, "loss": 0.1 + 0.2, "accuracy": np.float32(0.5), "weights": torch.ones(2)}
    )
    row = b'{"accuracy":0.5,"loss":0.30000000000000004,"round":0,"weights":[1.0,1.0]}'
    chain = digest(row)
    expected = row.replace(b',"loss"', b',"chain":"%s","loss"' % chain.encode()) + b"\n"
    data = (folder.path / "metrics.jsonl").read_bytes()
    assert data == expected and (length, sha) == (len(expected), digest(expected))
    assert folder.metrics.append({"b": 1, "a": float("nan"), "c": [float("inf"), "\n\u2028é"]}, sync=False)[0] > length
    last = (folder.path / "metrics.jsonl").read_bytes().split(b"\n")[1]
    row = b'{"a":null,"b":1,"c":[null,"\\n\\u2028\\u00e9"]}'
    assert last == row[:-1] + b',"chain":"%s"}' % digest(chain.encode() + row).encode()
    assert folder.metrics.position() == RunFolder.open(folder.path).metrics.position()
    assert folder.rows().rows[1] == {"a": None, "b": 1, "c": [None, "\n\u2028é"]} and folder.rows().note == ""


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.none()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text()
        | st.lists(st.booleans()),
    )
)
def test_rows_survive_json_and_do_not_depend_on_the_order_of_keys(row: dict[str, Any]) -> None:
    line = canonical.encode(canonical.to_json_types(row, "row"))
    assert canonical.decode(line) == row and b"\n" not in line and line.isascii()
    assert line == canonical.encode(canonical.to_json_types(dict(reversed(row.items())), "row"))


def test_resuming_cuts_the_rows_written_after_the_checkpoint(tmp_path: Path) -> None:
    undisturbed, crashed = make(tmp_path, "a"), make(tmp_path, "b")
    for round in range(6):
        undisturbed.metrics.append({"round": round})
    for round in range(4):
        position = crashed.metrics.append({"round": round})
        if round == 2:
            checkpoint.save(crashed.checkpoints, round, {}, {"metrics": position})
    with (crashed.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"rou')
    crashed.timing.append({"seconds": 1})
    timing = (crashed.path / "timing.jsonl").read_bytes()
    (crashed.path / "timing.jsonl").write_bytes(timing + b'{"sec')

    resumed = RunFolder.open(crashed.path)
    assert "line 5 is torn" in resumed.rows().note and len(resumed.rows().rows) == 4
    with pytest.raises(RecordError, match="torn"):
        resumed.metrics.append({"round": 9})
    found = checkpoint.load_latest(resumed.checkpoints)
    assert found is not None
    resumed.cut_back(found.facts["metrics"], None)
    for round in range(found.round + 1, 6):
        resumed.metrics.append({"round": round})
    assert (resumed.path / "metrics.jsonl").read_bytes() == (undisturbed.path / "metrics.jsonl").read_bytes()
    assert (resumed.path / "timing.jsonl").read_bytes() == timing
    assert resumed.metrics.position() == undisturbed.metrics.position()


def test_a_resume_before_the_first_checkpoint_starts_from_an_empty_file(tmp_path: Path) -> None:
    folder = make(tmp_path)
    nothing = folder.metrics.position()
    folder.metrics.append({"round": 0})
    folder.cut_back(nothing, nothing)
    assert nothing == (0, digest(b"")) and folder.rows().rows == []


def test_rows_that_were_changed_or_lost_are_noticed(tmp_path: Path) -> None:
    folder = make(tmp_path)
    position = [folder.metrics.append({"round": round}) for round in range(3)][-1]
    file = folder.path / "metrics.jsonl"
    original = file.read_bytes()
    for at in range(len(original)):
        changed = bytearray(original)
        changed[at] ^= 1
        file.write_bytes(changed)
        with pytest.raises(RecordError, match=r"metrics\.jsonl was changed"):
            RunFolder.open(folder.path).cut_back(position, None)
        if at == len(original) - 1:
            assert "torn" in RunFolder.open(folder.path).rows().note
        else:
            with pytest.raises(RecordError, match=r"metrics\.jsonl, line"):
                RunFolder.open(folder.path).rows()
        assert file.read_bytes() == changed
    file.write_bytes(original[:-1])
    for length in (position[0], -1, 10**12):
        with pytest.raises(RecordError, match=r"metrics\.jsonl holds"):
            RunFolder.open(folder.path).cut_back((length, position[1]), None)


def test_a_second_writer_is_noticed(tmp_path: Path) -> None:
    folder = make(tmp_path)
    folder.metrics.append({"round": 0})
    RunFolder.open(folder.path).metrics.append({"round": 1})
    with pytest.raises(RecordError, match=r"metrics\.jsonl: holds \d+ bytes where \d+ were left"):
        folder.metrics.append({"round": 1})


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b'{"a":NaN}', b"\xff", b'{"a":1,"a":2}', b"\0\0\0"])
def test_damage_before_the_last_line_is_an_error_with_its_line(tmp_path: Path, line: bytes) -> None:
    folder = make(tmp_path)
    folder.metrics.append({"round": 0})
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(line + b'\n{"round":2}\n')
    with pytest.raises(RecordError, match=r"metrics\.jsonl, line 2"):
        folder.rows()


def test_a_run_can_be_locked(tmp_path: Path) -> None:
    folder = make(tmp_path)
    with folder.lock(), pytest.raises(RunLocked, match=f"process {os.getpid()}"):
        RunFolder.open(folder.path).lock().acquire()
    with folder.lock():
        pass


def test_a_log_is_added_to_and_never_written_elsewhere(tmp_path: Path) -> None:
    folder = make(tmp_path)
    for word in ("one", "two"):
        with folder.open_log("deploy.log") as file:
            file.write(word + "\n")
    assert (folder.path / "deploy.log").read_text() == "one\ntwo\n"
    victim = tmp_path / "victim"
    for plant in (lambda place: place.symlink_to(victim), lambda place: os.link(victim, place), os.mkfifo, os.mkdir):
        victim.write_text("precious")
        (folder.path / "deploy.log").unlink()
        plant(folder.path / "deploy.log")
        with pytest.raises(RecordError, match=r"deploy\.log: it .*in its place$"):
            folder.open_log("deploy.log")
        assert victim.read_text() == "precious"


def test_runs_are_listed_with_a_summary_even_when_damaged(tmp_path: Path) -> None:
    for name in ("b", "a", "broken", "torn"):
        make(tmp_path, name, device=name)
    (tmp_path / ".hidden.tmp-1").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "other").mkdir()
    folder = RunFolder.open(tmp_path / "a")
    for round in range(3):
        folder.metrics.append({"round": round, "accuracy": round / 10})
    checkpoint.save(folder.checkpoints, 2, {}, {})
    (tmp_path / "broken" / "run.json").write_text("{\x1b")
    RunFolder.open(tmp_path / "torn").metrics.append({"round": 0})
    with (tmp_path / "torn" / "metrics.jsonl").open("a") as file:
        file.write('{"r')
    found = {summary.name: summary for summary in runs(tmp_path)}
    assert list(found) == ["a", "b", "broken", "torn"]
    assert (
        found["a"].rounds == 3 and found["a"].last_row == {"round": 2, "accuracy": 0.2} and found["a"].saved_round == 2
    )
    assert found["a"].facts["device"] == "a" and found["a"].note == ""
    assert found["b"].rounds == 0 and found["b"].saved_round is None
    assert "run.json is damaged" in found["broken"].note and found["broken"].note.isprintable()
    assert found["torn"].rounds == 1 and "torn" in found["torn"].note
    assert runs(tmp_path / "absent") == [] and runs(tmp_path / "notes.txt") == []


SECRETS: dict[str, Any] = {
    "token": "s3cr3t",
    "hub_token": "s3cr3t",
    "authToken": "s3cr3t",
    "hf.token": "s3cr3t",
    "HFTOKEN": "s3cr3t",
    "api-key": "s3cr3t",
    "apiKey": "s3cr3t",
    "API_KEY": "s3cr3t",
    "apikey": "s3cr3t",
    "key": "s3cr3t",
    "private_key": "s3cr3t",
    "private_key_pem": "s3cr3t",
    "access_keys": ["s3cr3t"],
    "password": "s3cr3t",
    "db_password": 1234567,
    "passwd": "s3cr3t",
    "passphrase": "s3cr3t",
    "client_secret": "s3cr3t",
    "secrets": {"inner": "s3cr3t"},
    "credentials": {"user": "s3cr3t"},
    "tokens": ["s3cr3t"],
    "secret_value": "s3cr3t",
    "address": "https://me:s3cr3t@example.org/x",
    "mirrors": ["https://s3cr3t@example.org"],
    "bearer": "s3cr3t",
    "hub_bearer": "s3cr3t",
    "Authorization": "Basic s3cr3t",
    "headers": ["accept: */*", "x-auth: Bearer s3cr3t"],
    "header": "bearer  s3cr3t",
}
HARMLESS: dict[str, Any] = {
    "max_tokens": 128,
    "token_count": 7,
    "tokens": 128,
    "tokenizer": "wordpiece",
    "text_key": "body",
    "label_key": "y",
    "changed_keys": ["train.lr"],
    "monkey": "see",
    "keyboard": "qwerty",
    "keep": 2,
    "token": None,
    "password": "",
    "use_token": True,
    "url": "https://example.org/a@b",
    "note": "the bearer's name",
    "role": "bearer",
    "seed": 3,
}


@pytest.mark.parametrize("key", SECRETS)
def test_secrets_are_redacted_at_any_depth(tmp_path: Path, key: str) -> None:
    nested = {"a": {"list": [{key: SECRETS[key]}]}}
    assert "s3cr3t" not in json.dumps(redacted(nested)) and "1234567" not in json.dumps(redacted(nested))
    assert REDACTED in json.dumps(redacted(nested)) and secrets_in(nested) == [f"a.list.{key}"]
    folder = RunFolder.create(tmp_path, "run", CONFIG, {key: SECRETS[key]} | nested)
    folder.record(later=nested, **{key: SECRETS[key]})
    for file in folder.path.rglob("*"):  # grep the artefacts
        assert not file.is_file() or not any(word in file.read_bytes() for word in (b"s3cr3t", b"1234567")), file


@pytest.mark.parametrize("key", HARMLESS)
def test_settings_that_only_sound_secret_stay(key: str) -> None:
    mapping = {"deep": {key: HARMLESS[key]}, key: HARMLESS[key]}
    assert redacted(mapping) == mapping and secrets_in(mapping) == []


def test_redacting_leaves_its_input_alone() -> None:
    mapping = {"a": {"token": "x"}}
    redacted(mapping)
    assert mapping == {"a": {"token": "x"}}


def test_changed_settings_are_named_with_both_values() -> None:
    before = {"rounds": 3, "train": {"lr": 0.1, "old": 1, "same": [1]}, "hub": {"token": "abc"}, "flag": 1}
    now = {"rounds": 3, "train": {"lr": 0.2, "new": "x\n", "same": [1]}, "hub": {"token": "xyz"}, "flag": True}
    assert changed_keys(before, now) == [
        "train.lr: 0.1 -> 0.2",
        "train.old: 1 -> (absent)",
        "train.new: (absent) -> 'x\\\\n'",
        "hub.token: '***' -> '***'",
        "flag: 1 -> True",
    ]
    assert changed_keys(before, before) == []


def test_a_large_file_is_covered_and_its_change_is_noticed(tmp_path: Path) -> None:
    folder = make(tmp_path)
    file = folder.path / "model.safetensors"
    file.write_bytes(bytes(20 << 20))  # more than facts and configs may have
    folder.cover(file.name)
    assert len(folder.read(file.name)) == 20 << 20
    with file.open("r+b") as opened:
        opened.seek(17 << 20)
        opened.write(b"x")
    with pytest.raises(RecordError, match=r"model\.safetensors was changed"):
        folder.read(file.name)
    folder.uncover(file.name)
    assert "model.safetensors" not in folder.facts()["files"]
